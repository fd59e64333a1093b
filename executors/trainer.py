"""One training step by a plan, on this process's part of the model."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.fsdp import FSDPModule

from executors.averages import keep_average
from executors.building import (
    build_parts,
    further_inputs,
    own_positions,
    own_region,
    own_regions,
    own_tokens,
    require_whole_batch,
    seed_dropout,
)
from executors.communication.buckets import BucketedReplicas
from executors.data import (
    Batch,
    BatchPart,
    Part,
    agree_on_parts,
    require_documents,
    require_inputs,
    require_lengths,
    require_no_restarts,
    require_rows,
    slice_batch,
    split_documents,
    synthetic_batch,
)
from executors.deferred.recording import Recording
from executors.learning import step_of
from executors.learning.backpropagation import BackpropagationStep
from executors.loss_scaling import LossScaler
from executors.losses import LossFunction, Tally
from executors.mesh import ProcessMesh
from executors.names import tied_parameters
from executors.offloading import HostOptimizer
from executors.optimizers import build_optimizer, hidden_matrices
from executors.own_loss import Loss, OwnLossFunction, require_own_loss
from executors.pipelines.stages import LoweredStage
from executors.replicas import (
    DrainedReplicas,
    HoldingReplicas,
    replicas_of,
)
from executors.steps import (
    OptimizerFactory,
    Step,
    inputs_and_target,
    own_optimizer,
)
from executors.strategies.data_parallel import is_whole
from executors.strategies.dropout import DropoutOff
from planner.errors import ExecutionError
from planner.kv_cache import disable_kv_cache
from planner.schema import Plan, Strategy

__all__ = ["StepResult", "Trainer"]

#: Label that does not count, as torch has it.
_IGNORED = -100
#: Relative difference of two losses of the same documents that is rounding.
_SEPARATE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results of a step, the same on every rank of a copy of the weights.

    Attributes:
        loss: Mean over the global batch, before the update; between exchanges of
            copies that are apart, over the copy's own samples. NaN while it is not
            known, see :attr:`Trainer.waits`.
        grad_norm: Of the whole gradient, before clipping; None without clipping, and
            where gradients in float16 were not finite, so that nothing was updated.
        earlier: Losses of the steps before that were not known until now, in order.
    """

    loss: float
    grad_norm: float | None
    earlier: tuple[float, ...] = ()


def _two_optimizers(strategy: Strategy) -> ExecutionError:
    return ExecutionError(
        f"optimizer= with synchronisation={strategy.synchronisation} and "
        f"gradient_compression={strategy.gradient_compression}, of which one has an "
        f"optimizer of its own; leave it to the plan"
    )


