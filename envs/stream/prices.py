"""What a job costs on a sub-cluster: the planner's best plan, and how it bears sharing.

The plan is searched with the links to itself. It is then priced again with the links
between hosts several times slower, which is what a plan sees whose traffic shares them.
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
from planner.cost import CostModel, Setting
from planner.errors import PlanFileError
from planner.schema import Precision
from planner.schema.base import write_atomically
from planner.schema.cluster import DeviceType, Link, MeasuredCollective
from planner.schema.fingerprint import fingerprint_bytes
from planner.search import Candidate, Request, get_partitioner

__all__ = [
    "SHIPPED",
    "STRETCHES",
    "PlanPrice",
    "PriceBook",
    "price_plan",
    "sequential_step_s",
]


#: By how much links between hosts are slowed down in the prices of a plan.
STRETCHES = (1.0, 2.0, 4.0, 8.0, 16.0)

#: Strategies that the search may simulate.
_EVALUATIONS = 12
#: How much slower than the fastest a frugal plan may be, and how busy its links; and
#: how busy those of the fastest must be for it to matter.
_FRUGAL_SLOWER, _FRUGAL_DUTY, _BUSY = 1.5, 0.5, 0.05
#: Of a device that is never full, in bytes.
_ROOMY = 1e15
#: Of PipeDream's profiles and of everything else.
_DTYPES = {"float32": Precision(compute="float32")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrice:
    """A plan's price on one sub-cluster.

    Attributes:
        label: Of the strategy, for people.
        step_s: Seconds of a step with links slowed down by each of STRETCHES; never
            shorter than the one before.
        duty: Share of an undisturbed step for which its links between hosts are busy.
        memory_bytes: Of the fullest device.
    """

    label: str
    step_s: tuple[float, ...]
    duty: float
    memory_bytes: float


def _setting(job: JobType, kind: HostKind, shape: Shape, link: Link | None) -> Setting:
    graph = job.read_graph()
    return Setting(
        graph=graph,
        cluster=sub_cluster(kind, shape, link),
        order=np.arange(shape.devices, dtype=np.int64),
        precision=_DTYPES.get(graph.dtype, Precision()),
    )


def price_plan(
    job: JobType,
    kind: HostKind,
    shape: Shape,
    between: Link | None,
    collectives: tuple[MeasuredCollective, ...] = (),
) -> PlanPrice | None:
    """Search the best plan and price it; None if none uses all devices and fits.

    Of a frugal shape it is the plan whose links between hosts are the least busy, of
    those at most half as slow again as the fastest; None unless they are half as busy
    or less, and those of the fastest busy for 5 % of a step.

    Args:
        job: To be run.
        kind: Of the hosts.
        shape: Devices that the plan must use.
        between: Link between the hosts.
        collectives: That were measured.
    """
    base = _setting(job, kind, shape, between)
    alone = sub_cluster(kind, shape, between, collectives=collectives)
    request = Request(
        setting=replace(base, cluster=alone),
        global_batch=job.global_batch,
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
    """A strategy's price with links slowed down; the same for all if there are none."""
    times = [candidate.cost.step_time_s]
    for model in slowed:
        times.append(max(model.cost(candidate.strategy).step_time_s, times[-1]))
    times += times[-1:] * (len(STRETCHES) - len(times))
    # Where links are slow enough nothing hides them: the slope is their whole traffic.
    slope = (times[-1] - times[-2]) / (STRETCHES[-1] - STRETCHES[-2])
    return PlanPrice(
        label=candidate.strategy.label(),
        step_s=tuple(times),
        duty=min(slope / times[0], 1.0),
        memory_bytes=candidate.cost.peak_memory_bytes,
    )


def sequential_step_s(job: JobType, device: DeviceType) -> float:
    """Seconds of a step on one device that is never full: the yardstick of deadlines.

    Args:
        job: To be run.
        device: The reference; its memory is not looked at, so that a job which no
            single device holds has a yardstick as well.
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
#: What prices do not depend on: words, and what fitted constants alone look at, which
#: these prices are without (:mod:`planner.cost.tiles`).
_IGNORED = {"name", "source", "processors"}


def _key(*parts: Any) -> str:
    return fingerprint_bytes(json.dumps(parts, sort_keys=True).encode())


def _numbers(document: DeviceType | Link | None) -> dict[str, Any] | None:
    """What of a document a price depends on."""
    return None if document is None else document.model_dump(exclude=_IGNORED)


class PriceBook:
    """Looks prices up, and works out those that it lacks.

    Args:
        path: A file to read prices from and to add new ones to, besides those that
            ship; None keeps new ones in memory alone. A file is good for the version
            of the cost model that it was made with: delete it when that changes.
        shipped: Whether to look into what ships.

    Raises:
        PlanFileError: If the file is no price book.
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
    ) -> PlanPrice | None:
        """As :func:`envs.stream.prices.price_plan`."""
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
        )
        if key not in self._entries:
            made = price_plan(job, kind, shape, None if alone else between, collectives)
            self._entries[key] = None if made is None else asdict(made)
            self._changed = True
        entry = self._entries[key]
        if entry is None:
            return None
        return PlanPrice(**{**entry, "step_s": tuple(entry["step_s"])})

    def sequential_step_s(self, job: JobType, device: DeviceType) -> float:
        """As :func:`envs.stream.prices.sequential_step_s`."""
        key = _key("sequential", job.fingerprint, _numbers(device))
        if key not in self._entries:
            self._entries[key] = sequential_step_s(job, device)
            self._changed = True
        return float(self._entries[key])

    def graph(self, job: JobType) -> OpGraph:
        """As :func:`envs.ramp.graphs.model_op_graph`."""
        key = job.fingerprint
        if key not in self._graphs:
            made = model_op_graph(job.read_graph(), job.name)
            self._graphs[key] = {
                # Digits that float32 has, and no more to store.
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
        """Write what is new to the book's file, or everything to another.

        Args:
            path: Instead of the book's own.
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
        # No time of writing in it: the same prices give the same bytes.
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
            f"worked out again"
        ) from error
    if not isinstance(data, dict) or data.get("version") != _VERSION:
        raise PlanFileError(
            f"prices {path} are not of version {_VERSION}; delete the file, prices are "
            f"worked out again"
        )
    return data
