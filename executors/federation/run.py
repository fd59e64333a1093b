"""``run_federation``: train as one process of a member of a federation."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
import torch.distributed as dist
from torch import nn

from executors.checkpoints.checkpoint import CheckpointOptions, Checkpoints
from executors.checkpoints.snapshot import Inventory
from executors.data import (
    Batch,
    BatchPart,
    Part,
    TrainingData,
    evaluation_batches,
    open_source,
    require_equal_batches,
    require_size,
    take_samples,
)
from executors.federation.exchange import MemberExchange, Place
from executors.federation.options import RunOptions, Start, require_evaluation
from executors.federation.places import find_place, make_membership, member_group
from executors.federation.saving import (
    MemberReplicas,
    member_options,
    require_checkpoints,
    require_exchange,
)
from executors.federation.weights import MemberWeights
from executors.launching.process_group import (
    RANK_TIMEOUT_S,
)
from executors.launching.rendezvous import open_store
from executors.learning_rates import RateSchedule, SchedulerFactory
from executors.loop import Callback, LoopState, StepReport, TrainedMember
from executors.loop.metrics import last_gradient_norm
from executors.mesh import choose_device
from executors.model_source import ModelSource, prepare_trainer
from executors.nonfinite import OnNonfinite, SkippingStep, require_policy
from executors.replicas.local_steps import outer_step
from executors.replicas.pieces import local_part
from executors.soundness import require_finite_step, require_sound_weights
from executors.trainer import Trainer
from executors.weights.options import WeightOptions
from planner.errors import ExecutionError, NonFiniteError
from planner.schema import Federation, Workload

__all__ = ["FederationResult", "run_federation"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FederationResult:
    """Results of one process.

    Attributes:
        member: Number of its member.
        rank: Its rank in the member.
        losses: Mean loss of each step from ``first_step`` on, over the member's share
            of the batch.
        step_times_s: Wall-clock time of each, exchanges included.
        exchange_times_s: Wall-clock time of each exchange.
        sent_bytes: Bytes that this process sent to other members.
        first_step: Steps done as it joined, or of the checkpoint that it went on from;
            0 if it was there from the beginning.
        evaluations: Steps done and mean loss of each evaluation, over the member's
            share of each batch; all members evaluate equal weights.
    """

    member: int
    rank: int
    losses: tuple[float, ...]
    step_times_s: tuple[float, ...]
    exchange_times_s: tuple[float, ...]
    sent_bytes: int
    first_step: int
    evaluations: tuple[tuple[int, float], ...] = ()


def run_federation(
    federation: Federation,
    model_fn: Callable[[], nn.Module],
    data: TrainingData | None = None,
    *,
    steps: int,
    seed: int = 0,
    device: str | None = None,
    on_step: Callable[[StepReport], None] | None = None,
    force: bool = False,
    timeout_s: float = 600.0,
    rank_timeout_s: float = RANK_TIMEOUT_S,
    eval_data: TrainingData | None = None,
    evaluate_every: int | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: bool | str = False,
    keep_checkpoints: int = 2,
    background_checkpoints: bool = False,
    init_from: str | os.PathLike[str] | None = None,
    allow_missing_weights: bool = False,
    save_hf: str | os.PathLike[str] | None = None,
    save_dtype: str | None = None,
    scheduler: SchedulerFactory | None = None,
    document_separator: int | None = None,
    check_replicas_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    on_nonfinite: OnNonfinite = "stop",
) -> FederationResult:
    """Train a model by a federation.

    Every process of :attr:`planner.schema.Federation.processes` calls it with equal
    arguments, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment.
    Members exchange weights behind the last step, too, so that all end with the same.

    Args:
        federation: What to do.
        model_fn: As for :func:`executors.run`.
        data: Likewise; of a global batch each member takes its share.
        steps: Optimizer steps, at least 1.
        seed: Of parameters, synthetic batches and dropout.
        device: ``cpu`` or ``cuda``; None for GPUs where there are any.
        on_step: Called after each step, on the process that leads each member.
        force: Run although the model's fingerprint is another one.
        timeout_s: How long a message may take, in seconds.
        rank_timeout_s: Silence after which a process is lost, in seconds.
        eval_data: Global batches of which the mean loss is computed at the end; each
            member evaluates its share of each. None for none.
        evaluate_every: Steps between further evaluations, a multiple of the period.
        checkpoint_dir: Folder for the state of each member, in a folder of the
            member's name, which all processes of the member see. None to keep none.
        checkpoint_every: Steps between checkpoints, a multiple of the period; None for
            one at the end.
        resume: Go on from the last step that all members saved, if there is one; or
            from a named one, ``step-000100``.
        keep_checkpoints: As for :func:`executors.run`; likewise all that follow.
        background_checkpoints: See there.
        init_from: See there.
        allow_missing_weights: See there.
        save_hf: See there; the first member that is there at the end writes it.
        save_dtype: See there.
        scheduler: Of each member's learning rates; likewise.
        document_separator: See there.
        check_replicas_every: Steps between checks that the weights of each member are
            finite, and equal on all its ranks that hold copies of them.
        callbacks: Called on every process, of what its member does; none may stop the
            run. ``state.prepared`` has the member's plan and trainer.
        on_nonfinite: As for :func:`executors.run`, of a member's own loss and gradient
            norm. Weights that are not finite end a member at an exchange in any case.

    Raises:
        ExecutionError: If the number of processes is wrong, a plan cannot be run, a
            loss or weight is not finite, evaluations or checkpoints would fall between
            exchanges, or files cannot be read or written.
        RankFailedError: If a process of this member has failed, or the others went on
            without it.
        FingerprintError: If the plans are for another model.
    """
    if steps < 1:
        raise ExecutionError(f"steps={steps}; a run has at least 1 step")
    require_exchange(federation, "evaluate_every", evaluate_every)
    require_policy(on_nonfinite)
    if check_replicas_every is not None and check_replicas_every < 1:
        raise ExecutionError(
            f"check_replicas_every={check_replicas_every}; give a number of at least 1"
        )
    options = RunOptions(
        files=WeightOptions.of(
            model_fn, init_from, allow_missing_weights, save_hf, save_dtype
        ),
        checkpoints=require_checkpoints(
            federation,
            CheckpointOptions.of(
                checkpoint_dir,
                checkpoint_every,
                resume,
                keep_checkpoints,
                background_checkpoints,
            ),
            steps,
        ),
        eval_data=require_evaluation(eval_data, evaluate_every),
        evaluate_every=evaluate_every,
        scheduler=scheduler,
        document_separator=document_separator,
        check_every=check_replicas_every,
        callbacks=tuple(callbacks),
        on_nonfinite=on_nonfinite,
    )
    start = Start(
        model_fn=model_fn,
        seed=seed,
        device=choose_device(device),
        force=force,
        timeout_s=timeout_s,
        rank_timeout_s=rank_timeout_s,
    )
    with contextlib.ExitStack() as stack:
        run = _begin(find_place(federation), start, options, steps, stack)
        reports = _train(run, data, seed, on_step)
        run.save_weights()
        return _result(run, reports)


def _begin(
    place: Place,
    start: Start,
    options: RunOptions,
    steps: int,
    stack: contextlib.ExitStack,
) -> _Run:
    """Meet the other processes, build this rank's part, and go on where others are."""
    timeout = datetime.timedelta(seconds=start.timeout_s)
    silence_s = start.rank_timeout_s
    processes = len(place.federation.processes)
    meeting = open_store(
        place.process, processes, rank_timeout_s=silence_s, timeout=timeout
    )
    membership = make_membership(place, meeting, silence_s, start.timeout_s)
    if membership is not None:
        stack.enter_context(membership.active())
    own = stack.enter_context(
        member_group(place, meeting.store, start.device, silence_s, timeout)
    )
    source = ModelSource(
        model_fn=start.model_fn, seed=start.seed, weights=options.files
    )
    plan = place.federation.members[place.member].plan
    trainer, inventory = prepare_trainer(
        plan,
        source,
        start.device,
        start.force,
        document_separator=options.document_separator,
    )
    options.files.load(trainer, inventory)
    exchange = MemberExchange(
        place,
        MemberWeights(trainer, inventory),
        store=meeting.store,
        own=own,
        membership=membership,
        timeout_s=start.timeout_s,
    )
    run = _Run(place, trainer, inventory, exchange, options, steps)

    def open_checkpoints(joins: bool) -> Checkpoints | None:
        if options.checkpoints is None:
            return None
        mine = member_options(options.checkpoints, place, meeting.store, joins=joins)
        saved = Checkpoints(
            mine,
            trainer,
            inventory,
            seed=start.seed,
            timeout_s=start.timeout_s,
            force=start.force,
        )
        return stack.enter_context(saved)

    run.begin(open_checkpoints)
    return run


