"""The first step of a plan beside the same step in one process.

Rank 0 computes loss and gradient of the first global batch with plain torch, on the
whole model. Then all ranks compute them by the plan. No weight is changed, dropout is
off on both sides, and running statistics and generators are put back.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from executors.building import densify_gradients
from executors.data import Batch, slice_batch
from executors.steps import gradient_norm, gradient_norms, left_as_it_was
from executors.strategies.casts import cast_inputs, uncast_weights
from executors.strategies.dropout import DropoutOff
from executors.strategies.low_precision import multiply_in_float8
from executors.trainer import Trainer
from planner.errors import ExecutionError, MeshwrightError
from planner.schema import Plan, Precision

__all__ = ["FirstStepCheck", "compare_first_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tolerance:
    """Largest relative differences that are rounding.

    Attributes:
        loss: Of the loss.
        norm: Of the norm of the whole gradient.
        parameter: Of the norm of one parameter's gradient.
        floor: Norms below this share of the largest parameter's are compared with it.
    """

    loss: float
    norm: float
    parameter: float
    floor: float


#: By the dtype that is computed in.
_TOLERANCES = {
    "float32": _Tolerance(loss=1e-4, norm=1e-3, parameter=2e-2, floor=1e-3),
    # Smaller gradients than those of bfloat16 vanish in the whole model, not scaled.
    "float16": _Tolerance(loss=1e-2, norm=5e-2, parameter=0.25, floor=1e-2),
    "bfloat16": _Tolerance(loss=1e-2, norm=5e-2, parameter=0.25, floor=1e-2),
    # Scales of tensors change with the pieces that a batch is computed in.
    "float8": _Tolerance(loss=2e-2, norm=0.1, parameter=0.5, floor=1e-2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStepCheck:
    """Loss and gradient norm of a first step, by the plan and in one process.

    Attributes:
        loss: By the plan, without dropout.
        whole_loss: In one process.
        grad_norm: Of the whole gradient before clipping, by the plan.
        whole_grad_norm: In one process.
        parameter: Parameter whose gradient's norm differs most.
        parameter_error: By how much, relative to its norm in one process.
    """

    loss: float
    whole_loss: float
    grad_norm: float
    whole_grad_norm: float
    parameter: str
    parameter_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Results of one forward and backward.

    Attributes:
        loss: Mean over the global batch.
        norm: Of the whole gradient.
        norms: Of each parameter's, by its first name in the whole model.
        dropout: True if the model has dropout, which was off.
    """

    loss: float
    norm: float
    norms: Mapping[str, float]
    dropout: bool = False


def compare_first_step(
    trainer: Trainer,
    build: Callable[[], nn.Module],
    batch: Batch,
    first_names: Mapping[str, str],
) -> FirstStepCheck:
    """Compare loss and gradient of a batch by a plan with those in one process.

    Collective over all ranks. The weights stay as they are.

    Args:
        trainer: Of the plan, as it stands before its first step.
        build: Builds the whole model with the weights that the trainer has, on its
            device in the plan's parameter dtype; called on rank 0 alone.
        batch: Global batch.
        first_names: First name of a parameter in the whole model, by each other one.

    Returns:
        Both results, within the tolerance of each other.

    Raises:
        ExecutionError: The same on all ranks: if the results differ, the model does
            not fit into one process, or its forward is random beyond dropout.
    """
    whole = _on_first_rank(trainer, lambda: _step_whole(trainer, build, batch))
    off = DropoutOff() if whole.dropout else contextlib.nullcontext()
    with _left_as_it_was(trainer), off:
        loss = trainer.backward(batch)
        named = [
            (first_names.get(name, name), parameter)
            for name, parameter in trainer.named_parameters()
            if parameter.requires_grad
        ]
        norm = gradient_norm((parameter for _, parameter in named), trainer.place)
        norms = gradient_norms(named, trainer.place)
    ours = _Step(loss=loss, norm=float(norm), norms=norms)
    return _compare(trainer.plan, ours, whole)


