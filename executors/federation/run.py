"""``run_federation``: train as one process of a member of a federation."""

from __future__ import annotations

import contextlib
import datetime
import gc
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from executors.data import (
    Batch,
    BatchPart,
    TrainingData,
    open_source,
    require_equal_batches,
)
from executors.federation.exchange import MemberExchange, Place
from executors.federation.weights import MemberWeights
from executors.launching.heartbeat import Heartbeat
from executors.launching.process_group import (
    RANK_TIMEOUT_S,
    own_numbers,
    ranks_of_processes,
)
from executors.launching.rendezvous import Meeting, agree, open_store
from executors.mesh import choose_device
from executors.prepared import ModelSource, prepare_trainer
from executors.replicas.local_steps import outer_step
from executors.replicas.membership import Membership
from executors.replicas.pieces import local_part
from executors.runner import StepReport
from executors.soundness import require_finite_step, require_sound_weights
from executors.trainer import Trainer
from planner.errors import ExecutionError
from planner.schema import Federation

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
        first_step: Steps done as it joined; 0 if it was there from the beginning.
    """

    member: int
    rank: int
    losses: tuple[float, ...]
    step_times_s: tuple[float, ...]
    exchange_times_s: tuple[float, ...]
    sent_bytes: int
    first_step: int


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
) -> FederationResult:
    """Train a model by a federation.

    Every process of :attr:`planner.schema.Federation.processes` calls it with equal
    arguments, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment.

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

    Raises:
        ExecutionError: If the number of processes is wrong, a plan cannot be run, or a
            loss or weight is not finite.
        RankFailedError: If a process of this member has failed, or the others went on
            without it.
        FingerprintError: If the plans are for another model.
    """
    if steps < 1:
        raise ExecutionError(f"steps={steps}; a run has at least 1 step")
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
        source = ModelSource(model_fn=model_fn, seed=seed)
        plan = federation.members[place.member].plan
        trainer, inventory = prepare_trainer(plan, source, chosen, force)
        weights = MemberWeights(trainer, inventory)
        exchange = MemberExchange(
            place,
            weights,
            store=meeting.store,
            own=own,
            membership=membership,
            timeout_s=timeout_s,
        )
        run = _Run(federation, trainer, weights, exchange)
        if len(federation.members) > 1:
            run.begin()
        reports = list(_train(run, place, data, steps, seed, on_step))
        return FederationResult(
            member=place.member,
            rank=place.rank,
            losses=tuple(report.loss for report in reports),
            step_times_s=tuple(report.time_s for report in reports),
            exchange_times_s=tuple(run.exchange_times_s),
            sent_bytes=exchange.sent_bytes,
            first_step=run.first,
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
        federation: All members.
        trainer: Of this rank.
        weights: Of its member.
        exchange: With the other members.
    """

    def __init__(
        self,
        federation: Federation,
        trainer: Trainer,
        weights: MemberWeights,
        exchange: MemberExchange,
    ) -> None:
        self.federation, self.trainer = federation, trainer
        self._weights, self._exchange = weights, exchange
        self._settings = federation.exchange
        #: Weights of the last exchange and momentum, as this rank's parts, by kind.
        self._kept: dict[str, dict[nn.Parameter, torch.Tensor]] = {}
        self.first = 0
        self.exchange_times_s: list[float] = []
        if self._settings.takes_mean:
            return
        self._kept["global"] = {p: local_part(p).clone() for p in weights.parameters}
        if self._settings.outer_momentum:
            self._kept["momentum"] = {
                p: torch.zeros_like(local_part(p)) for p in weights.parameters
            }

    @property
    def _kinds(self) -> tuple[str, ...]:
        return ("weights", *self._kept)

    def begin(self) -> None:
        """Take the state of a member that trains, if the run began before."""
        joined = self._exchange.begin(self._kinds)
        if joined is None:
            return
        for kind in self._kinds:
            for copies, part in self._weights.spread(joined.kept[kind]):
                for parameter in copies:
                    self._live(kind, parameter).copy_(part)
        self.first = self.trainer.done = joined.done
        _LOG.info("joined after step %d", joined.done)

    def _live(self, kind: str, parameter: nn.Parameter) -> torch.Tensor:
        if kind == "weights":
            return local_part(parameter)
        return self._kept[kind][parameter]

    def after_step(self, step: int) -> None:
        """Exchange weights where that is due; collective."""
        number, rest = divmod(step + 1, self._settings.period)
        if rest or len(self.federation.members) == 1:
            return
        started = time.perf_counter()
        kept = self._kept.get("global")

        def way(parameter: nn.Parameter) -> torch.Tensor:
            local = local_part(parameter)
            return local if kept is None else kept[parameter] - local

        values = self._weights.whole(way)
        self._require_finite(values, number)
        mean, order = self._exchange.mean(number, values)
        momentum = self._kept.get("momentum", {})
        for copies, part in self._weights.spread(mean):
            for parameter in copies:
                new = part
                if kept is not None:
                    new = outer_step(
                        self._settings, kept[parameter], momentum.get(parameter), part
                    )
                local_part(parameter).copy_(new)
        self._exchange.admit(order, step + 1, self._whole, self._kinds)
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
            raise ExecutionError(
                f"{first} of this member is not finite at exchange {number}, which it "
                f"takes no part in; lower the learning rate or set grad_clip_norm"
            )


def _train(
    run: _Run,
    place: Place,
    data: TrainingData | None,
    steps: int,
    seed: int,
    on_step: Callable[[StepReport], None] | None,
) -> Iterator[StepReport]:
    """Train step by step on the member's share of the batch."""
    trainer, federation = run.trainer, run.federation
    workload = trainer.plan.workload
    whole = workload.model_copy(update={"global_batch": federation.global_batch})
    start, own_part = federation.first_samples[place.member], trainer.part
    mine = slice(start, start + workload.global_batch)
    source = open_source(
        data,
        whole,
        replace(
            own_part,
            start=start + own_part.start,
            stop=start + own_part.stop,
            whole=federation.global_batch,
        ),
        seed=seed,
        pin_memory=trainer.place.device.type == "cuda",
    )
    with contextlib.closing(source):
        for step in range(run.first, steps):
            own: Batch | BatchPart = source.batch(step)
            if not isinstance(own, BatchPart):
                own = {name: value[mine] for name, value in own.items()}
                require_equal_batches(own, step, trainer.place.device)
            yield _one_step(run, place, own, step, steps, on_step)
    require_sound_weights(trainer, steps, _unchanged)


def _one_step(
    run: _Run,
    place: Place,
    own: Batch | BatchPart,
    step: int,
    steps: int,
    on_step: Callable[[StepReport], None] | None,
) -> StepReport:
    """Train one step, and exchange weights where that is due."""
    trainer = run.trainer
    started = time.perf_counter()
    result = trainer.step(own)
    require_finite_step(trainer, step, result, _unchanged)
    with torch.no_grad():
        run.after_step(step)
    report = StepReport(
        step=step,
        steps=steps,
        loss=result.loss,
        grad_norm=result.grad_norm,
        time_s=time.perf_counter() - started,
    )
    if on_step is not None and place.leads:
        on_step(report)
    return report


def _unchanged(change: str) -> str:
    return change