def _result(run: _Run, reports: Sequence[StepReport]) -> FederationResult:
    return FederationResult(
        member=run.place.member,
        rank=run.place.rank,
        losses=tuple(report.loss for report in reports),
        step_times_s=tuple(report.time_s for report in reports),
        exchange_times_s=tuple(run.exchange_times_s),
        sent_bytes=run.exchange.sent_bytes,
        first_step=run.first,
        evaluations=tuple(
            (report.step + 1, report.eval_loss)
            for report in reports
            if report.eval_loss is not None
        ),
    )


class _Run:
    """One process of a member between and at exchanges.

    Args:
        place: Of this process.
        trainer: Of this rank.
        inventory: Of the model.
        exchange: With the other members.
        options: Of the run.
        steps: Of the run.

    Attributes:
        rates: Learning rates of the member.
        state: Of the run, as callbacks see it.
        skipping: Leaves out steps that are not finite; None if they are not left out.
    """

    def __init__(
        self,
        place: Place,
        trainer: Trainer,
        inventory: Inventory,
        exchange: MemberExchange,
        options: RunOptions,
        steps: int,
    ) -> None:
        self.place, self.trainer, self.exchange = place, trainer, exchange
        self.federation, self.steps = place.federation, steps
        self._weights, self.options = exchange.weights, options
        self._inventory = inventory
        self.skipping: SkippingStep | None = None
        if options.on_nonfinite == "skip":
            self.skipping = SkippingStep(trainer)
        self.rates = RateSchedule(trainer.optimizer, options.scheduler)
        member = TrainedMember(plan=trainer.plan, trainer=trainer)
        self.state = LoopState(prepared=member, steps=steps, first=0)
        self._settings = self.federation.exchange
        #: Weights of the last exchange and momentum, as this rank's parts, by kind.
        self._kept: dict[str, dict[nn.Parameter, torch.Tensor]] = {}
        self._saved: Checkpoints | None = None
        self._evaluated: Sequence[Batch | BatchPart] | None = None
        self.first = 0
        self.exchange_times_s: list[float] = []
        if self._settings.takes_mean:
            return
        parameters = list(self._weights.parameters)
        self._kept["global"] = {p: local_part(p).clone() for p in parameters}
        if self._settings.outer_momentum:
            self._kept["momentum"] = {
                p: torch.zeros_like(local_part(p)) for p in parameters
            }

    @property
    def _kinds(self) -> tuple[str, ...]:
        return ("weights", *self._kept)

    def begin(self, open_checkpoints: Callable[[bool], Checkpoints | None]) -> None:
        """Go on from checkpoints, or take the state of a member that trains.

        A member that joins goes on with the state of its optimizer that its last
        checkpoint holds, and with the weights of the others.

        Args:
            open_checkpoints: Makes those of this member, told whether it joins.
        """
        if self.options.eval_data is not None:
            self.trainer.require_evaluation()
            self._evaluated = evaluation_batches(self.options.eval_data, *_share(self))
        joined = None
        if len(self.federation.members) > 1:
            joined = self.exchange.begin(self._kinds)
        self._saved = open_checkpoints(joined is not None)
        if self._saved is not None:
            period = self._settings.period
            replicas = MemberReplicas(self.trainer, period, self._kept)
            self.trainer.replicas = replicas
            self.first = self._saved.begin()
            self.rates.forward(self.first)
        if joined is None:
            return
        for kind in self._kinds:
            for copies, part in self._weights.spread(joined.kept[kind]):
                for parameter in copies:
                    self._live(kind, parameter).copy_(part)
        own = f"its optimizer's state is that after step {self.first}"
        _LOG.info(
            "joined after step %d; %s",
            joined.done,
            own if self.first else "its optimizer begins anew",
        )
        self.first = self.trainer.done = joined.done
        self.rates.forward(self.first)

    def save(self, done: int) -> None:
        """Save a checkpoint, or check weights, if that is due; collective."""
        saved, every = self._saved, self.options.check_every
        if saved is not None and saved.options.due(done, self.steps):
            folder = saved.save(done)
            for callback in self.options.callbacks:
                callback.on_save(self.state, folder)
        elif done == self.steps or (every and not done % every):
            require_sound_weights(self.trainer, done, self.remedy)

    def save_weights(self) -> None:
        """Write the weights at the end, as the first member that is there."""
        if self.place.member == min(self.exchange.members):
            self.options.files.save(self.trainer, self._inventory)

    def tell(self, report: StepReport) -> None:
        """Tell callbacks about a step.

        Raises:
            ExecutionError: If one of them wants to stop the run.
        """
        for callback in self.options.callbacks:
            callback.on_step(self.state, report)
            if report.eval_loss is not None:
                callback.on_evaluate(self.state, report.step + 1, report.eval_loss)
        if self.state.reason is not None:
            raise ExecutionError(
                f"a callback stops the run after step {report.step + 1} "
                f"({self.state.reason}), but members of a federation end together; "
                f"give fewer steps"
            )

    def remedy(self, change: str) -> str:
        """Add to advice what to resume from; collective."""
        return change if self._saved is None else self._saved.remedy(change)

    def evaluate(self, done: int) -> float | None:
        """Mean loss of the member's share, if that is due; collective in the member."""
        batches, every = self._evaluated, self.options.evaluate_every
        if batches is None or not (done == self.steps or (every and not done % every)):
            return None
        losses = []
        for batch in batches:
            own = batch
            if not isinstance(batch, BatchPart):
                inputs = self.trainer.plan.workload.inputs
                require_size(batch, self.federation.global_batch, inputs)
                own = _share_of(batch, self.place)
                require_equal_batches(own, done - 1, self.trainer.place.device)
            losses.append(self.trainer.evaluate(own))
        return fmean(losses)

    def is_due(self, done: int) -> bool:
        """Return True if members exchange weights after so many steps."""
        due = not done % self._settings.period or done == self.steps
        return due and len(self.federation.members) > 1

    def _live(self, kind: str, parameter: nn.Parameter) -> torch.Tensor:
        if kind == "weights":
            return local_part(parameter)
        return self._kept[kind][parameter]

    def after_step(self, step: int) -> None:
        """Exchange weights where that is due; collective."""
        if not self.is_due(step + 1):
            return
        number = -(-(step + 1) // self._settings.period)
        started = time.perf_counter()
        kept = self._kept.get("global")

        def way(parameter: nn.Parameter) -> torch.Tensor:
            local = local_part(parameter)
            return local if kept is None else kept[parameter] - local

        values = self._weights.whole(way)
        self._require_finite(values, number)
        mean, order = self.exchange.mean(number, values)
        momentum = self._kept.get("momentum", {})
        for copies, part in self._weights.spread(mean):
            for parameter in copies:
                new = part
                if kept is not None:
                    new = outer_step(
                        self._settings, kept[parameter], momentum.get(parameter), part
                    )
                local_part(parameter).copy_(new)
        self.exchange.admit(order, step + 1, self._whole, self._kinds)
        self.exchange_times_s.append(time.perf_counter() - started)

    def _whole(self, kind: str) -> dict[str, torch.Tensor]:
        return self._weights.whole(lambda parameter: self._live(kind, parameter))

    def _require_finite(self, values: Mapping[str, torch.Tensor], number: int) -> None:
        """End this member before it spoils the others; collective in the member."""
        wrong = [name for name, one in values.items() if not torch.isfinite(one).all()]
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, wrong[0] if wrong else None)
        first = next((name for name in found if name is not None), None)
        if first is not None:
            raise NonFiniteError(
                f"{first} of this member is not finite at exchange {number}, which it "
                f"takes no part in; lower the learning rate or set grad_clip_norm"
            )


