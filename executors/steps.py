"""Rules by which one batch becomes new weights, on this rank's part of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from executors.communication.buckets import BucketedReplicas
from executors.losses import LossFunction
from executors.mesh import ProcessMesh
from executors.parallelize import ParallelPart
from executors.pipelines.pipeline import Pipeline
from executors.pipelines.tied import TiedSync
from executors.strategies.data_parallel import wait_for_fewer
from planner.errors import ExecutionError
from planner.schema import Plan

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = [
    "OptimizerFactory",
    "ParallelModel",
    "PlainStep",
    "Step",
    "average_whole",
    "clip_gradients",
    "gradient_norm",
    "gradient_norms",
    "inputs_and_target",
    "left_as_it_was",
    "model_inputs",
    "own_optimizer",
    "sum_over_tp",
]


#: Builds an optimizer of pairs of name and parameter, as torch's take them.
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

#: Axes along which a parameter can be sharded.
_SHARDING = ("shard", "tp", "expert_shard", "ep")


def sum_over_tp(parameters: Sequence[nn.Parameter], place: ProcessMesh) -> None:
    """Sum gradients that each tp rank has a part of, in place, in one all-reduce.

    Args:
        parameters: Whole on every tp rank; equal lists on all of them.
        place: Where this process stands.
    """
    group = place.group("tp")
    if group is None:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = _local(parameter.grad)
            by_dtype.setdefault(grad.dtype, []).append(grad)
    for grads in by_dtype.values():
        # Offloaded gradients are summed on the device all the same.
        flat = torch.cat([grad.reshape(-1) for grad in grads]).to(place.device)
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


def average_whole(parameters: Sequence[nn.Parameter], place: ProcessMesh) -> None:
    """Average gradients of scalars over data-parallel ranks, in one all-reduce an axis.

    A parameter that no rank used keeps no gradient.

    Args:
        parameters: 0-d, equal lists on all ranks.
        place: Where this process stands.
    """
    trained = [p for p in parameters if p.requires_grad]
    axes = ("shard", "replicate") if place.reduces else ("shard",)
    groups = [place.group(axis) for axis in axes]
    if not trained:
        return
    # The second row counts the ranks that used each parameter.
    sums = torch.zeros(2, len(trained), device=place.device)
    for index, parameter in enumerate(trained):
        if parameter.grad is not None:
            sums[0, index], sums[1, index] = parameter.grad, 1
    for group in groups:
        if group is not None:
            dist.all_reduce(sums, group=group)
            sums[0] /= group.size()
    for parameter, grad, used in zip(trained, *sums.unbind(), strict=True):
        # A dry run's tensors have no value to look at.
        if parameter.grad is not None or used:
            parameter.grad = grad.to(parameter.dtype)


def gradient_norm(
    parameters: Iterable[nn.Parameter], place: ProcessMesh
) -> torch.Tensor:
    """2-norm of the gradient of the whole model, the same on every rank.

    Squares of shards are summed over the axes that shard them, then over the
    pipeline; what an axis replicates is counted once.

    Args:
        parameters: Of this rank; of tied copies, one in the whole pipeline.
        place: Where this process stands.

    Returns:
        A float32 scalar on the device.
    """
    # Squares by the set of axes that shard, as the bits of an index.
    squares = torch.zeros(2 ** len(_SHARDING), device=place.device)
    for parameter in parameters:
        if parameter.grad is not None:
            local = _local(parameter.grad)
            kind = _sharding(parameter.grad)
            squares[kind] += torch.linalg.vector_norm(local, dtype=torch.float32) ** 2
    for bit, axis in enumerate(_SHARDING):
        group = place.group(axis)
        if group is not None:
            kinds = [kind for kind in range(len(squares)) if kind >> bit & 1]
            part = squares[kinds]
            dist.all_reduce(part, group=group)
            squares[kinds] = part
    total = squares.sum()
    group = place.group("pp")
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def gradient_norms(
    named: Sequence[tuple[str, nn.Parameter]], place: ProcessMesh
) -> dict[str, float]:
    """2-norm of the gradient of each parameter of the whole model.

    The same on every rank; collective over the whole mesh. A parameter without a
    gradient has norm 0.

    Args:
        named: Parameters of this rank that are trained, by name; equal lists on the
            ranks of one stage. Of tied copies, one in the whole pipeline.
        place: Where this process stands.
    """
    squares = torch.zeros(len(named), device=place.device)
    kinds = []
    for index, (_, parameter) in enumerate(named):
        grad = parameter.grad
        kinds.append(_sharding(parameter if grad is None else grad))
        if grad is not None:
            norm = torch.linalg.vector_norm(_local(grad), dtype=torch.float32)
            squares[index] = norm**2
    for bit, axis in enumerate(_SHARDING):
        group = place.group(axis)
        chosen = [index for index, kind in enumerate(kinds) if kind >> bit & 1]
        if group is not None and chosen:
            part = squares[chosen]
            dist.all_reduce(part, group=group)
            squares[chosen] = part
    names = [name for name, _ in named]
    found = dict(zip(names, squares.sqrt().tolist(), strict=True))
    stages = place.group("pp")
    if stages is None:
        return found
    every: list[dict[str, float]] = [{}] * stages.size()
    dist.all_gather_object(every, found, group=stages)
    return {name: norm for stage in every for name, norm in stage.items()}


def clip_gradients(
    parameters: Iterable[nn.Parameter], norm: torch.Tensor, limit: float
) -> None:
    """Scale gradients so that the norm of the whole does not exceed a limit, in place.

    Args:
        parameters: All of this rank, tied copies too.
        norm: From :func:`gradient_norm`.
        limit: Largest norm left alone. The scale is that of
            ``torch.nn.utils.clip_grad_norm_``; gradients of a norm that is not finite
            stay as they are, so that it can be told which are the cause.
    """
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    scale = torch.where(norm.isfinite(), scale, torch.ones_like(scale))
    for parameter in parameters:
        if parameter.grad is not None:
            local = _local(parameter.grad)
            local.mul_(scale.to(local.device))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharding(grad: torch.Tensor) -> int:
    if not isinstance(grad, DTensor):
        return 0
    names = grad.device_mesh.mesh_dim_names or ()
    split = {
        name
        for name, placement in zip(names, grad.placements, strict=True)
        # Not is_shard(): the shards of shards that tp with fully_shard makes say no.
        if not placement.is_replicate()
    }
    return sum((axis in split) << bit for bit, axis in enumerate(_SHARDING))


def own_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], factory: OptimizerFactory
) -> torch.optim.Optimizer:
    """Build an optimizer that the user has chosen, and group parameters by mesh.

    Args:
        named: All of this rank, under the model's own names.
        factory: Of the user.

    Raises:
        ExecutionError: If it gives no optimizer, or one of other parameters.
    """
    trained = [(name, p) for name, p in named if p.requires_grad]
    # A stage of frozen modules still takes part in steps.
    optimizer = factory(trained or [("none", nn.Parameter(torch.zeros(0)))])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ExecutionError(
            f"optimizer built {type(optimizer).__name__}; it must take a list of pairs "
            f"of name and parameter and return a torch.optim.Optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ExecutionError(
            "optimizer=LBFGS computes a loss several times a step; use another"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if trained and not held <= {id(parameter) for _, parameter in trained}:
        raise ExecutionError(
            "optimizer holds parameters that it was not given; build it of its "
            "argument, the sharded parameters, not of the model that model_fn built"
        )
    left = [name for name, parameter in trained if id(parameter) not in held]
    if left:
        raise ExecutionError(
            f"optimizer leaves out {left[0]} (of {len(left)}); freeze what is not "
            f"trained in model_fn (requires_grad_(False)), or give it a group"
        )
    # Kernels over lists refuse those that mix plain tensors and DTensors.
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        places: dict[Any, list[int]] = {}
        for index, parameter in enumerate(group["params"]):
            key = parameter.device_mesh if isinstance(parameter, DTensor) else None
            places.setdefault(key, []).append(index)
        for chosen in places.values() if len(places) > 1 else ():
            part = {**group, "params": [group["params"][i] for i in chosen]}
            if "param_names" in group:
                part["param_names"] = [group["param_names"][i] for i in chosen]
            groups.append(part)
        if len(places) <= 1:
            groups.append(group)
    optimizer.param_groups = groups
    return optimizer


class ParallelModel(Protocol):
    """This rank's part of a model, as :class:`executors.trainer.Trainer` holds it.

    Attributes:
        plan: The plan.
        place: Where this process stands.
        loss: The loss of the workload.
        positions: Tokens of every sequence that this rank has under cp; None for all.
        parts: Stages of this rank by index; one without a pipeline.
        pipeline: Runs the stages; None without a pipeline.
        tied: Keeps tied weights in several stages equal; None without a pipeline.
        optimizer: Updates the weights of this rank.
        partial: Parameters whose gradients are summed over tp.
        inputs: Names of what forward is given of a batch; None for all of it.
        done: Number of steps done.
        sends: Empty tensors like those that each stage of the pipeline makes.
    """

    plan: Plan
    place: ProcessMesh
    loss: LossFunction
    positions: torch.Tensor | None
    parts: dict[int, ParallelPart]
    pipeline: Pipeline | None
    tied: TiedSync | None
    optimizer: torch.optim.Optimizer
    partial: list[nn.Parameter]
    whole: list[nn.Parameter]
    inputs: frozenset[str] | None
    done: int
    sends: Sequence[tuple[torch.Tensor, ...]]

    def own_tokens(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Cut out the part of every sequence that this rank has under cp."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank under the model's own FQNs, tied copies once."""

    def all_parameters(self) -> list[nn.Parameter]:
        """Parameters of this rank, every tied copy included."""

    def after_backward(self) -> None:
        """Let what keeps copies together act on the gradients; collective."""