class Trainer:
    """A model made parallel by a plan, with its optimizer.

    Building one is collective: every process of the plan does it at once.

    Args:
        plan: What to do; its strategy's mesh must have been arranged.
        model: Built equally on all ranks. It is taken apart: do not use it after.
        place: Where this process stands.
        recording: What the model's tensors without values get theirs from, see
            :func:`executors.deferred.model.record`; None if the model is real.
        lowered: Stages of the model's pipeline from :func:`lower_stages`; None to
            make them here.
        optimizer: Builds the optimizer of named parameters; None for the plan's.
        document_separator: Id of the token that ends a document, where rows of tokens
            hold several that are not to see each other; None if they do not.
        loss: Of the user, in place of the plan's; None for that.

    Raises:
        FingerprintError: If the model lacks a module that the plan names.
        ExecutionError: If the model cannot be cut into stages, or the plan divides
            samples that the loss compares.
        StrategyError: If tp cannot split a module.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        place: ProcessMesh,
        recording: Recording | None = None,
        lowered: Sequence[LoweredStage] | None = None,
        *,
        optimizer: OptimizerFactory | None = None,
        document_separator: int | None = None,
        loss: Loss | None = None,
    ) -> None:
        strategy = plan.strategy
        require_whole_batch(plan)
        self._separator = document_separator
        self._separated = document_separator is None
        self.plan, self.place = plan, place
        self._copies = place.copies
        self._own_loss = loss
        self.loss = self._loss_function()
        self.positions = own_positions(plan, place.index("cp"))
        #: What this rank added to the last step's loss: tells who first had a NaN.
        self.loss_share = torch.zeros((), device=place.device)
        self._spoiled = torch.zeros_like(self.loss_share)
        #: Shares of the losses of steps whose losses are not known to all ranks.
        self._untold: list[torch.Tensor] = []
        self._earlier: list[torch.Tensor] = []
        self.replicas = replicas_of(strategy)
        # Copies of a tied weight go by its first name.
        self._first = {n: group[0] for group in tied_parameters(model) for n in group}
        self._matrices = hidden_matrices(model, strategy)
        self._further = self._names_of_inputs(model)
        named = frozenset(spec.name for spec in plan.workload.inputs)
        #: Names of what forward is given of a batch; None for all of it.
        self.inputs = named | self._further if named or loss else None
        model.train()
        disable_kv_cache(model.modules())
        built = build_parts(
            plan,
            model,
            place,
            replicas=self.replicas,
            loss=self.loss,
            recording=recording,
            lowered=lowered,
        )
        self.parts, self.pipeline = built.parts, built.pipeline
        self.tied, self.sends = built.tied, built.sends
        if self.sends:
            # The graphs of other ranks' stages hold weights in cycles, which would
            # stay until Python happens to look for them.
            del model
            gc.collect()
        made = self._build_optimizer(optimizer)
        seed_dropout(plan, place)
        #: Steps done; a resumed run sets it.
        self.done = 0
        self.step_rule: Step = step_of(strategy)
        self.step_rule.attach(self)
        self.replicas.attach(self)
        if optimizer is not None and self.optimizer is not made:
            raise _two_optimizers(strategy)

    def _loss_function(self) -> LossFunction:
        plan, place = self.plan, self.place
        mesh = plan.strategy.mesh
        # Gradients are averaged over the ranks of one copy if copies are apart. Ranks
        # with shards of a sample all have its loss.
        shares = 1 if plan.strategy.spatial else mesh.cp
        ways = mesh.data_parallel * shares // self._copies
        halved = plan.strategy.precision.compute == "float16"
        scaler = LossScaler() if halved else None
        if self._own_loss is not None:
            require_own_loss(plan, self._separator)
            return OwnLossFunction(
                kind=plan.workload.loss,
                data_parallel=ways,
                function=self._own_loss,
                rows={spec.name: spec.rows for spec in plan.workload.inputs},
                scaler=scaler,
            )
        strategy = plan.strategy
        return LossFunction(
            kind=plan.workload.loss,
            label_shift=plan.workload.label_shift,
            own_loss=plan.workload.own_loss,
            ignore_index=plan.workload.ignore_index,
            data_parallel=ways,
            vocabulary=place.group("tp") if strategy.divides_logits else None,
            scaler=scaler,
        )

    def _names_of_inputs(self, model: nn.Module) -> frozenset[str]:
        """Names of inputs of forward that the plan does not name."""
        further = further_inputs(self.plan, model)
        if self._separator is not None:
            require_documents(self.plan, model, self._separator)
            further |= {"position_ids"}
        return further

    def _build_optimizer(
        self, factory: OptimizerFactory | None
    ) -> torch.optim.Optimizer:
        """Build the optimizer, and list the parameters that need care.

        Returns:
            The optimizer itself, which an exchange in buckets may have wrapped.
        """
        self.optimizer = made = self._optimizer(factory)
        keep_average(made, self.plan.strategy.optimizer.ema)
        #: Name of the class that the user chose, or the plan's.
        self.optimizer_name = (
            type(made).__name__ if factory else self.plan.strategy.optimizer.name
        )
        if self.plan.strategy.offload.states == "optimizer":
            self.optimizer = made = HostOptimizer(made)
        self._own_optimizer = factory is not None
        for replicas in self._bucketed():
            self.optimizer = replicas.exchange.optimizer(self.optimizer)
        #: Parameters whose gradients are summed over tp.
        self.partial = [
            parameter
            for part in self.parts.values()
            for name, parameter in part.inner.named_parameters()
            if name in part.partial
        ]
        #: Parameters that no data-parallel wrapper reduces: see ``is_whole``.
        self.whole = [
            parameter
            for part in self.parts.values()
            if isinstance(part.module, FSDPModule)
            for parameter in part.inner.parameters()
            if is_whole(parameter)
        ]
        return made

    def _optimizer(self, factory: OptimizerFactory | None) -> torch.optim.Optimizer:
        if factory is None:
            spec = self.plan.strategy.optimizer
            return build_optimizer(self._named_copies(), spec, self._matrices)
        named = ((self._first.get(n, n), p) for n, p in self._named_copies())
        return own_optimizer(named, factory)

    def _named_copies(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank by name, every tied copy included."""
        every = (part.inner.named_parameters() for part in self.parts.values())
        return chain.from_iterable(every)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank under the model's own FQNs, tied copies once.

        Those that another copy of the model holds in its place are left out.
        """
        self.settle()
        extra = self.tied.extra if self.tied else frozenset()
        replicas = self.replicas
        held = replicas.held() if isinstance(replicas, HoldingReplicas) else None
        for part in self.parts.values():
            for name, parameter in part.inner.named_parameters():
                if id(parameter) not in extra and (held is None or parameter in held):
                    yield name, parameter

    def all_parameters(self) -> list[nn.Parameter]:
        """Parameters of this rank, every tied copy included."""
        self.settle()
        parts = self.parts.values()
        return [p for part in parts for p in part.inner.parameters()]

    @property
    def part(self) -> Part:
        """Samples of every global batch that this rank trains on."""
        whole, count = self.plan.workload.global_batch, self._coordinates
        each, index = whole // count, self.place.data_index
        return Part(
            start=index * each,
            stop=(index + 1) * each,
            whole=whole,
            index=index,
            count=count,
            microbatch=self.plan.strategy.microbatch_size,
            inputs=self.plan.workload.inputs,
            regions=own_regions(self.plan, self.place.index("cp")),
        )

    @property
    def _coordinates(self) -> int:
        return self.plan.strategy.mesh.data_parallel

    def step(self, batch: Batch | BatchPart, *, ahead: bool = False) -> StepResult:
        """Train on one global batch.

        Args:
            batch: All samples of the step, on the CPU, equal on every rank; or this
                rank's :attr:`part` of them.
            ahead: Leave the last sums and updates to the forward of the next step,
                where the plan says ``communication.buckets=needed``: nobody may read
                weights, gradients or the optimizer's states before that, or
                :meth:`settle`. Equal on every rank.

        Raises:
            ExecutionError: If the loss is undefined on this batch, or the batch has
                other inputs than the plan.
        """
        together = self.meets(self.done)
        self._separate_documents()
        # A user's optimizer may take all gradients together, and so does a rule that
        # looks for numbers which are not finite.
        plain = type(self.step_rule) is BackpropagationStep and not self._own_optimizer
        for replicas in self._bucketed():
            replicas.ahead = ahead and plain
        loss, norm = self.update(self._own_slice(batch, together=together))
        return StepResult(
            loss=float(loss),
            grad_norm=None if norm is None else float(norm),
            earlier=tuple(float(one) for one in self._earlier),
        )

    def _bucketed(self) -> Iterator[BucketedReplicas]:
        modules = (part.module for part in self.parts.values())
        return (one for one in modules if isinstance(one, BucketedReplicas))

    def settle(self) -> None:
        """End what a step with ``ahead`` has left: sums of gradients, and updates."""
        for replicas in self._bucketed():
            replicas.settle()

    @property
    def waits(self) -> bool:
        """True if there are losses that are not known until the pipeline is drained."""
        return bool(self._untold)

    def finish(self) -> StepResult:
        """Drain the pipeline after a step whose loss is not known; collective.

        Returns:
            Result of that step, with the losses of those before.
        """
        self.replicas.settle()
        *earlier, loss = self._tell()
        return StepResult(
            loss=float(loss),
            grad_norm=None,
            earlier=tuple(float(one) for one in earlier),
        )

    def backward(self, batch: Batch | BatchPart) -> float:
        """Compute the gradients of one global batch, unclipped, and update nothing.

        Args:
            batch: As for :meth:`step`.

        Returns:
            Mean loss over the batch.

        Raises:
            ExecutionError: As :meth:`step` does.
        """
        self.settle()
        local = self._own_slice(batch, together=True)
        for replicas in self._bucketed():
            replicas.ahead = False
        loss = self.step_rule.backward(self, local)
        return float(self._mean_loss(loss))

    @torch.no_grad()
    def evaluate(self, batch: Batch | BatchPart) -> float:
        """Mean loss of one global batch in evaluation mode; nothing is updated.

        Args:
            batch: As for :meth:`step`.

        Raises:
            ExecutionError: If stages run by a rule of the copies' own, or as
                :meth:`step` does.
        """
        self.require_evaluation()
        self.settle()
        together = self.place.membership is None
        local = self._own_slice(batch, together=together)
        modules = [part.module for part in self.parts.values()]
        for module in modules:
            module.eval()
        # Graphs of stages have dropout of training in them.
        off = nullcontext() if self.pipeline is None else DropoutOff()
        try:
            with off:
                loss = self._forward(local)
        finally:
            for module in modules:
                module.train()
                # Weights that no backward frees would be taken for the rank's own.
                for inner in module.modules():
                    if isinstance(inner, FSDPModule):
                        inner.reshard()
        share = torch.zeros((), device=self.place.device) if loss is None else loss
        total = share / (self.loss.data_parallel * self._alike)
        if self.place.membership is None:
            dist.all_reduce(total)
            return float(total) / self._copies
        if self.place.replica is not None:
            dist.all_reduce(total, group=self.place.replica)
        return float(total)

    def _separate_documents(self) -> None:
        """Make sure, once, that documents of a row do not see each other; collective.

        Rows of two documents are computed twice, the second time with another first
        document: the loss of the second must not change.

        Raises:
            ExecutionError: If it does, or the plan evaluates nothing.
        """
        if self._separated:
            return
        self._separated = True
        separator, part = self._separator, self.part
        assert separator is not None
        try:
            self.require_evaluation()
        except ExecutionError as error:
            raise ExecutionError(
                f"document_separator={separator} is checked by an evaluation before "
                f"the first step, and there is none here: {error}"
            ) from error
        made = synthetic_batch(
            self.plan.workload,
            self.done,
            seed=part.index,
            samples=part.stop - part.start,
        )
        tokens = made["input_ids"]
        tokens = torch.where(tokens == separator, (separator or 2) - 1, tokens)
        half = tokens.shape[1] // 2
        tokens[:, half - 1] = separator
        others = tokens.clone()
        others[:, : half - 1] = tokens[:, : half - 1].flip(1)
        labels = tokens.clone()
        labels[:, :half] = _IGNORED
        made = {n: v for n, v in made.items() if n != "position_ids"}
        first, second = (
            self.evaluate(
                BatchPart(values={**made, "input_ids": rows, "labels": labels})
            )
            for rows in (tokens, others)
        )
        if not abs(first - second) <= _SEPARATE * abs(first):
            raise ExecutionError(
                f"document_separator={separator}, but forward of "
                f"{self.plan.model.name} lets a document see the one before it: the "
                f"loss of a second document was {first:.8g} behind one, "
                f"{second:.8g} behind another; its attention takes no notice of "
                f"position_ids that restart: leave document_separator out, or use a "
                f"model that does (those of transformers with attention sdpa, eager "
                f"or flash)"
            )

    def require_evaluation(self) -> None:
        """Refuse to evaluate what has no one model, or no mode for it.

        Raises:
            ExecutionError: If stages run by a rule of the copies' own, weights have
                several versions, or batch norms are part of a stage's graph.
        """
        strategy, why = self.plan.strategy, ""
        if isinstance(self.replicas, DrainedReplicas):
            why = f"asynchrony={strategy.asynchrony}, whose stages have versions"
        elif self.pipeline is None and len(self.parts) > 1:
            why = f"synchronisation={strategy.synchronisation}, whose stages take turns"
        elif self.pipeline is not None and any(
            "batch_norm" in str(node.target)
            for part in self.parts.values()
            for module in part.inner.modules()
            if isinstance(module, fx.GraphModule)
            for node in module.graph.nodes
        ):
            why = "pp > 1 and batch norms without weights, whose mode is traced"
        if why:
            raise ExecutionError(
                f"evaluation with {why}; evaluate its saved weights by another plan"
            )

    def _forward(self, local: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Sum of this rank's scaled losses; None on a rank that computes none."""
        inputs, target = inputs_and_target(self, local)
        if self.pipeline is not None:
            return self.pipeline.evaluate(inputs, target)
        count = self.plan.strategy.num_microbatches
        total = torch.zeros((), device=self.place.device)
        for index in range(count):
            micro = {name: v.chunk(count)[index] for name, v in inputs.items()}
            wanted = None if target is None else target.chunk(count)[index]
            total += self.loss.of(self.parts[0].module, micro, wanted)
        return total

    def _own_slice(
        self, batch: Batch | BatchPart, *, together: bool
    ) -> dict[str, torch.Tensor]:
        """Prepare the loss for a global batch; cut out this rank's samples.

        Args:
            batch: As for :meth:`step`.
            together: True if all ranks are in this step at once: then they check that
                they were given what they should.
        """
        if isinstance(batch, BatchPart):
            return self._take_part(batch, together=together)
        batch = self.checked(batch)
        strategy, place = self.plan.strategy, self.place
        ways = strategy.mesh.data_parallel // self._copies
        copy, index = divmod(place.data_index, ways)
        if place.apart:
            # A copy trains on the mean over its own samples.
            batch = slice_batch(batch, copy, self._copies, torch.device("cpu"))
        self.loss.prepare(batch, strategy.num_microbatches)
        if strategy.spatial:
            batch = self.own_tokens(batch)
        return slice_batch(batch, index, ways, place.device)

    def checked(self, batch: Batch) -> Batch:
        """Add what documents in a batch need; refuse one that does not fit the plan.

        Args:
            batch: Global, or a part of one.

        Raises:
            ExecutionError: If it has other inputs or shapes than the plan.
        """
        if self._separator is not None:
            shift = self.plan.workload.label_shift
            batch = split_documents(batch, self._separator, shift)
        # What the model does not read a loss of the user's may.
        names = self._further if self._own_loss is None else {*self._further, *batch}
        require_inputs(batch, self.plan.workload, names)
        require_lengths(batch, self.plan)
        require_no_restarts(batch, self.plan.strategy.mesh.cp)
        return batch

    def _take_part(
        self, batch: BatchPart, *, together: bool
    ) -> dict[str, torch.Tensor]:
        """Prepare the loss for a global batch of which this rank has its part."""
        place, part = self.place, self.part
        values = self.checked(require_rows(batch, part).values)
        count = self.plan.strategy.num_microbatches
        ways = self._coordinates // self._copies
        tally = self.loss.tally(values, count * self.loss.data_parallel // ways)
        axes = ("shard",) if place.apart else ("shard", "replicate")
        groups = [group for axis in axes if (group := place.group(axis)) is not None]
        # Ranks of one coordinate have shards of their own of some inputs.
        alike = {n: v for n, v in values.items() if n not in part.regions}
        rows = agree_on_parts(
            BatchPart(values=alike, shared=batch.shared),
            (tally.count, -tally.fewest, tally.most),
            part,
            [None] if together else groups,
            place.device,
            step=self.done,
        )
        first = place.data_index // ways * ways
        mine = [
            Tally(count=row[0], fewest=-row[1], most=row[2])
            for row in rows[first : first + ways]
        ]
        self.loss.take(Tally.total(mine), count)
        if part.regions:
            values = self.own_tokens(values)
        return {
            name: value.to(place.device, non_blocking=value.is_pinned())
            for name, value in values.items()
        }

    def update(
        self, local: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Do all of a step that needs no values: a dry run's tensors have none.

        Args:
            local: This rank's slice of the global batch, on its device; the loss has
                been prepared for the batch.

        Returns:
            Mean loss of the global batch, and norm of the gradient if the plan clips.
        """
        step = self.done
        self.replicas.before_forward(step)
        loss, norm = self.step_rule.update(self, local)
        self.replicas.after_update(step)
        self.done += 1
        return self._mean_loss(loss), norm

    def meets(self, done: int) -> bool:
        """Return True if all ranks come together after so many steps."""
        return self.step_rule.meets(done) and self.replicas.meets(done)

    def phase(self, step: int) -> str:
        """Name of the phase, among the strategy's, that a step is of."""
        several = len(self.plan.strategy.learning.phases) > 1
        return self.step_rule.phase(step) if several else self.replicas.phase(step)

    def force(self, phase: str | None) -> None:
        """Make every step one of a phase, to measure it; None ends that."""
        self.replicas.force(phase)
        self.step_rule.force(phase)

    def after_backward(self) -> None:
        """Let what keeps copies together act on the gradients; collective."""
        self.replicas.after_backward(self.done)

    def own_tokens(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Cut out the part of every sequence or sample that this rank has under cp."""
        if self.plan.strategy.spatial:
            return own_region(self.plan, self.place.index("cp"), inputs)
        return own_tokens(self.plan, self.positions, inputs)

    @property
    def _alike(self) -> int:
        """Ranks that compute the same loss: those of tp, and of shards of a sample."""
        shards = self.place.size("cp") if self.plan.strategy.spatial else 1
        return self.place.size("tp") * shards

    def _mean_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        """Mean over the samples of all replicas, or of this one while they are apart.

        Every rank of them gets it; where stages learn by themselves, each has its own.
        """
        place = self.place
        share = torch.zeros((), device=place.device) if loss is None else loss
        # Some ranks have the same loss; each data-parallel rank scaled its own up.
        self.loss_share = share / (self.loss.data_parallel * self._alike)
        if isinstance(self.replicas, DrainedReplicas):
            # Ranks that wait for a loss would wait for all stages.
            self._untold.append(self.loss_share)
            if not self.replicas.drained:
                self._earlier = []
                return torch.full_like(share, float("nan"))
            *self._earlier, last = self._tell()
            return last
        if not place.apart:
            total = self.loss_share.clone()
            if self.step_rule.meets(self.done):
                dist.all_reduce(total)
            return total
        # No number is zero times itself but a finite one: a loss that was not finite
        # since the last exchange is told to all at the next.
        self._spoiled = self._spoiled + 0 * self.loss_share
        self.loss_share = self.loss_share + self._spoiled
        total = self.loss_share.clone()
        if self.replicas.meets(self.done):
            dist.all_reduce(total)
            self._spoiled = torch.zeros_like(self._spoiled)
            return total / place.size("replicate")
        if place.replica is not None:
            dist.all_reduce(total, group=place.replica)
        return total

    def _tell(self) -> list[torch.Tensor]:
        """Losses of the steps since the pipeline was drained before; collective.

        A loss of another copy that was not finite since the last exchange makes those
        that are told at the next not finite.
        """
        place, shares = self.place, torch.stack(self._untold)
        self._untold = []
        if not place.apart:
            dist.all_reduce(shares)
        elif self.replicas.meets(self.done):
            shares = shares + self._spoiled
            dist.all_reduce(shares)
            shares = shares / place.size("replicate")
            self._spoiled = torch.zeros_like(self._spoiled)
        elif place.replica is not None:
            self._spoiled = self._spoiled + 0 * shares.sum()
            dist.all_reduce(shares, group=place.replica)
        return [*shares.unbind()]