def _share(run: _Run) -> tuple[Workload, Part]:
    """Workload of the whole federation, and the samples of it that this rank reads."""
    federation, own = run.federation, run.trainer.part
    size = federation.global_batch
    start = federation.first_samples[run.place.member]
    whole = run.trainer.plan.workload.model_copy(update={"global_batch": size})
    part = replace(own, start=start + own.start, stop=start + own.stop, whole=size)
    return whole, part


def _share_of(batch: Batch, place: Place) -> Batch:
    """Samples of a global batch that this member trains."""
    federation = place.federation
    start = federation.first_samples[place.member]
    stop = start + federation.members[place.member].plan.workload.global_batch
    return take_samples(batch, slice(start, stop), federation.global_batch)


def _train(
    run: _Run,
    data: TrainingData | None,
    seed: int,
    on_step: Callable[[StepReport], None] | None,
) -> list[StepReport]:
    """Train to the end, and let every callback end, whatever ends the run."""
    callbacks, error = run.options.callbacks, None
    run.state.first = run.first
    reports = []
    try:
        for callback in callbacks:
            callback.on_start(run.state)
        for report in _steps(run, data, seed):
            run.tell(report)
            if on_step is not None and run.place.leads:
                on_step(report)
            reports.append(report)
    except BaseException as found:
        error = found
        raise
    finally:
        with contextlib.ExitStack() as stack:
            for callback in reversed(callbacks):
                stack.callback(callback.on_end, run.state, error)
    return reports


