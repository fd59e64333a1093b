"""Graphs that are not chains: what each solver makes of them, and in what time.

Tasks are those below a folder in the format of msr-fiddle/dnn-partitioning. Solvers are
those registered under ``meshwright.split_solvers``; each gets the same time a task, and
one that does not finish is left without a load. The first call of each solver is made
once before, on the smallest task, so that nothing is compiled while the clock runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import aligned
from planner.errors import NoFeasiblePlanError
from planner.split import (
    Solution,
    SplitTask,
    load_tasks,
    max_load_ms,
    one_device,
    solve,
    solver_names,
)

__all__ = ["run_tasks", "table_of_tasks"]

#: Order of columns; solvers registered besides come after.
_FIRST = ("exact", "auto", "linearised", "refined")


def _methods() -> list[str]:
    names = solver_names()
    return [n for n in _FIRST if n in names] + [n for n in names if n not in _FIRST]


def _attempt(
    task: SplitTask, method: str, time_limit_s: float, seed: int
) -> Solution | None:
    try:
        return solve(task, method, time_limit_s=time_limit_s, seed=seed)
    except NoFeasiblePlanError:
        return None


def _entry(
    task: SplitTask, methods: Sequence[str], time_limit_s: float, seed: int
) -> dict[str, Any]:
    found = {m: _attempt(task, m, time_limit_s, seed) for m in methods}
    return {
        "instance": task.name,
        "loads_ms": {
            **{m: s and s.load_ms for m, s in found.items()},
            "one_device": max_load_ms(task, one_device(task)),
        },
        "seconds": {m: s and s.seconds for m, s in found.items()},
        "optimal": {m: bool(s and s.optimal) for m, s in found.items()},
        "split": {
            m: s and {str(n): d for n, d in task.named(s.assignment).items()}
            for m, s in found.items()
        },
    }


def run_tasks(
    folder: str | Path,
    *,
    methods: Sequence[str] | None = None,
    time_limit_s: float = 120.0,
    seed: int = 0,
    tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Split every throughput task below a folder with every solver.

    Args:
        folder: Where tasks are.
        methods: Names of solvers; by default all that are registered.
        time_limit_s: For each solver and task.
        seed: Of all that is left to chance.
        tell: Called with the name of each instance before it is solved.

    Returns:
        ``{"tasks": [{"instance", "loads_ms", "seconds", "optimal", "split"}]}``, the
        last four by solver; null where a solver did not finish. ``skipped`` says why
        other files were left out.

    Raises:
        PlanFileError: As of :func:`planner.split.load_tasks`.
        UnknownNameError: If there is no solver of a name.
    """
    found = load_tasks(folder)
    methods = list(methods) if methods else _methods()
    smallest = min(found.tasks.values(), key=len)
    for method in methods:
        _attempt(smallest, method, time_limit_s, seed)
    entries = []
    for name, task in found.tasks.items():
        if tell:
            tell(name)
        entries.append(_entry(task, methods, time_limit_s, seed))
    return {
        "tasks": entries,
        "skipped": {str(path): why for path, why in found.skipped.items()},
    }


def _load(entry: dict[str, Any], method: str) -> str:
    load = entry["loads_ms"][method]
    mark = "*" if entry["optimal"].get(method) else " "
    return "-" if load is None else f"{load:.4f}{mark}"


def _time(entry: dict[str, Any], method: str) -> str:
    seconds = entry["seconds"][method]
    return "-" if seconds is None else f"{seconds:.2f}"


def table_of_tasks(result: dict[str, Any]) -> str:
    """The same for people: load in ms (* if proven optimal) and seconds by solver."""
    methods = list(result["tasks"][0]["seconds"])
    heads = ["instance", "one device"]
    for method in methods:
        heads += [f"{method} ms", "s"]
    lines = [heads]
    for entry in result["tasks"]:
        line = [entry["instance"], _load(entry, "one_device")]
        for method in methods:
            line += [_load(entry, method), _time(entry, method)]
        lines.append(line)
    return aligned(lines) + "\n* proven optimal; - not finished in time, or none fits"
