"""Adapter: a pipeline's microbatches that are counted instead of run.

torch's schedule runs in full, with every message and every buffer that it takes; the
forward, loss and backward of stages are run for some microbatches alone. The only file
that knows what torch's stages keep between these. Seen to work with torch 2.13.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import flatten_args
from torch.distributed.pipelining.stage import _PipelineStageBase

from executors.dryrun.replay import Action, Replay

__all__ = ["first_of_each_kind", "replayed_pipeline"]

#: How many microbatches of each kind are run, beside the first of all: two whose
#: effects are compared.
_ENOUGH = 2

_FORWARD = _PipelineStageBase.forward_one_chunk
_BACKWARD = _PipelineStageBase.backward_one_chunk
_WEIGHTS = _PipelineStageBase.backward_weight_one_chunk
_LOSS = schedules._PipelineSchedule._maybe_compute_loss


def first_of_each_kind(
    schedule: Any, *, by_neighbour: bool
) -> dict[int, frozenset[int]]:
    """Microbatches of each stage of this rank that cover every kind of action.

    Args:
        schedule: torch's.
        by_neighbour: Whether what an action does depends on what its stage did just
            before, as where backward leaves parameters gathered for forward.

    Returns:
        By index of the stage.
    """
    order = schedule._get_pipeline_order() if _is_single(schedule) else None
    order = order or schedule.pipeline_order
    rank = schedule._stage.group_rank if _is_single(schedule) else schedule.rank
    seen: dict[tuple[int, int], tuple[Hashable, ...]] = defaultdict(tuple)
    before: dict[int, Hashable] = {}
    backward: dict[int, dict[int, None]] = defaultdict(dict)
    for action in _computations(order[rank]):
        kind, stage = action.computation_type, action.stage_index
        context = before.get(stage) if by_neighbour else None
        seen[stage, action.microbatch_index] += ((kind, context),)
        before[stage] = kind
        if kind != schedules._ComputationType.FORWARD:
            backward[stage].setdefault(action.microbatch_index, None)
    chosen: dict[int, set[int]] = defaultdict(set)
    counts: dict[tuple[int, Hashable], int] = defaultdict(int)
    for (stage, microbatch), kinds in sorted(seen.items(), key=lambda item: item[0]):
        if microbatch == 0 or counts[stage, kinds] < _ENOUGH:
            chosen[stage].add(microbatch)
            counts[stage, kinds] += microbatch > 0
    # The first backward makes gradients, whichever microbatch it is of.
    for stage, microbatches in backward.items():
        chosen[stage].update(list(microbatches)[: 1 + _ENOUGH])
    return {stage: frozenset(picked) for stage, picked in chosen.items()}


@contextmanager
def replayed_pipeline(replay: Replay) -> Iterator[None]:
    """Run or count each action of a stage in the block, as a replay decides."""
    held: dict[tuple[int, int], Any] = {}
    with ExitStack() as stack:
        for owner, name, double in (
            (_PipelineStageBase, "forward_one_chunk", partial(_forward, replay)),
            (
                _PipelineStageBase,
                "backward_one_chunk",
                partial(_backward, replay, held),
            ),
            (
                _PipelineStageBase,
                "backward_weight_one_chunk",
                partial(_backward_weight, replay, held),
            ),
            (
                schedules._PipelineSchedule,
                "_maybe_compute_loss",
                partial(_compute_loss, replay),
            ),
        ):
            method = _as_method(double)
            stack.enter_context(mock.patch.object(owner, name, method))
        yield


def _as_method(function: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return method


def _is_single(schedule: Any) -> bool:
    return isinstance(schedule, schedules.PipelineScheduleSingle)


def _computations(actions: Iterable[Any]) -> Iterator[Any]:
    """Forwards and backwards of an order, also of those that overlap."""
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:
            yield from _computations(action.sub_actions)
        elif action.microbatch_index is not None:
            yield action


def _forward(
    replay: Replay,
    stage: Any,
    chunk: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    save_forward_output: bool = True,
) -> Any:
    action = Action(kind="forward", part=stage.stage_index, microbatch=chunk)
    inputs = args if stage.is_first else stage._retrieve_recv_activations(chunk)
    given = [*flatten_args(inputs), *flatten_args(kwargs or {})]
    if replay.is_run(action):
        call = partial(_FORWARD, stage, chunk, args, kwargs, save_forward_output)
        numbers = replay.numbers(given)
        return replay.run(action, call, given=numbers, products=_tensors)
    values = replay.count(action, given)
    stage.fwd_cache[chunk] = (values, given)
    # Stages return tuples, but for the last.
    return values[0] if stage.is_last else values


def _compute_loss(
    replay: Replay,
    schedule: Any,
    stage: Any,
    output: Any,
    target_mbs: Any,
    chunk: int,
    loss_kwargs: Any = None,
) -> None:
    if not stage.is_last or schedule._loss_fn is None:
        return
    action = Action(kind="loss", part=stage.stage_index, microbatch=chunk)
    losses = schedule._internal_losses
    if replay.is_run(action):
        call = partial(_LOSS, schedule, stage, output, target_mbs, chunk, loss_kwargs)
        given = replay.numbers(_tensors(output))
        replay.run(action, call, given=given, products=lambda _: losses[-1:])
    else:
        losses += replay.count(action, _tensors(output))


def _backward(
    replay: Replay,
    held: dict[tuple[int, int], Any],
    stage: Any,
    chunk: int,
    loss: Any = None,
    full_backward: bool = True,
    last_backward: bool = False,
) -> None:
    kind = "backward" if full_backward else "input gradients"
    action = Action(kind=kind, part=stage.stage_index, microbatch=chunk)
    given = _given_backward(stage, chunk, loss)
    if replay.is_run(action):
        numbers = replay.numbers(given)
        del given
        replay.run(
            action,
            partial(_BACKWARD, stage, chunk, loss, full_backward, last_backward),
            given=numbers,
            products=lambda _: stage.bwd_cache[chunk],
        )
        return
    stage.bwd_cache[chunk] = replay.count(action, given)
    stage.fwd_cache.pop(chunk)
    if not full_backward:
        # torch, too, keeps all of it until the weights have their gradients.
        held[stage.stage_index, chunk] = given


def _backward_weight(
    replay: Replay,
    held: dict[tuple[int, int], Any],
    stage: Any,
    chunk: int,
    last_backward: bool = False,
) -> None:
    action = Action(kind="weight gradients", part=stage.stage_index, microbatch=chunk)
    if replay.is_run(action):
        given = replay.numbers(_leaves(stage.backward_state[chunk]))
        call = partial(_WEIGHTS, stage, chunk, last_backward)
        replay.run(action, call, given=given, products=_nothing)
    else:
        given = held.pop((stage.stage_index, chunk))
        replay.count(action, given)


def _given_backward(stage: Any, chunk: int, loss: Any) -> list[Any]:
    outputs, inputs = stage.fwd_cache[chunk]
    grads = () if stage.is_last else stage._retrieve_recv_grads(chunk)
    return [*outputs, *inputs, *grads, loss]


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _leaves(value: Any) -> list[torch.Tensor]:
    """Tensors of nested tuples and lists; what autograd's groups hold is not given."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in _leaves(part)]
    return []


def _nothing(_: Any) -> tuple[()]:
    return ()
