"""One training step by a plan, on this process's part of the model."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from executors.data import Batch, slice_batch, synthetic_batch
from executors.deferred.materialize import compute_attributes
from executors.deferred.recording import Recording
from executors.gradients import clip_gradients, gradient_norm, sum_over_tp
from executors.losses import LossFunction, target_of
from executors.mesh import ProcessMesh
from executors.names import units_of_model
from executors.optimizer import build_optimizer
from executors.parallelize import ParallelPart, parallelize
from executors.pipelines.pipeline import Pipeline
from executors.pipelines.stages import lower
from executors.pipelines.stream import cuts_inside_stream
from executors.pipelines.tied import TiedSync, find_copies, untie
from executors.strategies.context import local_positions, slice_sequence
from planner.schema import Plan, Recompute

__all__ = ["StepResult", "Trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step computed, the same on every rank.

    Attributes:
        loss: Mean over the global batch, before the update.
        grad_norm: Of the whole gradient, before clipping; None without clipping.
    """

    loss: float
    grad_norm: float | None


class Trainer:
    """A model made parallel by a plan, with its optimizer.

    Building one is collective: every process of the plan does it at once.

    Args:
        plan: What to do; its strategy's mesh must have been arranged.
        model: Built equally on all ranks. It is taken apart: do not use it after.
        place: Where this process stands.
        recording: What the model's tensors without values get theirs from, see
            :func:`executors.deferred.model.record`; None if the model is real.

    Raises:
        FingerprintError: If the model lacks a module that the plan names.
        ExecutionError: If the model cannot be cut into stages.
        StrategyError: If tp cannot split a module.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        place: ProcessMesh,
        recording: Recording | None = None,
    ) -> None:
        strategy = plan.strategy
        self.plan, self.place = plan, place
        mesh = strategy.mesh
        self.loss = LossFunction(
            kind=plan.workload.loss,
            data_parallel=mesh.data_parallel * mesh.cp,
            vocabulary=place.group("tp") if strategy.sharding.loss_parallel else None,
        )
        self._positions: torch.Tensor | None = None
        if mesh.cp > 1:
            self._positions = local_positions(
                plan.workload.seq_len or 0,
                place.index("cp"),
                mesh.cp,
                strategy.context_algorithm,
            )
        #: What this rank added to the last step's loss: tells who first had a NaN.
        self.loss_share = torch.zeros((), device=place.device)
        self.parts: dict[int, ParallelPart] = {}
        self.pipeline: Pipeline | None = None
        self._tied: TiedSync | None = None
        model.train()
        if place.size("pp") > 1:
            self._build_pipeline(model, recording)
            # The graphs of other ranks' stages hold weights in cycles, which would
            # stay until Python happens to look for them.
            del model
            gc.collect()
        else:
            self._build_whole(model, recording)
        self.optimizer = build_optimizer(self._parameters(), strategy.optimizer)
        partial = [
            parameter
            for part in self.parts.values()
            for name, parameter in part.inner.named_parameters()
            if name in part.partial
        ]
        self._partial = partial
        self._seed_dropout()

    def _build_whole(self, model: nn.Module, recording: Recording | None) -> None:
        strategy = self.plan.strategy
        named = [name for stage in strategy.stages for name in stage.modules]
        recompute: Recompute = (
            strategy.stages[0].recompute if strategy.stages else "none"
        )
        self.parts[0] = parallelize(
            model,
            strategy,
            self.place,
            units=units_of_model(model, named),
            recompute=recompute,
            causal=self.plan.model.attention != "full",
            recording=recording,
        )

    def _build_pipeline(self, model: nn.Module, recording: Recording | None) -> None:
        strategy, place = self.plan.strategy, self.place
        precision = strategy.precision
        with recording.active() if recording else nullcontext():
            model.to(getattr(torch, precision.parameter))
        if recording is not None:
            compute_attributes(model, recording)
        sample = synthetic_batch(
            self.plan.workload, 0, samples=strategy.microbatch_size
        )
        lowered = lower(
            model,
            strategy.stages,
            self._own_tokens(sample),
            kind=self.loss.kind,
            device=place.device,
            wire=(
                getattr(torch, precision.parameter),
                getattr(torch, precision.compute),
            ),
            output_shards=place.size("tp") if strategy.sharding.loss_parallel else 1,
            stream_shards=place.size("tp"),
            inside_stream=cuts_inside_stream(model, strategy),
        )
        copies = find_copies([stage.module for stage in lowered])
        own = strategy.stages_of_rank(place.index("pp"))
        with recording.active() if recording else nullcontext():
            untie({index: lowered[index].module for index in own}, copies)
        for index in own:
            self.parts[index] = parallelize(
                lowered[index].module,
                strategy,
                place,
                units=lowered[index].units,
                recompute=strategy.stages[index].recompute,
                causal=self.plan.model.attention != "full",
                recording=recording,
                comes_sharded=lowered[index].comes_sharded,
                leaves_sharded=lowered[index].leaves_sharded,
            )
        inner = {index: part.inner for index, part in self.parts.items()}
        self._tied = TiedSync(copies, inner, strategy, place)
        modules = {index: part.module for index, part in self.parts.items()}
        mine = [lowered[index] for index in own]
        self.pipeline = Pipeline(mine, modules, strategy, place, self.loss)

    def _seed_dropout(self) -> None:
        """Masks differ between data-parallel ranks and stages, not between tp ranks."""
        place = self.place
        sequence = self.plan.strategy.sharding.sequence_parallel
        tp = place.index("tp") if sequence else 0
        data = place.data_index * place.size("cp") + place.index("cp")
        offset = (data * place.size("pp") + place.index("pp")) * 1009 + tp
        torch.manual_seed(torch.initial_seed() + offset)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank under the model's own FQNs, tied copies once."""
        extra = self._tied.extra if self._tied else frozenset()
        for part in self.parts.values():
            for name, parameter in part.inner.named_parameters():
                if id(parameter) not in extra:
                    yield name, parameter

    def _parameters(self) -> list[nn.Parameter]:
        parts = self.parts.values()
        return [p for part in parts for p in part.inner.parameters()]

    def step(self, batch: Batch) -> StepResult:
        """Train on one global batch.

        Args:
            batch: All samples of the step, on the CPU, equal on every rank.

        Raises:
            ExecutionError: If the loss is undefined on this batch.
        """
        strategy = self.plan.strategy
        self.loss.prepare(batch, strategy.num_microbatches)
        local = slice_batch(
            batch,
            self.place.data_index,
            strategy.mesh.data_parallel,
            self.place.device,
        )
        loss, norm = self.update(local)
        return StepResult(
            loss=float(loss), grad_norm=None if norm is None else float(norm)
        )

    def update(
        self, local: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All of a step but what needs values: a dry run has tensors without any.

        Args:
            local: This rank's slice of the global batch, on its device; the loss has
                been prepared for the batch.

        Returns:
            Mean loss of the global batch, and norm of the gradient if the plan clips.
        """
        self.optimizer.zero_grad()
        loss = self._forward_backward(local)
        sum_over_tp(self._partial, self.place)
        if self._tied is not None:
            self._tied.sum_gradients()
        norm = self._clip()
        self.optimizer.step()
        return self._mean_loss(loss), norm

    def _forward_backward(
        self, local: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        target = target_of(local, self.loss.kind)
        if target is not None and self._positions is not None and target.ndim > 1:
            target = target.index_select(1, self._positions.to(target.device))
        inputs = self._own_tokens(self._model_inputs(local))
        if self.pipeline is not None:
            return self.pipeline.step(inputs, target)
        total = torch.zeros((), device=self.place.device)
        for index in range(self.plan.strategy.num_microbatches):
            total += self.accumulate(inputs, target, index)
        return total

    def accumulate(
        self,
        inputs: Mapping[str, torch.Tensor],
        target: torch.Tensor | None,
        index: int,
    ) -> torch.Tensor:
        """Forward and backward of one microbatch without a pipeline.

        Args:
            inputs: Of all microbatches of this rank, on its device.
            target: What the loss compares with, of all of them.
            index: Which microbatch.

        Returns:
            Its share of the loss.
        """
        count = self.plan.strategy.num_microbatches
        part, last = self.parts[0], index == count - 1
        part.sync_gradients(last)
        module = part.module
        ddp = module if isinstance(module, DistributedDataParallel) else None
        with ddp.no_sync() if ddp is not None and not last else nullcontext():
            micro = {name: v.chunk(count)[index] for name, v in inputs.items()}
            wanted = None if target is None else target.chunk(count)[index]
            loss = self.loss(module(**micro), wanted)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _model_inputs(
        self, local: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What the plan says forward takes; all of the batch where it says nothing."""
        wanted = {spec.name for spec in self.plan.workload.inputs}
        return {n: v for n, v in local.items() if not wanted or n in wanted}

    def _own_tokens(
        self, inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The part of every sequence that this rank has under cp."""
        if self._positions is None:
            return dict(inputs)
        length = self.plan.workload.seq_len or 0
        return slice_sequence(inputs, self._positions, length)

    def _clip(self) -> torch.Tensor | None:
        limit = self.plan.strategy.grad_clip_norm
        if limit is None:
            return None
        norm = gradient_norm((p for _, p in self.named_parameters()), self.place)
        clip_gradients(self._parameters(), norm, limit)
        return norm

    def _mean_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        """Mean over the global batch, known to every rank."""
        share = torch.zeros((), device=self.place.device) if loss is None else loss
        mesh = self.plan.strategy.mesh
        # Every tp rank has the same loss; each data-parallel rank scaled its own up.
        self.loss_share = share / (mesh.data_parallel * mesh.cp * mesh.tp)
        total = self.loss_share.clone()
        dist.all_reduce(total)
        return total