def _on_first_rank(trainer: Trainer, work: Callable[[], _Step]) -> _Step:
    """Call a function on rank 0; its result, or its error, reaches all ranks."""
    said: list[Any] = [None, None]
    if trainer.place.rank == 0:
        try:
            said[0] = work()
        except MeshwrightError as error:
            said[1] = error
        gc.collect()
        if trainer.place.device.type == "cuda":
            torch.cuda.empty_cache()
    dist.broadcast_object_list(said, src=0)
    if said[1] is not None:
        raise said[1]
    step: _Step = said[0]
    return step


@contextlib.contextmanager
def _left_as_it_was(trainer: Trainer) -> Iterator[None]:
    """A block after which buffers and generators are what they were before."""
    with contextlib.ExitStack() as kept:
        for part in trainer.parts.values():
            kept.enter_context(left_as_it_was(part.inner, trainer.place.device))
        yield
    trainer.optimizer.zero_grad()


def _fork_generators(device: torch.device) -> contextlib.AbstractContextManager[None]:
    devices = [device] if device.type == "cuda" else []
    return torch.random.fork_rng(devices=devices)


# -- In one process --------------------------------------------------------------


def _step_whole(
    trainer: Trainer, build: Callable[[], nn.Module], batch: Batch
) -> _Step:
    """Forward and backward of the whole model, in the plan's precision."""
    plan, device = trainer.plan, trainer.place.device
    _require_room(plan, device)
    try:
        with _fork_generators(device):
            return _forward_backward(trainer, build().train(), batch)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _no_room(plan, "activations beside them do not fit") from error


