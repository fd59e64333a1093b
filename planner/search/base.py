"""Partitioners: the requests they get, the results they return, their registry."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import EntryPoint
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from planner.cost import Cost, CostModel, CostTable, PricingContext
from planner.errors import MeshwrightError, UnknownNameError
from planner.plugins import entry_points
from planner.schema import Strategy
from planner.search.launcher_limits import LauncherLimits
from planner.space import OWN_TARGETS, Facts, StrategyTable, gather_facts
from planner.targets import get_target

__all__ = [
    "GROUP",
    "OBJECTIVES",
    "Candidate",
    "GroupOrderer",
    "Objective",
    "Partitioner",
    "Request",
    "SearchResult",
    "expressible",
    "finish",
    "get_partitioner",
    "partitioner_names",
    "preference",
    "score",
    "scores_of",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

Objective = Literal["throughput", "throughput_per_device", "memory"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "throughput_per_device", "memory")


#: Significant digits of a score that count in comparisons: sums of equal parts in
#: another order differ in their last bits.
_DIGITS = 10


@dataclass(frozen=True, kw_only=True)
class Request:
    """A question to a partitioner: the best strategy of a model on devices.

    Attributes:
        context: Model, machines, training recipe; its order names the devices.
        global_batch: Samples per optimizer step.
        pins: Fixed columns, from :func:`planner.space.normalize_pins`.
        objective: Figure to minimise: the step time, the step time per device used, or
            the memory of the fullest device.
        target: ``meshwright`` allows strategies that the executors can run, ``any`` all
            legal ones, a name of :func:`planner.targets.target_names` those that the
            launcher can express.
        seed: Seed of all random draws.
        evaluation_budget: Most strategies to price with the simulator; None leaves it
            to the partitioner.
        time_budget_s: Wall-clock seconds after which the best so far is the answer;
            None leaves it to the partitioner.
        devices: ``all`` uses every free device if any legal strategy does, and every
            one of a type at least on mixed clusters; ``any`` lets fewer win.
    """

    context: PricingContext
    global_batch: int
    pins: Mapping[str, int] = field(default_factory=dict)
    objective: Objective = "throughput"
    target: str = "meshwright"
    seed: int = 0
    evaluation_budget: int | None = None
    time_budget_s: float | None = None
    devices: Literal["all", "any"] = "all"

    @cached_property
    def facts(self) -> Facts:
        """Facts of model and cluster that the rules of the space compare against."""
        return gather_facts(
            self.context.graph,
            self.context.cluster,
            global_batch=self.global_batch,
            target=self.target,
            precision=self.context.precision,
            optimizer=self.context.optimizer,
            regime=self.context.regime,
            grad_clip_norm=self.context.grad_clip_norm,
        )

    @cached_property
    def kept(self) -> dict[Hashable, Any]:
        """Lists of meshes and rows, by what they list: searches may ask again."""
        return {}

    @cached_property
    def launcher_limits(self) -> LauncherLimits | None:
        """Limits of the launcher on cuts and devices; None if the target is none."""
        if self.target in OWN_TARGETS:
            return None
        facts = self.facts
        return LauncherLimits(
            num_experts=self.context.graph.num_experts,
            target=get_target(self.target),
            hosts=facts.hosts,
            host_of_device=np.asarray(self.context.cluster.host_of_device),
            layers=facts.layers,
            tied=facts.tied,
            backend=facts.backend,
            attention=facts.attention,
            spatial_sizes=facts.spatial_sizes,
            device_types=facts.device_types,
            host_types=facts.host_types,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy and its price."""

    strategy: Strategy
    cost: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The answer of a partitioner.

    Attributes:
        partitioner: Registered name of the partitioner.
        candidates: Candidates that fit in memory, best first.
        nearest: The candidate that was closest to fitting, if none fits.
        evaluations: Number of strategies priced, by fidelity.
        seconds: Wall time of the search.
        checkpoint: Hash of a learned partitioner's weights.
        share: Part of a race's budget that it used, 0 to 1; None outside of a race.
        best_after: Simulations of all contenders of a race when it last had the best
            plan of all; None if it never had.
    """

    partitioner: str
    candidates: tuple[Candidate, ...]
    nearest: Candidate | None
    evaluations: Mapping[str, int]
    seconds: float
    checkpoint: str | None = None
    share: float | None = None
    best_after: int | None = None


@runtime_checkable
class Partitioner(Protocol):
    """Chooses a strategy. Register one under ``meshwright.partitioners``."""

    name: str

    def search(self, request: Request) -> SearchResult:
        """Answer a request; the same request gives the same answer."""
        ...


@runtime_checkable
class GroupOrderer(Protocol):
    """A partitioner that also draws orders of the hosts of a cluster."""

    def group_orders(self, request: Request, count: int) -> Sequence[Index]:
        """Draw orders of the groups that the free devices of each host are.

        Args:
            request: Question about the whole cluster.
            count: Number of draws; equal orders may be left out.

        Returns:
            Permutations, each of shape [groups]; groups are numbered as by
            :func:`planner.search.device_order.groups.group_devices`.
        """
        ...


def score(cost: Cost, num_devices: int, objective: Objective) -> float:
    """Return the figure that an objective minimises.

    A step counts for as much as it brings training forward: its time is divided by
    the efficiency of its samples. Under a risk the quantile of its time counts.

    Raises:
        UnknownNameError: If there is no such objective.
    """
    if objective == "memory":
        return cost.peak_memory_bytes
    return float(_seconds(cost, num_devices, objective))


def _seconds(cost: Cost | CostTable, devices: int | Index, objective: str) -> Any:
    """Seconds of a step over the efficiency of its samples; summed over devices."""
    seconds = cost.step_time_s * cost.caution / cost.efficiency
    if objective == "throughput":
        return seconds
    if objective == "throughput_per_device":
        return seconds * devices
    raise UnknownNameError("objective", objective, OBJECTIVES)


def scores_of(
    costs: CostTable,
    table: StrategyTable,
    objective: Objective,
    *,
    fitting: bool = True,
) -> Array:
    """Return the :func:`score` of each row of a table, infinite where it does not fit.

    Args:
        costs: Costs of the rows.
        table: The rows. Length n.
        objective: The request's objective.
        fitting: False to give every row its score, whether it fits or not.
    Returns:
        Shape [n].
    Raises:
        UnknownNameError: If there is no such objective.
    """
    if objective == "memory":
        value = costs.memory_bytes
    else:
        value = _seconds(costs, table.num_devices, objective)
    return np.where(costs.fits, value, np.inf) if fitting else value


class _Bytes:
    """Canonical bytes of a strategy, made only if two candidates tie."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @cached_property
    def _made(self) -> bytes:
        return self._strategy.canonical_bytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bytes) and self._made == other._made

    def __lt__(self, other: _Bytes) -> bool:
        return self._made < other._made

    __hash__ = None  # type: ignore[assignment]


