"""Prices of jobs on sub-clusters, computed by the planner or looked up in a book.

The best plan is searched on unshared links. It is then priced again with the links
between hosts several times slower, as for traffic that shares them. :class:`PriceBook`
keeps prices: those that ship, which ``python -m envs.stream.prepare`` writes, and those
of a file of the user's.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from envs.ramp.graphs import OpGraph, model_op_graph
from envs.stream.jobs import JobType
from envs.stream.network import HostKind, Shape, sub_cluster
from planner.cost import CostModel, PricingContext
from planner.cost.constants import Calibration
from planner.errors import PlanFileError, UnknownNameError
from planner.measurements.store import (
    CalibrationChoice,
    calibrated_recipe,
    choose_calibration,
)
from planner.schema import Precision
from planner.schema.base import fingerprint_bytes, write_atomically
from planner.schema.cluster import DeviceType, HostGroup, Link, MeasuredCollective
from planner.search import Candidate, Request, get_partitioner
from planner.search.refine import ExactPricer
from planner.search.subclusters import PricedSolution, rank_subclusters
from planner.space import Pin, normalize_pins

__all__ = [
    "SHIPPED",
    "STRETCHES",
    "PlanPrice",
    "PlanSearch",
    "PriceBook",
    "price_plan",
    "price_plans",
    "sequential_step_s",
]


#: Factors by which links between hosts are slowed down in the prices of a plan.
STRETCHES = (1.0, 2.0, 4.0, 8.0, 16.0)

PlanSearch = Literal["exhaustive", "closed_forms"]

#: Strategies that the search may simulate.
_EVALUATIONS = 12
#: Plans by closed forms that are simulated at most, and their scores over the best one.
_RANKED, _NEAR = 4, 1.15
#: Limits of a frugal plan: its step time over the fastest, and its duty over that of
#: the fastest; and the least duty of the fastest for which there is a frugal plan.
_FRUGAL_SLOWER, _FRUGAL_DUTY, _BUSY = 1.5, 0.5, 0.05
#: Memory of a device that is never full, in bytes.
_ROOMY = 1e15
#: Precision of PipeDream's profiles; all else has the default.
_DTYPES = {"float32": Precision(compute="float32")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrice:
    """A plan's price on one sub-cluster.

    Attributes:
        label: Label of the strategy, for display.
        step_s: Seconds of a step with links slowed down by each of STRETCHES, not
            decreasing.
        duty: Share of an undisturbed step for which its links between hosts are busy.
        memory_bytes: Memory of the fullest device.
    """

    label: str
    step_s: tuple[float, ...]
    duty: float
    memory_bytes: float


def _context(
    job: JobType,
    kind: HostKind,
    shape: Shape,
    link: Link | None,
    calibration: CalibrationChoice,
) -> PricingContext:
    graph, cluster = job.read_graph(), sub_cluster(kind, shape, link)
    fitted = choose_calibration(calibration, cluster)
    return PricingContext(
        graph=graph,
        cluster=cluster,
        order=np.arange(shape.devices, dtype=np.int64),
        precision=_DTYPES.get(graph.dtype, Precision()),
        recipe=calibrated_recipe("torch", fitted),
        calibration=fitted,
    )


def price_plan(
    job: JobType,
    kind: HostKind,
    shape: Shape,
    between: Link | None,
    collectives: tuple[MeasuredCollective, ...] = (),
    pins: Mapping[str, Pin] | None = None,
    calibration: CalibrationChoice = None,
) -> PlanPrice | None:
    """Search the best plan and price it; None if none uses all devices and fits.

    For a frugal shape it is the plan of the least duty among those of at most 1.5 times
    the fastest step; None unless it halves the duty of the fastest plan, and that is at
    least 5 %.

    Args:
        job: The job.
        kind: Kind of the hosts.
        shape: Devices that the plan must use.
        between: Link between the hosts.
        collectives: Measured collectives.
        pins: Knobs that the plan must have, as :func:`planner.plan` takes them.
        calibration: Fitted constants, likewise; None for those of the device's
            document.
    """
    base = _context(job, kind, shape, between, calibration)
    alone = sub_cluster(kind, shape, between, collectives=collectives)
    request = Request(
        context=replace(base, cluster=alone),
        global_batch=job.global_batch,
        pins=normalize_pins(pins or {}),
        evaluation_budget=_EVALUATIONS,
    )
    found = [
        candidate
        for candidate in get_partitioner("exhaustive").search(request).candidates
        if candidate.strategy.mesh.num_devices == shape.devices
    ]
    if not found:
        return None
    stretches = STRETCHES[1:] if shape.hosts > 1 else ()
    models = [
        CostModel(replace(base, cluster=sub_cluster(kind, shape, between, stretch)))
        for stretch in stretches
    ]
    best = _priced(found[0], models)
    if not shape.frugal:
        return best
    limit = _FRUGAL_SLOWER * best.step_s[0]
    prices = [_priced(c, models) for c in found[1:] if c.cost.step_time_s <= limit]
    least = min(prices, key=lambda price: price.duty, default=best)
    saves = best.duty >= _BUSY and least.duty <= _FRUGAL_DUTY * best.duty
    return least if saves else None


def price_plans(
    job: JobType,
    kind: HostKind,
    shapes: Sequence[Shape],
    between: Link | None,
    collectives: tuple[MeasuredCollective, ...] = (),
    pins: Mapping[str, Pin] | None = None,
    calibration: CalibrationChoice = None,
) -> list[PlanPrice | None]:
    """Find the plans of many shapes at once by closed forms, and price each.

    The prices are the simulator's, as those of :func:`price_plan`; a plan may be a few
    per cent slower than one that it finds.

    Args:
        job: The job.
        kind: Kind of the hosts.
        shapes: Devices that the plans must use; none is frugal.
        between: Link between the hosts.
        collectives: Measured collectives.
        pins: Knobs that the plans must have, as :func:`planner.plan` takes them.
        calibration: Fitted constants, likewise.
    """
    prices: dict[Shape, PlanPrice | None] = {}
    for together in _batches(kind, shapes, collectives):
        most = max(shape.hosts for shape in together)
        size = together[0].per_host if kind.is_shared else kind.size
        hosts = Shape(kind=together[0].kind, hosts=most, per_host=size)
        base = _context(job, kind, hosts, between if most > 1 else None, calibration)
        own = collectives if most == 1 else ()
        slowed = [
            CostModel(replace(base, cluster=sub_cluster(kind, hosts, between, stretch)))
            for stretch in (STRETCHES[1:] if most > 1 else ())
        ]
        cluster = sub_cluster(kind, hosts, between, collectives=own)
        request = Request(
            context=replace(base, cluster=cluster),
            global_batch=job.global_batch,
            pins=normalize_pins(pins or {}),
        )
        parts = [
            np.concatenate([h * size + np.arange(s.per_host) for h in range(s.hosts)])
            for s in together
        ]
        exact = ExactPricer(request=request, model=CostModel(request.context))
        ranked = rank_subclusters(request, parts, _RANKED)
        for shape, plans in zip(together, ranked, strict=True):
            prices[shape] = _best_of(exact, plans, shape, slowed)
    return [prices[shape] for shape in shapes]


def _batches(
    kind: HostKind,
    shapes: Sequence[Shape],
    collectives: tuple[MeasuredCollective, ...],
) -> list[list[Shape]]:
    """Return shapes by what makes the cluster that they are parts of differ."""
    found: dict[tuple[int, bool], list[Shape]] = {}
    for shape in shapes:
        share = shape.per_host if kind.is_shared else 0
        alone = bool(collectives) and shape.hosts == 1
        found.setdefault((share, alone), []).append(shape)
    return list(found.values())


def _best_of(
    exact: ExactPricer,
    plans: Sequence[PricedSolution],
    shape: Shape,
    slowed: Sequence[CostModel],
) -> PlanPrice | None:
    """Price the plan that is fastest by the simulator; None if none fits.

    Closed forms are exact without a pipeline, so that only pipelines that come near
    the first plan are simulated beside it.
    """
    near = [
        one
        for number, one in enumerate(plans)
        if number == 0
        or (one.solution.row["pp"] > 1 and one.score <= _NEAR * plans[0].score)
        or plans[0].solution.row["pp"] > 1 >= one.solution.row["pp"]
    ]
    fitting = [
        candidate
        for one in near
        for candidate in exact.candidates(one.solution.row, one.solution.order, cuts=2)
        if candidate.cost.fits
    ]
    if not fitting:
        return None
    best = min(fitting, key=lambda candidate: candidate.cost.step_time_s)
    if shape.hosts == 1:
        return _priced(best, ())
    order = plans[0].solution.order
    return _priced(best, [CostModel(m.context.reordered(order)) for m in slowed])


def _priced(candidate: Candidate, slowed: Sequence[CostModel]) -> PlanPrice:
    """Price a strategy with links slowed down; one price for all without links."""
    times = [candidate.cost.step_time_s]
    for model in slowed:
        seconds = sum(model.breakdown(candidate.strategy).values())
        times.append(max(seconds, times[-1]))
    times += times[-1:] * (len(STRETCHES) - len(times))
    # On links slow enough nothing is hidden: the slope is the whole traffic.
    slope = (times[-1] - times[-2]) / (STRETCHES[-1] - STRETCHES[-2])
    return PlanPrice(
        label=candidate.strategy.label(),
        step_s=tuple(times),
        duty=min(slope / times[0], 1.0),
        memory_bytes=candidate.cost.peak_memory_bytes,
    )


def sequential_step_s(
    job: JobType, device: DeviceType, search: PlanSearch = "exhaustive"
) -> float:
    """Seconds of a step on one device that is never full, the unit of deadlines.

    Args:
        job: The job.
        device: The reference; its memory is ignored, so that jobs which fit no single
            device have deadlines as well.
        search: Search of the plan, as :class:`PriceBook` takes it.
    """
    roomy = device.model_copy(update={"memory_bytes": _ROOMY})
    link = Link(bandwidth_bytes_per_s=1e12, latency_s=0.0, source="unused")
    host = HostGroup(
        name="host", count=1, devices_per_host=1, device=device.name, link=link
    )
    kind = HostKind(device=roomy, group=host)
    shape = Shape(kind=0, hosts=1, per_host=1)
    if search == "closed_forms":
        price = price_plans(job, kind, [shape], None)[0]
    else:
        price = price_plan(job, kind, shape, None)
    if price is None:
        return float("inf")
    return price.step_s[0]


#: Prices of the built-in jobs on a few presets, and their graphs.
SHIPPED = Path(__file__).parent / "data" / "prices.json.gz"

_VERSION = 1
#: Fields that prices do not depend on: names, sources, and a field that only fitted
#: constants use (:mod:`planner.cost.kernels.shapes`); see ``_calibrated``.
_IGNORED = {"name", "source", "processors"}


def _key(*parts: Any) -> str:
    return fingerprint_bytes(json.dumps(parts, sort_keys=True).encode())


def _numbers(document: DeviceType | Link | None) -> dict[str, Any] | None:
    """Return the fields of a document that a price depends on."""
    return None if document is None else document.model_dump(exclude=_IGNORED)


def _calibrated(choice: CalibrationChoice, device: DeviceType) -> list[Any]:
    """Return what a price with fitted constants depends on besides; nothing without."""
    if choice in (None, "none"):
        return []
    name = choice.name if isinstance(choice, Calibration) else os.fspath(choice or "")
    return ["calibration", name, device.processors]


def _key_of(
    job: JobType,
    kind: HostKind,
    shape: Shape,
    between: Link | None,
    collectives: tuple[MeasuredCollective, ...],
    pins: Mapping[str, Pin] | None,
    calibration: CalibrationChoice,
) -> str:
    """Return the key of a price that a search has found."""
    alone, host = shape.hosts == 1, kind.group
    slots, nics = host.compute_slots, host.nics
    return _key(
        job.fingerprint,
        _numbers(kind.device),
        _numbers(host.link),
        None if alone else _numbers(host.nic),
        None if slots is None else slots / kind.size,
        (shape.hosts, shape.per_host, *(["frugal"] if shape.frugal else [])),
        None if alone else _numbers(between),
        [c.model_dump() for c in collectives] if alone else [],
        *([] if alone or nics is None else [f"nics {min(nics, shape.per_host)}"]),
        *([dict(pins)] if pins else []),
        *_calibrated(calibration, kind.device),
    )


class PriceBook:
    """Looks prices up, and computes missing ones.

    Prices by closed forms have keys of their own: a search never finds them, and they
    are made only where no price of a search is known.

    Args:
        path: File to read prices from and to add new ones to, besides those that ship;
            None keeps new ones in memory. A file is valid for the version of the cost
            model that made it: delete it when that changes.
        shipped: Whether to read the prices that ship.
        search: Search of the plans whose prices are missing: ``exhaustive`` one by one,
            :func:`price_plan`, or by ``closed_forms`` all at once, :func:`price_plans`;
            frugal plans by the former.

    Raises:
        PlanFileError: If the file is not a price book.
        UnknownNameError: If there is no such search.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        shipped: bool = True,
        search: PlanSearch = "exhaustive",
    ) -> None:
        if search not in get_args(PlanSearch):
            raise UnknownNameError("search of plans", search, get_args(PlanSearch))
        self.search = search
        self.path = None if path is None else Path(path)
        self._entries: dict[str, Any] = {}
        self._graphs: dict[str, Any] = {}
        if shipped and SHIPPED.is_file():
            self._take(_load(SHIPPED, SHIPPED.stat().st_mtime_ns))
        if self.path is not None and self.path.is_file():
            self._take(_load(self.path, self.path.stat().st_mtime_ns))
        self._changed = False

    def _take(self, data: Mapping[str, Any]) -> None:
        self._entries |= data["prices"]
        self._graphs |= data["graphs"]

    def price(
        self,
        job: JobType,
        kind: HostKind,
        shape: Shape,
        between: Link | None,
        collectives: tuple[MeasuredCollective, ...] = (),
        pins: Mapping[str, Pin] | None = None,
        calibration: CalibrationChoice = None,
    ) -> PlanPrice | None:
        """Return the price of one shape; see :meth:`prices`."""
        given = collectives, pins, calibration
        return self.prices(job, kind, [shape], between, *given)[0]

    def prices(
        self,
        job: JobType,
        kind: HostKind,
        shapes: Sequence[Shape],
        between: Link | None,
        collectives: tuple[MeasuredCollective, ...] = (),
        pins: Mapping[str, Pin] | None = None,
        calibration: CalibrationChoice = None,
    ) -> list[PlanPrice | None]:
        """Return the prices of shapes, None where no plan fits.

        Args:
            job: The job.
            kind: Kind of the hosts.
            shapes: Devices that the plans must use.
            between: Link between the hosts; shapes of one host ignore it.
            collectives: Measured collectives.
            pins: Knobs that the plans must have, as :func:`planner.plan` takes them.
            calibration: Fitted constants, likewise; None for those of the device's
                document.
        """
        given = collectives, pins, calibration
        keys: list[str] = []
        one_by_one: dict[str, Shape] = {}
        at_once: dict[str, Shape] = {}
        for shape in shapes:
            key, missing = _key_of(job, kind, shape, between, *given), one_by_one
            fast = self.search == "closed_forms" and not shape.frugal
            if fast and key not in self._entries:
                key, missing = _key(key, "closed forms"), at_once
            if key not in self._entries:
                missing[key] = shape
            keys.append(key)
        for key, shape in one_by_one.items():
            link = None if shape.hosts == 1 else between
            self._keep(key, price_plan(job, kind, shape, link, *given))
        if at_once:
            made = price_plans(job, kind, list(at_once.values()), between, *given)
            for key, price in zip(at_once, made, strict=True):
                self._keep(key, price)
        return [self._price_of(key) for key in keys]

    def _keep(self, key: str, price: PlanPrice | None) -> None:
        self._entries[key] = None if price is None else asdict(price)
        self._changed = True

    def _price_of(self, key: str) -> PlanPrice | None:
        entry = self._entries[key]
        if entry is None:
            return None
        return PlanPrice(**{**entry, "step_s": tuple(entry["step_s"])})

    def sequential_step_s(self, job: JobType, device: DeviceType) -> float:
        """Return the seconds of the function :func:`sequential_step_s`."""
        key = _key("sequential", job.fingerprint, _numbers(device))
        if self.search == "closed_forms" and key not in self._entries:
            key = _key(key, "closed forms")
        if key not in self._entries:
            self._entries[key] = sequential_step_s(job, device, self.search)
            self._changed = True
        return float(self._entries[key])

    def graph(self, job: JobType) -> OpGraph:
        """Return the graph of :func:`envs.ramp.graphs.model_op_graph`."""
        key = job.fingerprint
        if key not in self._graphs:
            made = model_op_graph(job.read_graph(), job.name)
            self._graphs[key] = {
                # The digits of float32, to store no more.
                "nodes": [[float(f"{x:.6g}") for x in row] for row in made.nodes],
                "edges": made.edge_index.tolist(),
            }
            self._changed = True
        entry = self._graphs[key]
        return OpGraph(
            name=job.name,
            nodes=np.array(entry["nodes"], dtype=np.float32),
            edge_index=np.array(entry["edges"], dtype=np.int64).reshape(2, -1),
        )

    def save(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write new prices to the book's file, or all prices to another.

        Args:
            path: File to write instead of the book's own.
        """
        target = self.path if path is None else Path(path)
        if target is None or (path is None and not self._changed):
            return
        data = {
            "version": _VERSION,
            "prices": dict(sorted(self._entries.items())),
            "graphs": dict(sorted(self._graphs.items())),
        }
        text = json.dumps(data, separators=(",", ":")).encode()
        # Without a time stamp, so that the same prices give the same bytes.
        zipped = gzip.compress(text, mtime=0)
        write_atomically(target, zipped if target.suffix == ".gz" else text)
        self._changed = False


@lru_cache(maxsize=8)
def _load(path: Path, changed: int) -> dict[str, Any]:
    del changed
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, ValueError, EOFError) as error:
        raise PlanFileError(
            f"prices {path} cannot be read ({error}); delete the file, prices are "
            f"computed again"
        ) from error
    if not isinstance(data, dict) or data.get("version") != _VERSION:
        raise PlanFileError(
            f"prices {path} are not of version {_VERSION}; delete the file, prices are "
            f"computed again"
        )
    return data
