"""Tasks from files in the format of msr-fiddle/dnn-partitioning.

Source: https://github.com/msr-fiddle/dnn-partitioning, README, "Input format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import PlanFileError, StrategyError
from planner.split.task import Index, NodeId, SplitTask

__all__ = ["TaskFolder", "load_tasks", "parse_task", "read_task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFolder:
    """What lies below a folder.

    Attributes:
        tasks: By instance name: file stem, ``_``, parent folder.
        skipped: Why a file holds no task, by path.
    """

    tasks: Mapping[str, SplitTask]
    skipped: Mapping[Path, str]


def _field(entry: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in entry:
        raise PlanFileError(
            f"{where} has no field {key!r}; it is needed: add it (it has "
            f"{', '.join(map(repr, entry)) or 'no fields'})"
        )
    return entry[key]


def _number(entry: Mapping[str, Any], key: str, where: str) -> float:
    value = _field(entry, key, where)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise PlanFileError(f"{where}: {key}={value!r} is not a number; write a number")
    if not math.isfinite(value) or value < 0:
        raise PlanFileError(
            f"{where}: {key}={value!r}; must be finite and not below 0: correct it"
        )
    return float(value)


def _count(entry: Mapping[str, Any], key: str, where: str) -> int:
    value = _number(entry, key, where)
    if value != int(value):
        raise PlanFileError(f"{where}: {key}={value!r} must be a whole number")
    return int(value)


def _flag(entry: Mapping[str, Any], key: str, where: str) -> bool:
    value = _field(entry, key, where)
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise PlanFileError(f"{where}: {key}={value!r}; must be true, false, 0 or 1")
    return bool(value)


def _identifier(entry: Mapping[str, Any], key: str, where: str) -> NodeId:
    value = _field(entry, key, where)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PlanFileError(f"{where}: {key}={value!r}; ids are integers or strings")
    return value


def _entries(document: Mapping[str, Any], key: str, name: str) -> list[dict[str, Any]]:
    value = _field(document, key, name)
    if not isinstance(value, list) or not all(isinstance(x, dict) for x in value):
        raise PlanFileError(f"{name}: {key} must be a list of objects")
    return value


def _colours(nodes: Sequence[Mapping[str, Any]]) -> Index:
    """Dense classes; a node without one gets one for itself."""
    seen: dict[object, int] = {}
    return np.array(
        [
            seen.setdefault(
                ("own", at)
                if node.get("colorClass") is None
                else str(node["colorClass"]),
                len(seen),
            )
            for at, node in enumerate(nodes)
        ],
        dtype=np.int64,
    )


def _edges(
    entries: Sequence[Mapping[str, Any]], place: Mapping[NodeId, int], name: str
) -> tuple[Index, Index, dict[int, float]]:
    """Producers, consumers (each pair once), and the price of a producer's output."""
    pairs: dict[tuple[int, int], None] = {}
    price: dict[int, float] = {}
    for at, edge in enumerate(entries):
        where = f"{name}: edges[{at}]"
        ends = [_identifier(edge, key, where) for key in ("sourceId", "destId")]
        for end in ends:
            if end not in place:
                raise PlanFileError(
                    f"{where} names node {end!r}, which is not in nodes; add the node "
                    f"or remove the edge"
                )
        cost = _number(edge, "cost", where)
        source, target = (place[end] for end in ends)
        known = price.setdefault(source, cost)
        if not math.isclose(known, cost, rel_tol=1e-6, abs_tol=1e-6):
            raise PlanFileError(
                f"{where}: cost={cost!r}, but another edge from {ends[0]!r} costs "
                f"{known!r}; an output has one price: give all its edges the same"
            )
        pairs[source, target] = None
    ends_array = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
    return ends_array[:, 0].copy(), ends_array[:, 1].copy(), price


def _check(task: SplitTask) -> None:
    """What a file can get wrong as a whole."""
    try:
        _ = task.topological
    except StrategyError as error:
        raise PlanFileError(str(error)) from None
    back = task.backward[task.edge_source] & ~task.backward[task.edge_target]
    if back.any():
        at = int(np.flatnonzero(back)[0])
        raise PlanFileError(
            f"{task.name}: edge {task.nodes[task.edge_source[at]]!r} -> "
            f"{task.nodes[task.edge_target[at]]!r} leads from a backward node to a "
            f"forward node; the backward pass comes last: correct isBackwardNode"
        )
    if task.devices == 0:
        raise PlanFileError(
            f"{task.name}: maxFPGAs=0 and maxCPUs=0 leave no device; set one above 0"
        )
    if task.cpus == 0 and not task.supported.all():
        node = task.nodes[int(np.flatnonzero(~task.supported)[0])]
        raise PlanFileError(
            f"{task.name}: node {node!r} is not supported on accelerators and "
            f"maxCPUs=0; allow a CPU"
        )
    sizes = np.bincount(task.colour, task.size_bytes)
    worst = int(sizes.argmax())
    if task.cpus == 0 and sizes[worst] > task.memory_bytes:
        node = task.nodes[int(np.flatnonzero(task.colour == worst)[0])]
        raise PlanFileError(
            f"{task.name}: the class of node {node!r} needs {sizes[worst]:.0f} bytes, "
            f"an accelerator has maxSizePerFPGA={task.memory_bytes:.0f} and maxCPUs=0; "
            f"raise the memory, allow a CPU or split the class"
        )


