"""``run_federation``: train as one process of a member of a federation."""

from __future__ import annotations

import contextlib
import datetime
import gc
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from executors.checkpoints.checkpoint import CheckpointOptions, Checkpoints
from executors.data import (
    Batch,
    BatchPart,
    Part,
    TrainingData,
    evaluation_batches,
    open_source,
    require_equal_batches,
    require_size,
)
from executors.federation.exchange import MemberExchange, Place
from executors.federation.saving import (
    MemberReplicas,
    member_options,
    require_checkpoints,
    require_exchange,
)
from executors.federation.weights import MemberWeights
from executors.launching.heartbeat import Heartbeat
from executors.launching.process_group import (
    RANK_TIMEOUT_S,
    own_numbers,
    ranks_of_processes,
)
from executors.launching.rendezvous import Meeting, agree, open_store
from executors.loop import StepReport
from executors.mesh import choose_device
from executors.model_source import ModelSource, prepare_trainer
from executors.replicas.local_steps import outer_step
from executors.replicas.membership import Membership
from executors.replicas.pieces import local_part
from executors.runner import require_evaluation_options
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
    kept = _Kept(
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
        eval_data=_require_evaluation(eval_data, evaluate_every),
        evaluate_every=evaluate_every,
    )
    place = _place(federation)
    chosen = choose_device(device)
    timeout = datetime.timedelta(seconds=timeout_s)
    with contextlib.ExitStack() as stack:
        meeting = open_store(
            place.process,
            len(federation.processes),
            rank_timeout_s=rank_timeout_s,
            timeout=timeout,
        )
        membership = _membership(place, meeting, rank_timeout_s, timeout_s)
        if membership is not None:
            stack.enter_context(membership.active())
        own = stack.enter_context(
            _world(place, meeting.store, chosen, rank_timeout_s, timeout)
        )
        source = ModelSource(model_fn=model_fn, seed=seed, weights=kept.files)
        plan = federation.members[place.member].plan
        trainer, inventory = prepare_trainer(plan, source, chosen, force)
        kept.files.load(trainer, inventory)
        exchange = MemberExchange(
            place,
            MemberWeights(trainer, inventory),
            store=meeting.store,
            own=own,
            membership=membership,
            timeout_s=timeout_s,
        )
        run = _Run(place, trainer, exchange, kept, steps)

        def open_checkpoints(joins: bool) -> Checkpoints | None:
            if kept.checkpoints is None:
                return None
            options = member_options(
                kept.checkpoints, place, meeting.store, joins=joins
            )
            saved = Checkpoints(
                options, trainer, inventory, seed=seed, timeout_s=timeout_s, force=force
            )
            return stack.enter_context(saved)

        run.begin(open_checkpoints)
        reports = list(_train(run, data, seed, on_step))
        if place.member == min(exchange.members):
            kept.files.save(trainer, inventory)
        return _result(run, reports)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Weights, checkpoints and evaluations of a run.

    Attributes:
        files: Weights to begin with, and the folder for those at the end.
        checkpoints: Of all members; None for none.
        eval_data: What is evaluated; None for nothing.
        evaluate_every: Steps between evaluations; None for one at the end.
    """

    files: WeightOptions
    checkpoints: CheckpointOptions | None
    eval_data: TrainingData | None
    evaluate_every: int | None


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


def _place(federation: Federation) -> Place:
    """Find out which process of which member this one is.

    Raises:
        ExecutionError: If there are more or fewer processes than the members need, or
            torchrun started them.
    """
    process, world = own_numbers()
    places = federation.processes
    if world != len(places):
        raise ExecutionError(
            f"{world} processes were started, the {len(federation.members)} members "
            f"have {len(places)}; start one for each of their devices"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ExecutionError(
            "torchrun ends all its ranks when one fails, and has them start again in a "
            "store of old keys; use meshwright run, or start each process by itself "
            "with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    if dist.is_initialized():
        raise ExecutionError(
            "a process group exists already, but members have groups of their own; "
            "leave it to run_federation() to make them"
        )
    member, index = places[process]
    mine = [number for number, (one, _) in enumerate(places) if one == member]
    ranks = ranks_of_processes(federation.members[member].processes)
    return Place(
        federation=federation,
        member=member,
        process=process,
        rank=ranks[index],
        leader=mine[0],
        followers=tuple(mine[1:]),
    )


def _membership(
    place: Place, meeting: Meeting, silence_s: float, timeout_s: float
) -> Membership | None:
    """Agreement with the other members, for the process that leads this one."""
    federation = place.federation
    count = len(federation.members)
    if count == 1 or not place.leads:
        return None
    places = federation.processes
    leaders = sorted(
        next(n for n, (one, _) in enumerate(places) if one == member)
        for member in range(count)
    )
    return Membership(
        meeting,
        place.process,
        len(places),
        copy=place.member,
        numbers=leaders,
        fewest=federation.exchange.fewest_copies or count,
        silence_s=silence_s,
        timeout_s=timeout_s,
    )


@contextlib.contextmanager
def _world(
    place: Place,
    store: Store,
    device: torch.device,
    rank_timeout_s: float,
    timeout: datetime.timedelta,
) -> Iterator[Store]:
    """Process group of the member for the block; yields a store of its attempt."""
    count, index = 1 + len(place.followers), 0
    if not place.leads:
        index = 1 + place.followers.index(place.process)
    mine = PrefixStore(f"member/{place.member}", store)
    word = uuid.uuid4().hex
    if count > 1:
        word = agree(mine, index, count, rank_timeout_s)
    own = PrefixStore(word, mine)
    with contextlib.ExitStack() as stack:
        heartbeat: Heartbeat | None = None
        if count > 1:
            meeting = Meeting(store=own, is_host=False)
            heartbeat = Heartbeat(meeting, index, count, rank_timeout_s)
            stack.enter_context(heartbeat)
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("group", own),
                rank=place.rank,
                world_size=count,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
            yield own
        except BaseException as error:
            if heartbeat is not None:
                heartbeat.fail(error)
            raise
        finally:
            # As executors.launching.process_group does, for the reason given there.
            gc.collect()
            if dist.is_initialized():
                dist.destroy_process_group()


class _Run:
    """One process of a member between and at exchanges.

    Args:
        place: Of this process.
        trainer: Of this rank.
        exchange: With the other members.
        kept: What the run leaves behind.
        steps: Of the run.
    """

    def __init__(
        self,
        place: Place,
        trainer: Trainer,
        exchange: MemberExchange,
        kept: _Kept,
        steps: int,
    ) -> None:
        self.place, self.trainer, self.exchange = place, trainer, exchange
        self.federation, self.steps = place.federation, steps
        self._weights, self._options = exchange.weights, kept
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
        if self._options.eval_data is not None:
            self.trainer.require_evaluation()
            self._evaluated = evaluation_batches(self._options.eval_data, *_share(self))
        joined = None
        if len(self.federation.members) > 1:
            joined = self.exchange.begin(self._kinds)
        self._saved = open_checkpoints(joined is not None)
        if self._saved is not None:
            period = self._settings.period
            replicas = MemberReplicas(self.trainer, period, self._kept)
            self.trainer.replicas = replicas
            self.first = self._saved.begin()
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

    def save(self, done: int) -> None:
        """Save a checkpoint if that is due after so many steps; collective."""
        saved = self._saved
        if saved is not None and saved.options.due(done, self.steps):
            saved.save(done)
        elif done == self.steps:
            require_sound_weights(self.trainer, done, self.remedy)

    def remedy(self, change: str) -> str:
        """Add to advice what to resume from; collective."""
        return change if self._saved is None else self._saved.remedy(change)

    def evaluate(self, done: int) -> float | None:
        """Mean loss of the member's share, if that is due; collective in the member."""
        batches, every = self._evaluated, self._options.evaluate_every
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


