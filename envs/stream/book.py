"""Prices that were worked out before: those that ship, and those of one's own file.

``python -m envs.stream.prepare`` writes the ones that ship.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from envs.ramp.graphs import OpGraph
from envs.stream.jobs import JobType
from envs.stream.network import HostKind, Shape
from envs.stream.op_graphs import model_op_graph
from envs.stream.pricing import PlanPrice, price_plan, sequential_step_s
from planner.errors import PlanFileError
from planner.schema.base import write_atomically
from planner.schema.cluster import DeviceType, Link, MeasuredCollective
from planner.schema.fingerprint import fingerprint_bytes

__all__ = ["SHIPPED", "PriceBook"]

#: Prices of the built-in jobs on a few presets, and their graphs.
SHIPPED = Path(__file__).parent / "data" / "prices.json.gz"

_VERSION = 1
#: What prices do not depend on: words, and what fitted constants alone look at, which
#: these prices are without (:mod:`planner.cost.kernels.efficiency`).
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
        """As :func:`envs.stream.pricing.price_plan`."""
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
        """As :func:`envs.stream.pricing.sequential_step_s`."""
        key = _key("sequential", job.fingerprint, _numbers(device))
        if key not in self._entries:
            self._entries[key] = sequential_step_s(job, device)
            self._changed = True
        return float(self._entries[key])

    def graph(self, job: JobType) -> OpGraph:
        """As :func:`envs.stream.op_graphs.model_op_graph`."""
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