def parse_task(document: object, name: str) -> SplitTask:
    """A task from a parsed document.

    Args:
        document: The parsed JSON.
        name: For messages and results.

    Raises:
        PlanFileError: If a field is missing or wrong, an edge leads nowhere, the
            graph has a cycle, or no device can hold a class.
    """
    if not isinstance(document, dict):
        raise PlanFileError(f"{name} is a {type(document).__name__}; must be an object")
    entries = _entries(document, "nodes", name)
    if not entries:
        raise PlanFileError(f"{name}: nodes is empty; a task needs a node")
    place: dict[NodeId, int] = {}
    for at, node in enumerate(entries):
        identifier = _identifier(node, "id", f"{name}: nodes[{at}]")
        if place.setdefault(identifier, at) != at:
            raise PlanFileError(
                f"{name}: id {identifier!r} stands at nodes[{place[identifier]}] and "
                f"nodes[{at}]; ids must be unique"
            )
    labels = [f"{name}: node {identifier!r}" for identifier in place]
    source, target, price = _edges(_entries(document, "edges", name), place, name)

    def column(key: str) -> list[float]:
        return [_number(n, key, w) for n, w in zip(entries, labels, strict=True)]

    def flags(key: str) -> list[bool]:
        return [_flag(n, key, w) for n, w in zip(entries, labels, strict=True)]

    task = SplitTask(
        name=name,
        nodes=tuple(place),
        accelerator_ms=np.array(column("fpgaLatency")),
        cpu_ms=np.array(column("cpuLatency")),
        size_bytes=np.array(column("size")),
        colour=_colours(entries),
        backward=np.array(flags("isBackwardNode")),
        supported=np.array(flags("supportedOnFpga")),
        transfer_ms=np.array([price.get(at, 0.0) for at in range(len(entries))]),
        edge_source=source,
        edge_target=target,
        accelerators=_count(document, "maxFPGAs", name),
        cpus=_count(document, "maxCPUs", name),
        memory_bytes=_number(document, "maxSizePerFPGA", name),
    )
    _check(task)
    return task


def _document(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanFileError(
            f"{path} cannot be read as JSON ({error}); write it anew"
        ) from error


def _instance_name(path: Path) -> str:
    """File stem, ``_``, parent folder."""
    return f"{path.stem}_{path.resolve().parent.name}"


def read_task(path: str | Path) -> SplitTask:
    """A task from a file, named by its instance.

    Raises:
        PlanFileError: As of :func:`parse_task`, or if the file is no JSON.
    """
    path = Path(path)
    return parse_task(_document(path), _instance_name(path))


def _no_task(document: object, below: Path) -> str:
    """Why a document is no throughput task; empty if it is one or is meant to be."""
    if not isinstance(document, dict):
        return "no object: holds no task"
    if "fpgas" in document and "nodes" not in document:
        return "an expert's split of a task, not a task"
    if "nodes" not in document or {"maxDevices", "TMPCs"} & document.keys():
        return "another format: no nodes with maxFPGAs and maxCPUs"
    if any(part.startswith("latency") for part in below.parts[:-1]):
        return "its objective is the latency of one sample, not the largest load"
    return ""


def load_tasks(folder: str | Path) -> TaskFolder:
    """Every throughput task below a folder.

    Latency tasks have the same format; they are told apart by a folder whose name
    starts with ``latency``.

    Raises:
        PlanFileError: If there is no such folder or no task in it, two files have one
            instance name, or a task is malformed.
    """
    root = Path(folder)
    if not root.is_dir():
        raise PlanFileError(f"{root} is no folder; name one that holds tasks")
    tasks: dict[str, SplitTask] = {}
    skipped: dict[Path, str] = {}
    for path in sorted(root.rglob("*.json")):
        document = _document(path)
        reason = _no_task(document, path.relative_to(root))
        if reason:
            skipped[path] = reason
            continue
        task = parse_task(document, _instance_name(path))
        if task.name in tasks:
            raise PlanFileError(
                f"{path} and another file are both instance {task.name!r}; rename one"
            )
        tasks[task.name] = task
    if not tasks:
        raise PlanFileError(
            f"{root} holds no throughput task ({len(skipped)} other JSON files); name "
            f"a folder with files in the dnn-partitioning format"
        )
    return TaskFolder(tasks=tasks, skipped=skipped)