def _require_evaluation(
    eval_data: TrainingData | None, evaluate_every: int | None
) -> TrainingData | None:
    """Refuse evaluations of nothing.

    Raises:
        ExecutionError: If there are no data, or the number of steps is below 1.
    """
    require_evaluation_options(eval_data, evaluate_every)
    if isinstance(eval_data, list | tuple) and not eval_data:
        raise ExecutionError("eval_data holds no batch; give at least one, or None")
    return eval_data


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
    size = federation.members[place.member].plan.workload.global_batch
    return {name: value[start : start + size] for name, value in batch.items()}


def _train(
    run: _Run,
    data: TrainingData | None,
    seed: int,
    on_step: Callable[[StepReport], None] | None,
) -> Iterator[StepReport]:
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
            yield _one_step(run, own, step, on_step)


def _one_step(
    run: _Run,
    own: Batch | BatchPart,
    step: int,
    on_step: Callable[[StepReport], None] | None,
) -> StepReport:
    """Train one step; exchange, save and evaluate where that is due."""
    trainer = run.trainer
    started = time.perf_counter()
    result = trainer.step(own)
    require_finite_step(trainer, step, result, run.remedy)
    with torch.no_grad():
        run.after_step(step)
    took = time.perf_counter() - started
    run.save(step + 1)
    report = StepReport(
        step=step,
        steps=run.steps,
        loss=result.loss,
        grad_norm=result.grad_norm,
        time_s=took,
        eval_loss=run.evaluate(step + 1),
    )
    if on_step is not None and run.place.leads:
        on_step(report)
    return report
