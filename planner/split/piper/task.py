"""Layers with a choice of tensor parallelism and recomputation each, and their reader.

Source: Tarnawski et al. 2021, "Piper: Multidimensional Planner for DNN
Parallelization", NeurIPS 2021, section 3; file format of msr-fiddle/piper, README.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import PlanFileError
from planner.split.task import Array, Index, NodeId

__all__ = ["GIB", "PiperTask", "parse_piper", "read_piper"]

#: What published optima of Piper tasks call a GB, of memory and of bandwidth.
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PiperTask:
    """Layers, their options by tensor-parallel degree, and the devices there are.

    Times are in the file's unit; sizes in bytes, what moves in bytes a sample. An
    option that a layer lacks has an infinite time.

    Attributes:
        name: Of the instance.
        nodes: Ids of the layers. Length n.
        degrees: Tensor-parallel degrees that occur, ascending. Shape [t].
        option_names: Of each layer, degree and option.
        time: Forward and backward time a sample. Shape [n, t, o].
        weight_bytes: What data parallelism synchronises. Shape [n, t, o].
        memory_each: Bytes for each microbatch in flight. Shape [n, t, o].
        memory_once: Bytes besides. Shape [n, t, o].
        edge_source: Producers. Shape [e].
        edge_target: Consumers. Shape [e].
        edge_bytes: What an edge moves between stages. Shape [e].
        sync_in: What the consumer's option moves besides. Shape [e, t, o].
        sync_out: What the producer's option moves besides. Shape [e, t, o].
        devices: How many there are.
        memory_bytes: Of a device.
        bandwidth: Bytes by unit of time, from a device to the others.
        microbatches: In a batch.
    """

    name: str
    nodes: tuple[NodeId, ...]
    degrees: Index
    option_names: tuple[tuple[tuple[str, ...], ...], ...]
    time: Array
    weight_bytes: Array
    memory_each: Array
    memory_once: Array
    edge_source: Index
    edge_target: Index
    edge_bytes: Array
    sync_in: Array
    sync_out: Array
    devices: int
    memory_bytes: float
    bandwidth: float
    microbatches: int

    def __len__(self) -> int:
        return len(self.nodes)

    def on(
        self,
        *,
        devices: int | None = None,
        memory_bytes: float | None = None,
        bandwidth: float | None = None,
        microbatches: int | None = None,
    ) -> PiperTask:
        """The same layers on other devices.

        Raises:
            PlanFileError: If a value is not above 0.
        """
        task = replace(
            self,
            devices=self.devices if devices is None else devices,
            memory_bytes=self.memory_bytes if memory_bytes is None else memory_bytes,
            bandwidth=self.bandwidth if bandwidth is None else bandwidth,
            microbatches=self.microbatches if microbatches is None else microbatches,
        )
        for what in ("devices", "memory_bytes", "bandwidth", "microbatches"):
            value = getattr(task, what)
            if not value > 0:
                raise PlanFileError(f"{self.name}: {what}={value}; must be above 0")
        return task


def _get(entry: Mapping[str, Any], key: str, where: str) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise PlanFileError(f"{where} has no field {key!r}; it is needed: add it")
    return entry[key]


def _amount(entry: Mapping[str, Any], key: str, where: str) -> float:
    value = _get(entry, key, where)
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value < 0
    ):
        raise PlanFileError(
            f"{where}: {key}={value!r}; must be finite and not below 0: correct it"
        )
    return float(value)


def _options(node: Mapping[str, Any], where: str) -> dict[int, list[dict[str, Any]]]:
    """Options by tensor-parallel degree."""
    found = {}
    for degree, options in _get(node, "TMPCs", where).items():
        if not str(degree).isdigit() or int(degree) < 1:
            raise PlanFileError(
                f"{where}: TMPCs has key {degree!r}; must be a tensor-parallel degree"
            )
        found[int(degree)] = options
    if not any(found.values()):
        raise PlanFileError(f"{where}: TMPCs is empty; a layer needs an option")
    return found


def _edge_table(
    document: Mapping[str, Any], place: Mapping[NodeId, int], name: str
) -> tuple[Index, Index, Array]:
    ends, moved = [], []
    for at, edge in enumerate(_get(document, "edges", name)):
        where = f"{name}: edges[{at}]"
        pair = [_get(edge, key, where) for key in ("sourceId", "destId")]
        for end in pair:
            if end not in place:
                raise PlanFileError(
                    f"{where} names node {end!r}, which is not in nodes; add the node "
                    f"or remove the edge"
                )
        ends.append([place[end] for end in pair])
        moved.append(_amount(edge, "communicationCost", where))
    table = np.array(ends, dtype=np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy(), np.array(moved, dtype=np.float64)


def _check_acyclic(name: str, count: int, source: Index, target: Index) -> None:
    waits = np.bincount(target, minlength=count)
    ready = np.flatnonzero(waits == 0).tolist()
    for node in ready:
        for after in target[source == node]:
            waits[after] -= 1
            if waits[after] == 0:
                ready.append(int(after))
    if len(ready) < count:
        raise PlanFileError(
            f"{name}: {count - len(ready)} nodes lie on or behind a cycle of edges; "
            f"layers must form an acyclic graph: remove the edge back"
        )


def parse_piper(document: Mapping[str, Any], name: str) -> PiperTask:
    """A task from a parsed document.

    Raises:
        PlanFileError: If a field is missing or wrong, an edge leads nowhere or the
            graph has a cycle.
    """
    entries: Sequence[dict[str, Any]] = _get(document, "nodes", name)
    if not entries:
        raise PlanFileError(f"{name}: nodes is empty; a task needs a layer")
    ids = [_get(node, "id", f"{name}: nodes[{i}]") for i, node in enumerate(entries)]
    place = {node: at for at, node in enumerate(ids)}
    if len(place) < len(ids):
        raise PlanFileError(f"{name}: an id stands twice; ids must be unique")
    wheres = [f"{name}: node {node!r}" for node in ids]
    options = [_options(node, w) for node, w in zip(entries, wheres, strict=True)]
    degrees = sorted({t for found in options for t in found})
    most = max(len(o) for found in options for o in found.values())
    source, target, moved = _edge_table(document, place, name)
    _check_acyclic(name, len(ids), source, target)
    shape = (len(ids), len(degrees), most)
    columns = {
        key: np.full(shape, np.inf if key == "timePerSample" else 0.0)
        for key in ("timePerSample", "parameterSize", "memoryUsageA", "memoryUsageB")
    }
    sync = {key: np.zeros((len(source), *shape[1:])) for key in _SYNC}
    names = []
    for v, (found, where) in enumerate(zip(options, wheres, strict=True)):
        names.append(tuple(_names(found.get(t, []), where) for t in degrees))
        for t, degree in enumerate(degrees):
            if len(set(names[v][t])) < len(names[v][t]):
                raise PlanFileError(
                    f"{where}: degree {degree} has an option id twice; ids of options "
                    f"must be unique"
                )
            for o, option in enumerate(found.get(degree, [])):
                place_of = f"{where}: degree {degree}, option {o}"
                for key, column in columns.items():
                    column[v, t, o] = _amount(option, key, place_of)
                for key, (mine, other) in _SYNC.items():
                    ends = (source, target)
                    times = _get(option, key, place_of)
                    for e in np.flatnonzero(ends[mine] == v):
                        far = str(ids[ends[other][e]])
                        sync[key][e, t, o] = _amount(times, far, f"{place_of}: {key}")
    return PiperTask(
        name=name,
        nodes=tuple(ids),
        degrees=np.array(degrees, dtype=np.int64),
        option_names=tuple(names),
        time=columns["timePerSample"],
        weight_bytes=columns["parameterSize"],
        memory_each=columns["memoryUsageA"],
        memory_once=columns["memoryUsageB"],
        edge_source=source,
        edge_target=target,
        edge_bytes=moved,
        sync_in=sync["syncTimeFw"],
        sync_out=sync["syncTimeBw"],
        devices=int(_amount(document, "maxDevices", name)),
        memory_bytes=_amount(document, "maxMemoryPerDevice", name),
        bandwidth=_amount(document, "bandwidth", name),
        microbatches=int(_amount(document, "mbsInBatch", name)),
    ).on()


#: Which end of an edge an option's field is of, and which the other one is.
_SYNC = {"syncTimeFw": (1, 0), "syncTimeBw": (0, 1)}


def _names(options: Sequence[Mapping[str, Any]], where: str) -> tuple[str, ...]:
    return tuple(str(_get(option, "id", where)) for option in options)


def read_piper(path: str | Path) -> PiperTask:
    """A task from a file, named by its stem.

    Raises:
        PlanFileError: As of :func:`parse_piper`, or if the file is no JSON.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanFileError(
            f"{path} cannot be read as JSON ({error}); write it anew"
        ) from error
    return parse_piper(document, path.stem)
