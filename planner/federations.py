"""``federate``: unlike machines as members that train apart and exchange weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from planner import __version__
from planner.api import plan_graph, read_model
from planner.cluster import Cluster
from planner.cost.federation import ExchangeCost, price_exchange
from planner.device_sets import list_choices
from planner.errors import ClusterError, NoFeasiblePlanError, StrategyError
from planner.graph import ModelGraph
from planner.graph.fused_kernels import with_fused_kernels
from planner.measurements.store import CalibrationChoice
from planner.request import (
    DEFAULT_RISK,
    PlanOptions,
    default_precision,
    devices_without,
    make_request,
)
from planner.schema import Optimizer, Plan, Precision
from planner.schema.federation import (
    Federation,
    FederationPrediction,
    Formation,
    Member,
)
from planner.schema.fused_kernels import KernelChoice
from planner.schema.methods import read_method
from planner.schema.methods.local_steps import LocalSteps
from planner.search.base import GroupOrderer, Index, get_partitioner
from planner.search.federation import Division, SegmentPricer, divide

if TYPE_CHECKING:
    import torch

__all__ = [
    "FleetPlanner",
    "PlannedDivision",
    "federate",
    "federate_graph",
    "plan_divisions",
    "read_exchange",
    "segment_pricer",
]

#: Longest period that is chosen: DiLoCo's evidence is of 500 steps (2311.08105).
_LONGEST = 512
#: Share of a step that an exchange may take, if the period allows.
_SHARE = 0.02
#: Partitioner that compares divisions, and strategies that it may simulate for each
#: member; the chosen one's plans are made as asked.
_QUICK, _QUICK_BUDGET = "learned", 8
#: Orders of hosts that a partitioner draws for a fleet.
_DRAWN = 48
#: Rounds in which the batch is divided anew by the members' planned steps, unless the
#: fastest waits for less than this share of a step.
_ROUNDS, _EVEN = 3, 0.04
#: Most moves of samples from the slowest member to a faster one; members that are tried
#: as the faster one in each, and numbers of samples.
_MOVES, _TAKERS, _TRIED = 8, 2, 4
#: Power of two above which a share is as good as any that it divides.
_EVEN_SHARE = 32
#: Divisions are planned whose estimate is within this factor of the best.
_WITHIN = 1.1
#: Parts of the batch for each member, at least, if the batch has so many.
_PARTS = 32


def federate(
    model: torch.nn.Module | ModelGraph | str | Mapping[str, Any],
    cluster: Cluster | str,
    *,
    global_batch: int,
    example_inputs: Any = None,
    seq_len: int | None = None,
    exchange: LocalSteps | str | None = None,
    weighting: Literal["samples", "equal"] = "samples",
    members: Sequence[Sequence[int]] | None = None,
    most_members: int = 8,
    partitioner: str | Sequence[str] = "auto",
    pin: Mapping[str, Any] | None = None,
    precision: Precision | None = None,
    optimizer: Optimizer | None = None,
    grad_clip_norm: float | None = None,
    calibration: CalibrationChoice = "shipped",
    memory_fraction: float = 0.9,
    risk: float | Literal["none"] = DEFAULT_RISK,
    seed: int = 0,
    kernels: KernelChoice = "as-is",
) -> Federation:
    """Divide unlike machines into members that each hold and train the model.

    Members train by exact plans of their own and exchange their weights every few
    steps, so that a slow network is used that often alone; the model that comes out is
    another one than exact training's. Hosts are not divided.

    Args:
        model: As for :func:`planner.plan`.
        cluster: The fleet; likewise.
        global_batch: Samples of a step over all members, which divide it by speed.
        example_inputs: As for :func:`planner.plan`.
        seq_len: Likewise.
        exchange: How often weights are exchanged, and what becomes of their mean:
            ``diloco:period=100``. None for the plain mean after the shortest period, a
            power of two, under which exchanges take 2 % of the time, 512 at most.
        weighting: Whether members count in the mean by their ``samples``, or ``equal``.
        members: Device ids of each member; None to search for the division with the
            shortest mean step.
        most_members: Largest number of members that is tried.
        partitioner: As for :func:`planner.plan`, for the plan of each member.
        pin: Likewise; holds in every member.
        precision: As for :func:`planner.plan`; likewise all that follow. None for the
            dtype in which each member's devices are fastest; weights, which are
            averaged, are in float32.
        optimizer: See there.
        grad_clip_norm: Of a member's own gradient.
        calibration: See there.
        memory_fraction: See there.
        risk: See there.
        seed: Of everything random.
        kernels: As for :func:`planner.plan`.
    Raises:
        NoFeasiblePlanError: If no part of the fleet holds the model: what lacks, by how
            much, what would fit.
        StrategyError: If a value is out of range, or ``exchange`` is of another method.
        ClusterError: If devices of ``members`` do not exist, or are in two.
        MeshwrightError: As :func:`planner.plan`.
    """
    options = PlanOptions(
        global_batch=global_batch,
        pin=pin or {},
        precision=precision or Precision(),
        any_dtype=precision is None,
        optimizer=optimizer or Optimizer(),
        grad_clip_norm=grad_clip_norm,
        calibration=calibration,
        memory_fraction=memory_fraction,
        risk=risk,
        seed=seed,
        kernels=kernels,
    )
    fleet = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    graph = read_model(
        model,
        example_inputs,
        seq_len=seq_len,
        dtype=options.precision.activation_dtype,
    )
    return federate_graph(
        graph,
        fleet,
        options,
        exchange=read_exchange(exchange),
        weighting=weighting,
        members=members,
        most_members=most_members,
        partitioner=partitioner,
    )


def read_exchange(exchange: LocalSteps | str | None) -> LocalSteps | None:
    """Read how weights are exchanged.

    Raises:
        StrategyError: If it is not local steps.
        UnknownNameError: If there is no such method.
    """
    if exchange is None:
        return None
    found = read_method("synchronisation", exchange)
    if not isinstance(found, LocalSteps):
        raise StrategyError(
            f"exchange={found} is no exchange every few steps; use local_steps or "
            f"diloco, such as diloco:period=100"
        )
    return found


def federate_graph(
    graph: ModelGraph,
    fleet: Cluster,
    options: PlanOptions,
    *,
    exchange: LocalSteps | None = None,
    weighting: Literal["samples", "equal"] = "samples",
    members: Sequence[Sequence[int]] | None = None,
    most_members: int = 8,
    partitioner: str | Sequence[str] = "auto",
) -> Federation:
    """Federate for a model that was read before; see :func:`federate`.

    Args:
        graph: The model.
        fleet: The machines.
        options: What is asked of the members' plans; the batch is that of all.
        exchange: How often weights are exchanged; None to choose the period.
        weighting: As for :func:`federate`; likewise all that follow.
        members: See there.
        most_members: See there.
        partitioner: See there.
    Raises:
        MeshwrightError: As :func:`federate`.
    """
    if most_members < 1:
        raise StrategyError(f"most_members={most_members}; give at least 1")
    if options.kernels == "fused":
        graph = with_fused_kernels(graph)
    planner = FleetPlanner(graph=graph, fleet=fleet, options=options, exchange=exchange)
    if members is not None:
        given = _read_members(fleet, members)
        found, segments = [planner.evened(planner.balanced(given, None))], 0
    else:
        found, segments = plan_divisions(planner, most_members)
    best, *others = found
    if partitioner != _QUICK:
        asked = planner.with_plans(best, partitioner)
        best = min(best, asked, key=lambda one: one.step_time_s)
    return _document(planner, best, others, weighting, segments, members is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDivision:
    """A division with the plans of its members.

    Attributes:
        devices: Fleet ids of each member.
        plans: Of each.
        cost: Price of an exchange.
        period: Steps from one exchange to the next.
    """

    devices: tuple[tuple[int, ...], ...]
    plans: tuple[Plan, ...]
    cost: ExchangeCost
    period: int

    @property
    def step_time_s(self) -> float:
        """Seconds of a mean step: the slowest member's, and the exchange's share."""
        slowest = max(plan.prediction.step_time_s for plan in self.plans)
        return slowest + self.cost.seconds / self.period

    @property
    def words(self) -> str:
        """Devices of each member, for people."""
        parts = (",".join(map(str, one)) for one in self.devices)
        noun = "member" if len(self.devices) == 1 else "members"
        return f"{len(self.devices)} {noun}: {' | '.join(parts)}"


@dataclass(kw_only=True)
class FleetPlanner:
    """Plans members, each once for a number of samples.

    Attributes:
        graph: The model.
        fleet: The machines.
        options: What is asked of the members' plans; the batch is that of all.
        exchange: How often weights are exchanged; None to choose the period.
        orderer: Partitioner that draws orders of the hosts, which are cut into members
            beside those of rules; None for the rules alone.
    """

    graph: ModelGraph
    fleet: Cluster
    options: PlanOptions
    exchange: LocalSteps | None
    orderer: str | None = _QUICK
    _plans: dict[tuple[tuple[int, ...], int], Plan] = field(default_factory=dict)
    _parts: dict[tuple[int, ...], Cluster] = field(default_factory=dict)

    def plan(
        self,
        devices: tuple[int, ...],
        samples: int,
        partitioner: str | Sequence[str] = _QUICK,
    ) -> Plan:
        """Plan one member for some samples a step."""
        key = (devices, samples)
        if partitioner == _QUICK and key in self._plans:
            return self._plans[key]
        if devices not in self._parts:
            self._parts[devices] = self.fleet.part(devices)
        part, asked = self._parts[devices], self.options.precision
        given = None if self.options.any_dtype else asked
        options = replace(
            self.options,
            global_batch=samples,
            precision=default_precision(part, given)[0],
        )
        if partitioner == _QUICK:
            options = replace(options, evaluation_budget=_QUICK_BUDGET)
        made = plan_graph(self.graph, part, options, partitioner=partitioner)
        made = made.model_copy(update={"timing_s": {}})
        if partitioner == _QUICK:
            self._plans[key] = made
        return made

    def balanced(
        self, devices: tuple[tuple[int, ...], ...], rates: Sequence[float] | None
    ) -> PlannedDivision:
        """Plan a division whose members take about equally long for a step.

        Args:
            devices: Fleet ids of each member.
            rates: Samples a second of each, by estimates; None for their peaks'.
        Raises:
            NoFeasiblePlanError: If a member does not hold the model.
        """
        guess = list(rates) if rates is not None else self._peaks(devices)
        best: PlannedDivision | None = None
        for _ in range(_ROUNDS):
            sizes = _share(self.options.global_batch, guess)
            found = self.planned(devices, sizes)
            if best is not None and found.step_time_s >= best.step_time_s:
                break
            best = found
            guess = [plan.prediction.samples_per_s for plan in found.plans]
            steps = [plan.prediction.step_time_s for plan in found.plans]
            if min(steps) >= (1 - _EVEN) * max(steps):
                break
        assert best is not None
        return best

    def evened(self, found: PlannedDivision) -> PlannedDivision:
        """Move samples from the slowest member to faster ones as long as that helps.

        Rates change with the share, because microbatches must divide it: what is
        divided by rates may leave members waiting.

        Args:
            found: A division with plans of its members.
        """
        for _ in range(_MOVES if len(found.plans) > 1 else 0):
            better = next(
                (
                    one
                    for sizes in _moved_shares(found.plans)
                    if (one := self._within(found, sizes)) is not None
                ),
                None,
            )
            if better is None:
                break
            found = better
        return found

    def _within(
        self, found: PlannedDivision, sizes: Sequence[int]
    ) -> PlannedDivision | None:
        """Plan a division with other shares; None if its step is no shorter."""
        try:
            made = self.planned(found.devices, sizes)
        except NoFeasiblePlanError:
            return None
        return made if made.step_time_s < found.step_time_s * (1 - 1e-9) else None

    def with_plans(
        self, found: PlannedDivision, partitioner: str | Sequence[str]
    ) -> PlannedDivision:
        """Plan the members of a division again, by the partitioners that were asked."""
        sizes = [plan.workload.global_batch for plan in found.plans]
        return self.planned(found.devices, sizes, partitioner)

    def planned(
        self,
        devices: tuple[tuple[int, ...], ...],
        sizes: Sequence[int],
        partitioner: str | Sequence[str] = _QUICK,
    ) -> PlannedDivision:
        """Plan a division whose members train given numbers of samples.

        Args:
            devices: Fleet ids of each member.
            sizes: Samples of a step of each.
            partitioner: As for :func:`planner.plan`.
        Raises:
            NoFeasiblePlanError: If a member does not hold the model.
        """
        plans = tuple(
            self.plan(ids, size, partitioner)
            for ids, size in zip(devices, sizes, strict=True)
        )
        placed = [
            (tuple(ids[rank] for rank in plan.strategy.device_ids()), plan)
            for ids, plan in zip(devices, plans, strict=True)
        ]
        cost = price_exchange(self.graph, self.fleet, placed)
        slowest = max(plan.prediction.step_time_s for plan in plans)
        period = 1
        while cost.seconds > _SHARE * slowest * period and period < _LONGEST:
            period *= 2
        if self.exchange is not None:
            period = self.exchange.period
        return PlannedDivision(devices=devices, plans=plans, cost=cost, period=period)

    def _peaks(self, devices: tuple[tuple[int, ...], ...]) -> list[float]:
        kinds, types = self.fleet.type_index, self.fleet.device_types
        peak = [max(kind.peak_flops_per_s.values()) for kind in types]
        return [sum(peak[int(kinds[i])] for i in one) for one in devices]


def plan_divisions(
    planner: FleetPlanner,
    most: int,
    pricer: SegmentPricer | None = None,
    *,
    orders: Sequence[Index] | None = None,
) -> tuple[list[PlannedDivision], int]:
    """Search for divisions of a fleet into members.

    Args:
        planner: Of its members.
        most: Largest number of members.
        pricer: Of the fleet's segments, if there is one already.
        orders: Orders of the hosts that are cut as they are, and no others; None to
            search by rules, and to draw some from the planner's ``orderer``.

    Returns:
        Divisions that were planned, the best first; and the number of parts of the
        fleet that were priced by closed forms.
    Raises:
        NoFeasiblePlanError: If no part of the fleet holds the model.
    """
    options = planner.options
    if pricer is None:
        pricer = segment_pricer(planner)
    period = planner.exchange.period if planner.exchange else _LONGEST
    most = min(most, options.global_batch)
    found: dict[tuple[tuple[int, ...], ...], PlannedDivision] = {}
    find = partial(divide, pricer, period=period, seed=options.seed)
    if orders is not None:
        estimated = find(most=most, orders=orders, rounds=0)
        found |= _plan_best(planner, pricer, estimated)
    else:
        # The best single member, too: closed forms may take it for slower than it is.
        for members in (most, 1):
            estimated = find(most=members)
            found |= _plan_best(planner, pricer, estimated)
        drawn = _drawn_orders(planner, pricer)
        if drawn:
            estimated = find(most=most, orders=drawn)
            found |= _plan_best(planner, pricer, estimated)
    planned = sorted(found.values(), key=lambda one: one.step_time_s)
    if not planned:
        return [_whole(planner)], len(pricer)
    return [planner.evened(planned[0]), *planned[1:]], len(pricer)


def segment_pricer(planner: FleetPlanner) -> SegmentPricer:
    """Return a pricer of segments in a dtype that all their devices compute in.

    Args:
        planner: Of the fleet's members.

    Raises:
        StrategyError: If a dtype is asked for that some devices of the fleet lack.
    """
    fleet, options = planner.fleet, planner.options
    request = make_request(planner.graph, fleet, options)
    if not options.any_dtype:
        default_precision(fleet, options.precision)
        return SegmentPricer(request)
    names = devices_without(fleet, "bfloat16")
    if not names:
        return SegmentPricer(request)
    wide = replace(options, precision=default_precision(fleet)[0])
    # The last is float16 where the executors scale the loss.
    every = [one for one in list_choices(fleet, wide) if one.cluster is fleet]
    others = SegmentPricer(make_request(planner.graph, fleet, every[-1].options))
    lacking = [
        host
        for host, kind in enumerate(others.groups.kinds.tolist())
        if fleet.device_types[kind].name in names
    ]
    return SegmentPricer(request, others, lacking)


def _drawn_orders(planner: FleetPlanner, pricer: SegmentPricer) -> Sequence[Index]:
    """Draw orders of the hosts; none where all orders have the same members."""
    if planner.orderer is None or len(pricer.groups) < 3:
        return ()
    orderer = get_partitioner(planner.orderer)
    if not isinstance(orderer, GroupOrderer):
        return ()
    return orderer.group_orders(pricer.request, _DRAWN)


def _plan_best(
    planner: FleetPlanner, pricer: SegmentPricer, estimated: Sequence[Division]
) -> dict[tuple[tuple[int, ...], ...], PlannedDivision]:
    """Plan the division with the best estimate that has a plan, and those near it."""
    groups = pricer.groups
    found: dict[tuple[tuple[int, ...], ...], PlannedDivision] = {}
    for one in estimated:
        if found and one.step_time_s > _WITHIN * estimated[0].step_time_s:
            break
        devices = tuple(
            tuple(
                int(device)
                for host in member
                for device in groups.ids[groups.starts[host] : groups.starts[host + 1]]
            )
            for member in one.members
        )
        # Closed forms are not exact.
        with contextlib.suppress(NoFeasiblePlanError):
            found[devices] = planner.balanced(devices, one.rates)
    return found


def _whole(planner: FleetPlanner) -> PlannedDivision:
    """Plan the whole fleet as one member, the last to hold the model.

    Raises:
        NoFeasiblePlanError: If it does not: no part of it does.
    """
    devices = tuple(int(device) for device in planner.fleet.free)
    try:
        return planner.balanced((devices,), [1.0])
    except NoFeasiblePlanError as error:
        first, *others = error.reasons
        said = f"not even all devices of {planner.fleet.name} as one member: {first}"
        raise NoFeasiblePlanError([said, *others], error.remedies) from error


def _share(batch: int, rates: Sequence[float]) -> list[int]:
    """Divide a batch by rates, in parts of a power of two where it is large enough.

    Raises:
        StrategyError: If there are fewer samples than members.
    """
    count = len(rates)
    if batch < count:
        raise StrategyError(
            f"global_batch={batch} for {count} members; a member trains 1 sample a "
            f"step at least: use global_batch={count} or more, or fewer members"
        )
    part = 1
    while batch >= 2 * part * _PARTS * count:
        part *= 2
    parts = batch // part
    wanted = [rate / sum(rates) * parts for rate in rates]
    sizes = [max(1, int(one)) for one in wanted]
    while sum(sizes) < parts:
        late = max(range(count), key=lambda i: (wanted[i] - sizes[i], rates[i]))
        sizes[late] += 1
    while sum(sizes) > parts:
        early = max(
            (i for i in range(count) if sizes[i] > 1),
            key=lambda i: sizes[i] - wanted[i],
        )
        sizes[early] -= 1
    fastest = max(range(count), key=rates.__getitem__)
    found = [size * part for size in sizes]
    found[fastest] += batch - parts * part
    return found


def _moved_shares(plans: Sequence[Plan]) -> Iterator[list[int]]:
    """Yield shares in which the slowest member gives samples to one that waits.

    It gives about as many as make the two equally long by their rates: those numbers
    first after which large powers of two divide both shares, so that microbatches do.
    """
    sizes = [plan.workload.global_batch for plan in plans]
    seconds = [plan.prediction.step_time_s for plan in plans]
    slow = max(range(len(plans)), key=seconds.__getitem__)
    for fast in sorted(range(len(plans)), key=seconds.__getitem__)[:_TAKERS]:
        if fast == slow:
            continue
        each = seconds[slow] / sizes[slow] + seconds[fast] / sizes[fast]
        even = (seconds[slow] - seconds[fast]) / each
        last = min(math.ceil(1.25 * even), sizes[slow] - 1)
        amounts = range(max(1, int(even / 2)), last + 1)

        def odd(amount: int, fast: int = fast, even: float = even) -> tuple[int, float]:
            shares = (sizes[slow] - amount, sizes[fast] + amount)
            twos = sum(min(one & -one, _EVEN_SHARE).bit_length() for one in shares)
            return -twos, abs(amount - even)

        for amount in sorted(amounts, key=odd)[:_TRIED]:
            moved = list(sizes)
            moved[slow] -= amount
            moved[fast] += amount
            yield moved


def _read_members(
    fleet: Cluster, members: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Check the devices of members.

    Raises:
        ClusterError: If one does not exist, is taken, or is in two.
    """
    if not members:
        raise ClusterError("members is empty; give the devices of one at least")
    free = set(fleet.free.tolist())
    seen: set[int] = set()
    for one in members:
        fleet.part(one)
        for device in one:
            if device not in free:
                raise ClusterError(f"device {device} is occupied; leave it out")
            if device in seen:
                raise ClusterError(f"device {device} is in two members; give it to one")
            seen.add(device)
    return tuple(tuple(sorted(one)) for one in members)