def preference(
    candidate: Candidate, objective: Objective
) -> tuple[float, float, float, _Bytes]:
    """Return the key by which candidates are sorted, best first.

    Among equal scores less traffic comes first, because traffic that is predicted to
    overlap is the first to show on a real network; then less memory; then the canonical
    bytes, so that the answer does not depend on the order in which a partitioner found
    the candidates.
    """
    cost, strategy = candidate.cost, candidate.strategy
    value = score(cost, strategy.mesh.num_devices, objective)
    return (
        float(f"{value:.{_DIGITS}g}"),
        sum(cost.link_bytes.values()),
        cost.peak_memory_bytes,
        _Bytes(strategy),
    )


def expressible(
    limits: LauncherLimits, candidates: Sequence[Candidate]
) -> tuple[Candidate, ...]:
    """Return the candidates that the launcher can express, cut and devices included."""
    return tuple(c for c in candidates if not limits.violations(c.strategy))


def finish(
    name: str,
    request: Request,
    model: CostModel | Sequence[CostModel],
    candidates: Sequence[Candidate],
    started: float,
    checkpoint: str | None = None,
) -> SearchResult:
    """Make a result: candidates sorted by :func:`preference`, evaluations counted.

    Candidates that the request's launcher cannot express are left out.
    """
    if request.launcher_limits is not None:
        candidates = expressible(request.launcher_limits, candidates)
    models = [model] if isinstance(model, CostModel) else list(model)
    fitting = sorted(
        (c for c in candidates if c.cost.fits),
        key=lambda candidate: preference(candidate, request.objective),
    )
    nearest = min(
        candidates,
        key=lambda c: c.cost.lack_bytes,
        default=None,
    )
    fidelities = ("analytic", "simulated")
    return SearchResult(
        partitioner=name,
        candidates=tuple(fitting),
        nearest=None if fitting else nearest,
        evaluations={k: sum(m.evaluations[k] for m in models) for k in fidelities},
        seconds=time.perf_counter() - started,
        checkpoint=checkpoint,
    )


# -- Registry --------------------------------------------------------------------

#: Entry-point group under which anyone can ship a partitioner.
GROUP = "meshwright.partitioners"


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def partitioner_names() -> tuple[str, ...]:
    """Names of all installed partitioners, sorted."""
    return tuple(sorted(_registered()))


def get_partitioner(name: str) -> Partitioner:
    """Load a partitioner; its module is imported now, not before.

    Raises:
        UnknownNameError: If no partitioner of that name is installed.
        MeshwrightError: If its package needs one that is not installed.
    """
    points = _registered()
    if name not in points:
        # Not registered, as it races several, but a name that plan takes.
        raise UnknownNameError("partitioner", name, (*points, "auto"))
    try:
        made = points[name].load()()
    except ImportError as error:
        raise MeshwrightError(
            f"partitioner {name!r} needs {error.name!r}, which is not installed; "
            f"install it, or choose another partitioner"
        ) from error
    if not isinstance(made, Partitioner):
        raise MeshwrightError(
            f"partitioner {name!r} ({points[name].value}) has no search(request); "
            f"see planner.search.base.Partitioner"
        )
    return made
