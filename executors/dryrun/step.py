"""A dry step whose microbatches are run until their effects are known.

Also the adapter to what ``fully_shard`` remembers between microbatches: which of its
groups of parameters are whole, and which gradients are there, decides what it does
next. The only file that knows these private parts of torch. Seen to work with torch
2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from executors.dryrun.pipeline import first_of_each_kind, replayed_pipeline
from executors.dryrun.replay import Action, Replay
from executors.dryrun.trace import StepTrace
from executors.steps import PlainStep
from executors.trainer import Trainer

__all__ = ["replayed_step"]

#: Microbatches at either end of gradient accumulation that are run. The first makes
#: gradients, and the last reduces them; two between are compared.
_FIRST, _LAST = 3, 1


@contextmanager
def replayed_step(
    trainer: Trainer, trace: StepTrace, *, patient: bool = False
) -> Iterator[Replay]:
    """Count, in the block, microbatches that would do what others did.

    Args:
        trainer: On fake tensors; its optimizer has its states.
        trace: Has been entered.
        patient: See :class:`executors.dryrun.replay.Replay`.
    """
    modules = {index: part.module for index, part in trainer.parts.items()}

    def state(part: int, gradients: bool) -> Hashable:
        return _sharding_state(modules[part], gradients=gradients)

    def settle(part: int, wanted: Hashable) -> None:
        _enter_state(modules[part], wanted, trace)

    pipeline = trainer.pipeline
    if pipeline is not None:
        frees = trainer.plan.strategy.zero_stage == 3
        forced = first_of_each_kind(pipeline.schedule, by_neighbour=frees)
        replay = Replay(trace, forced, state=state, settle=settle, patient=patient)
        with replayed_pipeline(replay):
            yield replay
        return
    count = trainer.plan.strategy.num_microbatches
    ends = {*range(min(_FIRST, count)), *range(max(count - _LAST, 0), count)}
    replay = Replay(
        trace, {0: frozenset(ends)}, state=state, settle=settle, patient=patient
    )
    rule = trainer.step_rule
    assert isinstance(rule, PlainStep)
    double = partial(_accumulate, replay, rule.accumulate)
    with mock.patch.object(rule, "accumulate", double):
        yield replay


def _accumulate(
    replay: Replay,
    accumulate: Callable[..., torch.Tensor],
    trainer: Trainer,
    inputs: Mapping[str, torch.Tensor],
    target: torch.Tensor | None,
    index: int,
) -> torch.Tensor:
    action = Action(kind="microbatch", part=0, microbatch=index)
    given = [*inputs.values(), target]
    if replay.is_run(action):
        numbers = replay.numbers(given)
        call = partial(accumulate, trainer, inputs, target, index)
        loss: torch.Tensor = replay.run(
            action, call, given=numbers, products=lambda loss: (loss,)
        )
        return loss
    (counted,) = replay.count(action, given)
    assert counted is not None
    return counted


def _sharding_state(module: nn.Module, *, gradients: bool) -> Hashable:
    """State that decides what the next forward or backward will send and keep.

    Args:
        module: Of this rank, in its final form.
        gradients: Whether it also matters which gradients there are.
    """
    groups = _groups(module)
    shards = tuple(
        (group._sharded_state.name, group._all_gather_result is not None)
        for group in groups
    )
    if not gradients:
        return shards
    kept = tuple(
        (shard.unsharded_accumulated_grad is None, _ungraded(shard))
        for group in groups
        for shard in group.fsdp_params
    )
    return shards, kept, tuple(p.grad is None for p in module.parameters())


def _enter_state(module: nn.Module, state: Hashable, trace: StepTrace) -> None:
    """Gather or free parameters to bring a module into a state, uncounted.

    Args:
        module: Of this rank, in its final form.
        state: From :func:`_sharding_state`, without gradients.
        trace: What is not to count.
    """
    assert isinstance(state, tuple)
    with trace.quiet():
        for group, (wanted, _) in zip(_groups(module), state, strict=True):
            if group._sharded_state.name == wanted:
                continue
            if wanted == "UNSHARDED":
                group.unshard()
                group.wait_for_unshard()
            else:
                group.reshard()


def _groups(module: nn.Module) -> list[Any]:
    found: list[Any] = []
    for part in module.modules():
        if isinstance(part, FSDPModule):
            found += part._get_fsdp_state()._fsdp_param_groups
    return found


def _ungraded(shard: Any) -> bool:
    whole = getattr(shard, "_unsharded_param", None)
    return whole is None or whole.grad is None