def _document(
    planner: FleetPlanner,
    best: PlannedDivision,
    others: Sequence[PlannedDivision],
    weighting: Literal["samples", "equal"],
    segments: int,
    given: bool,
) -> Federation:
    seconds = best.step_time_s
    times = tuple(plan.prediction.step_time_s for plan in best.plans)
    used = {device for one in best.devices for device in one}
    exchange = planner.exchange or LocalSteps(period=best.period)
    return Federation(
        cluster=planner.fleet.reference(),
        members=tuple(
            Member(name=f"member{number}", devices=devices, plan=plan)
            for number, (devices, plan) in enumerate(
                zip(best.devices, best.plans, strict=True)
            )
        ),
        global_batch=planner.options.global_batch,
        exchange=exchange,
        weighting=weighting,
        left_out=tuple(i for i in planner.fleet.free.tolist() if i not in used),
        prediction=FederationPrediction(
            step_time_s=seconds,
            member_step_times_s=times,
            exchange_time_s=best.cost.seconds,
            exchange_bytes=best.cost.sent_bytes,
            samples_per_s=planner.options.global_batch / seconds,
        ),
        formation=Formation(
            meshwright_version=__version__,
            method="given" if given else "segments",
            seed=planner.options.seed,
            divisions=1 + len(others),
            segments=segments,
            others=tuple((one.words, one.step_time_s) for one in others),
        ),
    )