def _steps(run: _Run, data: TrainingData | None, seed: int) -> Iterator[StepReport]:
    """Train step by step on the member's share of the batch."""
    trainer, place = run.trainer, run.place
    whole, part = _share(run)
    on_gpu = trainer.place.device.type == "cuda"
    source = open_source(data, whole, part, seed=seed, pin_memory=on_gpu)
    with contextlib.closing(source):
        for step in range(run.first, run.steps):
            own: Batch | BatchPart = source.batch(step)
            if not isinstance(own, BatchPart):
                own = _share_of(own, place)
                require_equal_batches(own, step, trainer.place.device)
            yield _one_step(run, own, step)


def _one_step(run: _Run, own: Batch | BatchPart, step: int) -> StepReport:
    """Train one step; exchange, save and evaluate where that is due."""
    trainer, options = run.trainer, run.options
    rate = trainer.optimizer.param_groups[0].get("lr")
    started = time.perf_counter()
    result = trainer.step(own)
    if options.on_nonfinite == "stop":
        require_finite_step(trainer, step, result, run.remedy)
    skipped = run.skipping is not None and run.skipping.skipped
    run.rates.step()
    norm = result.grad_norm
    if norm is None and any(one.needs_grad_norm for one in options.callbacks):
        norm = last_gradient_norm(trainer)
    with torch.no_grad():
        run.after_step(step)
    took = time.perf_counter() - started
    run.save(step + 1)
    return StepReport(
        step=step,
        steps=run.steps,
        loss=result.loss,
        grad_norm=norm,
        time_s=took,
        eval_loss=run.evaluate(step + 1),
        learning_rate=None if rate is None else float(rate),
        skipped=skipped,
    )
