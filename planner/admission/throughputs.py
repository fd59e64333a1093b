"""Throughputs for decisions: a table that somebody measured, or plans of each shape."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from planner.errors import NoFeasiblePlanError, PlanFileError, StrategyError
from planner.reading import parse_json, read_table, read_text
from planner.schema.admission import (
    ClusterState,
    JobRequest,
    ThroughputRow,
    Throughputs,
)
from planner.yaml_reading import parse_yaml

__all__ = [
    "load_job",
    "load_state",
    "load_throughputs",
    "throughputs_of_plans",
]

_COLUMNS = ("model", "batch", "device", "degree", "iterations_per_s")
_SPREAD = "spread_iterations_per_s"


def load_job(path: str | os.PathLike[str]) -> JobRequest:
    """Read a job from YAML or JSON.

    Raises:
        PlanFileError: If the file cannot be read, or is no job.
    """
    return JobRequest.from_data(_data(path, "job"), where=os.fspath(path))


def load_state(path: str | os.PathLike[str]) -> ClusterState:
    """Read the state of a cluster from JSON or YAML.

    Raises:
        PlanFileError: If the file cannot be read, or is no state.
    """
    return ClusterState.from_data(_data(path, "cluster state"), where=os.fspath(path))


def load_throughputs(path: str | os.PathLike[str]) -> Throughputs:
    """Read throughputs from CSV, or from JSON or YAML of the document.

    A CSV file has the columns model, batch, device, degree and iterations_per_s, and
    may have spread_iterations_per_s.

    Raises:
        PlanFileError: If the file cannot be read, lacks a column, or has a wrong value.
    """
    where = os.fspath(path)
    if Path(path).suffix.lower() != ".csv":
        return Throughputs.from_data(_data(path, "throughputs"), where=where)
    _, lines = read_table(path, "throughputs", _COLUMNS)
    rows = []
    for line, row in lines:
        given = {name: row[name] for name in (*_COLUMNS, _SPREAD) if row.get(name)}
        rows.append(ThroughputRow.from_data(given, where=line))
    data = {"origin": "table", "name": Path(path).name, "rows": rows}
    if not rows:
        raise PlanFileError(f"{where} has no throughputs; give a line for each shape")
    return Throughputs.from_data(
        {**data, "rows": [row.to_data() for row in rows]}, where=where
    )


def _data(path: str | os.PathLike[str], what: str) -> Any:
    where = os.fspath(path)
    text = read_text(path, what, pipe=True)
    if Path(path).suffix.lower() in (".yaml", ".yml"):
        return parse_yaml(text, where, what)
    return parse_json(text, where, what)


def throughputs_of_plans(
    state: ClusterState,
    jobs: Iterable[JobRequest],
    presets: Mapping[str, str],
    folder: str | os.PathLike[str],
    **options: Any,
) -> Throughputs:
    """Plan every model of some jobs on every shape of a cluster's hosts.

    A shape is 1, 2, 4 … devices of a host, or 1, 2, 4 … whole hosts. Shapes on which
    a model does not fit are left out. Each plan is written to a file, which the
    decision names.

    Args:
        state: State whose hosts have the shapes.
        jobs: Jobs; their ``model`` is what :func:`planner.plan` takes.
        presets: Device type to the cluster preset of such hosts, ``{"a100":
            "dgx-a100"}``.
        folder: Folder for the plans.
        options: Further arguments of :func:`planner.plan`.
    Returns:
        Throughputs of origin ``plans``.
    Raises:
        StrategyError: If a device type has no preset, or a preset other hosts.
        NoFeasiblePlanError: If a model fits on no shape.
    """
    needed = sorted({(job.model, job.batch) for job in jobs})
    shapes = tuple(_shapes(state, presets))
    rows: list[ThroughputRow] = []
    for model, batch in needed:
        found = []
        why: NoFeasiblePlanError | None = None
        for device, degree, cluster in shapes:
            try:
                row = _planned(model, batch, device, degree, cluster, folder, options)
            except NoFeasiblePlanError as error:
                why = error
                continue
            found.append(row)
        if not found:
            raise NoFeasiblePlanError(
                (f"{model} with batch {batch} fits on no shape of the cluster: {why}",)
            )
        rows += found
    return Throughputs(origin="plans", name="plans", rows=tuple(rows))


def _shapes(
    state: ClusterState, presets: Mapping[str, str]
) -> Iterable[tuple[str, int, Any]]:
    from planner.cluster import Cluster

    for device in sorted({host.device for host in state.hosts}):
        if device not in presets:
            raise StrategyError(
                f"device type {device} has no cluster preset to plan for; name one "
                f"with {device}=PRESET, see meshwright clusters"
            )
        sizes = [host.devices for host in state.hosts if host.device == device]
        size, most = max(sizes), sum(sizes)
        degree = 1
        while degree <= most:
            hosts = -(-degree // size)
            text = f"{presets[device]}:{hosts}"
            whole = Cluster.parse(text)
            if whole.num_devices != hosts * size:
                raise StrategyError(
                    f"{text} has {whole.num_devices} devices, and {hosts} hosts of the "
                    f"state have {hosts * size}; name the preset of such hosts"
                )
            yield device, degree, whole.part(range(degree))
            degree = degree * 2 if degree * 2 <= size or degree >= size else size


def _planned(
    model: str,
    batch: int,
    device: str,
    degree: int,
    cluster: Any,
    folder: str | os.PathLike[str],
    options: Mapping[str, Any],
) -> ThroughputRow:
    from planner.api import plan

    made = plan(model, cluster, global_batch=batch, **options)
    name = re.sub(r"[^a-zA-Z0-9.]+", "-", f"{model}-{batch}-{device}-{degree}")
    path = Path(folder) / f"{name.strip('-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save(path)
    return ThroughputRow(
        model=model,
        batch=batch,
        device=device,
        degree=degree,
        iterations_per_s=1.0 / made.prediction.step_time_s,
        plan=str(path),
    )