class Step(Protocol):
    """A rule by which this rank's slice of a batch becomes new weights."""

    def attach(self, trainer: Trainer) -> None:
        """Take what it needs of a complete trainer, which it does not keep; once.

        Raises:
            ExecutionError: If it cannot train such a model.
        """

    def meets(self, done: int) -> bool:
        """Return True if the ranks of a pipeline come together after so many steps.

        They share a loss there, and look for numbers that are not finite.
        """

    def phase(self, step: int) -> str:
        """Name of the phase, among the strategy's, that a step is of."""

    def force(self, phase: str | None) -> None:
        """Make every step one of a phase, to measure it; None ends that.

        Args:
            phase: One of the strategy's.
        """

    def backward(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Compute the whole batch's gradient of every parameter; update nothing.

        Args:
            trainer: See :meth:`update`.
            local: The same.

        Returns:
            Sum of this rank's scaled losses, None on a rank that computes no loss.
        """

    def update(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Train on one slice; needs no values, so that a dry run can do it.

        Args:
            trainer: Holds model parts and optimizer. It is no attribute, because a
                circle would keep DDP's reducer alive longer than its group.
            local: This rank's slice of the global batch, on its device; the loss has
                been prepared for the batch.

        Returns:
            Sum of this rank's scaled losses, None on a rank that computes no loss; and
            the norm of the gradient, None unless the plan clips it.
        """


class PlainStep:
    """Back-propagation of all microbatches, then one step of the optimizer."""

    def attach(self, trainer: Trainer) -> None:
        """Do nothing."""

    def meets(self, done: int) -> bool:
        """Return True: every step ends with one loss."""
        return True

    def phase(self, step: int) -> str:
        """Name of the one phase that there is."""
        return "step"

    def force(self, phase: str | None) -> None:
        """Do nothing: every step is of the one phase."""

    def backward(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """See :meth:`Step.backward`."""
        trainer.optimizer.zero_grad()
        loss = self._forward_backward(trainer, local)
        average_whole(trainer.whole, trainer.place)
        sum_over_tp(trainer.partial, trainer.place)
        if trainer.tied is not None:
            trainer.tied.sum_gradients()
        trainer.after_backward()
        scaler = trainer.loss.scaler
        if scaler is not None:
            scaler.unscale(trainer.all_parameters(), trainer.place)
        return loss

    def update(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See :meth:`Step.update`."""
        loss = self.backward(trainer, local)
        scaler = trainer.loss.scaler
        if scaler is not None:
            scaler.update()
            if scaler.overflowed:
                return loss, None
        norm = _clip(trainer)
        replicas = trainer.parts[0].module if 0 in trainer.parts else None
        if isinstance(replicas, BucketedReplicas):
            replicas.step(trainer.optimizer)
        else:
            trainer.optimizer.step()
        return loss, norm

    def _forward_backward(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        inputs, target = inputs_and_target(trainer, local)
        count = trainer.plan.strategy.num_microbatches
        total = torch.zeros((), device=trainer.place.device)
        with ExitStack() as stack:
            for part in trainer.parts.values():
                # Buckets wait for gradients of parameters, which are then leaves.
                bucketed = isinstance(part.module, BucketedReplicas)
                if part.casts is not None and count > 1 and not bucketed:
                    stack.enter_context(part.casts.kept())
            if trainer.pipeline is not None:
                return trainer.pipeline.step(inputs, target)
            for index in range(count):
                total += self.accumulate(trainer, inputs, target, index)
        return total

    def accumulate(
        self,
        trainer: ParallelModel,
        inputs: Mapping[str, torch.Tensor],
        target: torch.Tensor | None,
        index: int,
    ) -> torch.Tensor:
        """Run forward and backward of one microbatch without a pipeline.

        Args:
            trainer: Holds the model.
            inputs: Of all microbatches of this rank, on its device.
            target: Values that the loss compares with, of all of them.
            index: Number of the microbatch.

        Returns:
            Its share of the loss.
        """
        count = trainer.plan.strategy.num_microbatches
        micro = {name: v.chunk(count)[index] for name, v in inputs.items()}
        wanted = None if target is None else target.chunk(count)[index]
        if not trainer.parts[0].tried:
            trainer.parts[0] = _tried(trainer, micro, wanted)
        part, last = trainer.parts[0], index == count - 1
        part.sync_gradients(last)
        module = part.module
        ddp = module if isinstance(module, DistributedDataParallel) else None
        with ddp.no_sync() if ddp is not None and not last else nullcontext():
            loss = trainer.loss.of(module, micro, wanted)
            loss.backward()  # type: ignore[no-untyped-call]
        if last:
            part.end_backward()
        if ddp is not None and last and not ddp.find_unused_parameters:
            _require_gradients(ddp)
        return loss.detach()


def _tried(
    trainer: ParallelModel,
    inputs: Mapping[str, torch.Tensor],
    target: torch.Tensor | None,
) -> ParallelPart:
    """Part that waits for the gradients that there will be, by a forward for trial.

    Args:
        trainer: Holds the part.
        inputs: Of one microbatch.
        target: Of the same.
    """
    part, place = trainer.parts[0], trainer.place
    replicas = part.module
    # A dry run has a subclass of its own, and no values to try.
    if type(replicas) is not DistributedDataParallel:
        return replace(part, tried=True)
    with left_as_it_was(part.inner, place.device):
        loss = trainer.loss.of(replicas.module, inputs, target)
    strategy = trainer.plan.strategy
    fewer = wait_for_fewer(replicas, loss, strategy, place)
    return replace(part, tried=True, module=fewer or replicas)


@contextmanager
def left_as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """A block after which buffers and generators are what they were before."""
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
    with torch.no_grad():
        for buffer, value in values:
            buffer.copy_(value)


def _require_gradients(ddp: DistributedDataParallel) -> None:
    """Refuse parameters without a gradient, for which DDP would wait for ever.

    Raises:
        ExecutionError: If the loss does not depend on a parameter that is trained.
    """
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise ExecutionError(
                f"the loss does not depend on {name}, whose gradient replicas would "
                f"wait for; freeze it (requires_grad_(False)), or plan with "
                f"zero_stage=1, 2 or 3 in place of dp_replicate"
            )


def inputs_and_target(
    trainer: ParallelModel, local: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """This rank's inputs of forward, and what the loss compares with.

    Args:
        trainer: Whose loss has been prepared for the batch.
        local: This rank's slice of it.
    """
    target = trainer.loss.target(local)
    if target is not None and trainer.positions is not None and target.ndim > 1:
        target = target.index_select(1, trainer.positions.to(target.device))
    return trainer.own_tokens(model_inputs(trainer, local)), target


def model_inputs(
    trainer: ParallelModel, local: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return what forward is given of a batch: inputs of the plan, or all."""
    wanted = trainer.inputs
    return {n: v for n, v in local.items() if wanted is None or n in wanted}


def _clip(trainer: ParallelModel) -> torch.Tensor | None:
    limit = trainer.plan.strategy.grad_clip_norm
    if limit is None:
        return None
    norm = gradient_norm((p for _, p in trainer.named_parameters()), trainer.place)
    clip_gradients(trainer.all_parameters(), norm, limit)
    return norm
