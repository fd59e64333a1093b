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
from typing import Any

import numpy as np

from envs.ramp.graphs import OpGraph, model_op_graph
from envs.stream.jobs import JobType
from envs.stream.network import HostKind, Shape, sub_cluster
from planner.cost import CostModel, PricingContext
from planner.cost.constants import Calibration
from planner.errors import PlanFileError
from planner.measurements.store import (
    CalibrationChoice,
    calibrated_recipe,
    choose_calibration,
)
from planner.schema import Precision
from planner.schema.base import fingerprint_bytes, write_atomically
from planner.schema.cluster import DeviceType, Link, MeasuredCollective
from planner.search import Candidate, Request, get_partitioner
from planner.space import Pin, normalize_pins

__all__ = [
    "SHIPPED",
    "STRETCHES",
    "PlanPrice",
    "PriceBook",
    "price_plan",
    "sequential_step_s",
]


#: Factors by which links between hosts are slowed down in the prices of a plan.
STRETCHES = (1.0, 2.0, 4.0, 8.0, 16.0)

#: Strategies that the search may simulate.
_EVALUATIONS = 12
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


def _priced(candidate: Candidate, slowed: Sequence[CostModel]) -> PlanPrice:
    """Price a strategy with links slowed down; one price for all without links."""
    times = [candidate.cost.step_time_s]
    for model in slowed:
        times.append(max(model.cost(candidate.strategy).step_time_s, times[-1]))
    times += times[-1:] * (len(STRETCHES) - len(times))
    # On links slow enough nothing is hidden: the slope is the whole traffic.
    slope = (times[-1] - times[-2]) / (STRETCHES[-1] - STRETCHES[-2])
    return PlanPrice(
        label=candidate.strategy.label(),
        step_s=tuple(times),
        duty=min(slope / times[0], 1.0),
        memory_bytes=candidate.cost.peak_memory_bytes,
    )


def sequential_step_s(job: JobType, device: DeviceType) -> float:
    """Seconds of a step on one device that is never full, the unit of deadlines.

    Args:
        job: The job.
        device: The reference; its memory is ignored, so that jobs which fit no single
            device have deadlines as well.
    """
    roomy = device.model_copy(update={"memory_bytes": _ROOMY})
    link = Link(bandwidth_bytes_per_s=1e12, latency_s=0.0, source="unused")
    kind = HostKind(device=roomy, size=1, link=link, nic=None, compute_slots=None)
    price = price_plan(job, kind, Shape(kind=0, hosts=1, per_host=1), None)
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


class PriceBook:
    """Looks prices up, and computes missing ones.

    Args:
        path: File to read prices from and to add new ones to, besides those that ship;
            None keeps new ones in memory. A file is valid for the version of the cost
            model that made it: delete it when that changes.
        shipped: Whether to read the prices that ship.

    Raises:
        PlanFileError: If the file is not a price book.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, shipped: bool = True
    ) -> None:
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
        """Return the price of :func:`price_plan`."""
        alone = shape.hosts == 1
        key = _key(
            job.fingerprint,
            _numbers(kind.device),
            _numbers(kind.link),
            None if alone else _numbers(kind.nic),
            None if kind.compute_slots is None else kind.compute_slots / kind.size,
            (shape.hosts, shape.per_host, *(["frugal"] if shape.frugal else [])),
            None if alone else _numbers(between),
            [c.model_dump() for c in collectives] if alone else [],
            *([dict(pins)] if pins else []),
            *_calibrated(calibration, kind.device),
        )
        if key not in self._entries:
            made = price_plan(
                job,
                kind,
                shape,
                None if alone else between,
                collectives,
                pins,
                calibration,
            )
            self._entries[key] = None if made is None else asdict(made)
            self._changed = True
        entry = self._entries[key]
        if entry is None:
            return None
        return PlanPrice(**{**entry, "step_s": tuple(entry["step_s"])})

    def sequential_step_s(self, job: JobType, device: DeviceType) -> float:
        """Return the seconds of the function :func:`sequential_step_s`."""
        key = _key("sequential", job.fingerprint, _numbers(device))
        if key not in self._entries:
            self._entries[key] = sequential_step_s(job, device)
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