def _forward_backward(trainer: Trainer, model: nn.Module, batch: Batch) -> _Step:
    plan, device = trainer.plan, trainer.place.device
    pieces = _pieces(plan, model)
    densify_gradients(model)
    _cast(model, plan)
    if plan.strategy.precision.compute == "float8":
        modules = [one for stage in plan.strategy.stages for one in stage.modules]
        multiply_in_float8(model, modules, modules[-1], device)
    loss = replace(trainer.loss, data_parallel=1, vocabulary=None)
    wanted, batch = trainer.inputs, trainer.checked(batch)
    total, sums = 0.0, dict[str, torch.Tensor]()
    loss.prepare(batch, pieces)
    before = _generators(device)
    with DropoutOff() as dropout:
        for index in range(pieces):
            piece = slice_batch(batch, index, pieces, device)
            inputs = {n: v for n, v in piece.items() if wanted is None or n in wanted}
            value = loss(model(**inputs), loss.target(piece))
            value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
            _take_gradients(model, sums)
    if not all(map(torch.equal, before, _generators(device))):
        raise ExecutionError(
            f"forward of {plan.model.name} draws random numbers other than dropout's, "
            f"and a plan draws others than one process; leave check_first_step out"
        )
    norms = {
        name: float(torch.linalg.vector_norm(sums[name])) if name in sums else 0.0
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    norm = math.sqrt(sum(value**2 for value in norms.values()))
    if not (math.isfinite(total) and math.isfinite(norm)):
        raise ExecutionError(
            f"the first step has loss {total} and gradient norm {norm} in one process "
            f"already, whatever the plan; look at the model and the first batch"
        )
    return _Step(loss=total, norm=norm, norms=norms, dropout=dropout.found)


def _pieces(plan: Plan, model: nn.Module) -> int:
    """Pieces that one process computes a global batch in.

    Those of the plan where batch norms take the statistics of each, one where they take
    the batch's. Else larger ones, so that a loss shows which depends on how the batch
    is divided.
    """
    strategy = plan.strategy
    count = strategy.num_microbatches * strategy.mesh.data_parallel
    normed = any(isinstance(module, _BatchNorm) for module in model.modules())
    if count == 1 or normed:
        return 1 if strategy.semantics == "exact" else count
    return count // next(n for n in range(2, count + 1) if count % n == 0)


def _cast(model: nn.Module, plan: Plan) -> None:
    """Make a model compute in the plan's dtype, as ``fully_shard``'s policies do.

    Parameters but for batch norms' are cast, and floats where they enter a unit.
    """
    precision = plan.strategy.precision
    if precision.activation_dtype == precision.parameter:
        return
    dtype = _dtype(precision)
    normed = uncast_weights(model)
    for parameter in model.parameters():
        if parameter not in normed:
            parameter.data = parameter.data.to(dtype)
    units = {unit for stage in plan.strategy.stages for unit in stage.modules}
    named = {name for name, _ in model.named_modules()}
    cast_inputs(model, sorted(units & named - {""}), dtype)


def _take_gradients(model: nn.Module, sums: dict[str, torch.Tensor]) -> None:
    """Add the gradients of one piece to the sums, which are in float32."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            if name in sums:
                sums[name] += parameter.grad
            else:
                sums[name] = parameter.grad.float()
            parameter.grad = None


def _dtype(precision: Precision) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, precision.activation_dtype)
    return dtype


def _generators(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _require_room(plan: Plan, device: torch.device) -> None:
    """Refuse a model whose weights and gradients do not fit into one process.

    Raises:
        ExecutionError: With the bytes that it takes and those that are free.
    """
    size = getattr(torch, plan.strategy.precision.parameter).itemsize
    need = plan.model.parameters * (size + torch.float32.itemsize)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available
    if need > free:
        raise _no_room(
            plan,
            f"its weights and gradients take {need / 1e9:.1f} GB, rank 0 has "
            f"{free / 1e9:.1f} GB free",
        )


def _no_room(plan: Plan, why: str) -> ExecutionError:
    return ExecutionError(
        f"check_first_step computes one step of the whole {plan.model.name} on rank 0, "
        f"and {why}; leave it out, and compare a small twin with plain training "
        f"(meshwright verify --numerics)"
    )


# -- Comparison ------------------------------------------------------------------


def _relative(ours: float, whole: float, floor: float = 0.0) -> float:
    """Difference relative to the second; infinite where a number is not finite."""
    gap = abs(ours - whole)
    if not math.isfinite(gap):
        return math.inf
    return gap / max(abs(whole), floor, 1e-30)


def _compare(plan: Plan, ours: _Step, whole: _Step) -> FirstStepCheck:
    """Return both results.

    Raises:
        ExecutionError: The same on all ranks, if those of any differ by more than
            rounding.
    """
    tolerance = _TOLERANCES[plan.strategy.precision.compute]
    floor = tolerance.floor * max(whole.norms.values(), default=0.0)
    errors = {
        name: _relative(ours.norms.get(name, 0.0), norm, floor)
        for name, norm in whole.norms.items()
    }
    worst = max(errors, key=errors.__getitem__, default="")
    found = FirstStepCheck(
        loss=ours.loss,
        whole_loss=whole.loss,
        grad_norm=ours.norm,
        whole_grad_norm=whole.norm,
        parameter=worst,
        parameter_error=errors.get(worst, 0.0),
    )
    wrong = []
    if not _relative(ours.loss, whole.loss) <= tolerance.loss:
        wrong.append(f"the loss, by more than {tolerance.loss:g} of it")
    if not _relative(ours.norm, whole.norm) <= tolerance.norm:
        wrong.append(f"the gradient norm, by more than {tolerance.norm:g} of it")
    if not found.parameter_error <= tolerance.parameter:
        wrong.append(
            f"the gradient norm of {worst} ({ours.norms.get(worst, 0.0):.6g} and "
            f"{whole.norms[worst]:.6g}), by more than {tolerance.parameter:g} of it"
        )
    error = _error(plan, ours, whole, wrong) if wrong else None
    # Ranks that ought to agree may not: one that does not is enough.
    every: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, error)
    error = next(filter(None, every), None)
    if error is not None:
        raise ExecutionError(error)
    return found


def _error(plan: Plan, ours: _Step, whole: _Step, wrong: list[str]) -> str:
    return (
        f"the first step has loss {ours.loss:.6g} and gradient norm {ours.norm:.6g} by "
        f"this plan ({plan.strategy.label()}), loss {whole.loss:.6g} and gradient norm "
        f"{whole.norm:.6g} in one process, which differ in {'; '.join(wrong)}: more "
        f"than {plan.strategy.precision.compute} rounds, so the plan trains on wrong "
        f"numbers; plan with other axes, or leave check_first_step out to train all "
        f"the same"
    )
