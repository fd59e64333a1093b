"""Layers that choose a parallelism each: what each solver makes of them, in what time.

Tasks are the files below a folder in the format of msr-fiddle/piper, each on every
number of devices and with every memory asked for. Solvers are those registered under
``meshwright.piper_solvers``; one that does not finish is left without a time, and so is
an exact one that has not proven its answer. The first call of each solver is made once
before, so that nothing is compiled while the clock runs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.tables import aligned
from planner.errors import PlanFileError, StrategyError
from planner.split import (
    GIB,
    PiperPlan,
    PiperTask,
    piper_solver_names,
    read_piper,
    solve_piper,
)
from planner.split.piper.plan import judged
from planner.split.piper.solver import PiperSolver

if TYPE_CHECKING:
    from policies.piper.solver import SearchConfig

__all__ = ["PiperGrid", "drawn_tasks", "piper_table", "run_piper", "tasks_of"]

#: Order of columns; solvers registered besides come after.
_FIRST = ("exact", "auto", "learned")

_MANY = 8  # instances, that are not told apart any more
_SAME = 1 + 1e-9  # times so near are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperGrid:
    """Devices that each task is planned for.

    Attributes:
        devices: How many.
        memory_gib: Memory of each.
        bandwidth_gib: Of each, GiB by unit of the files' time.
    """

    devices: Sequence[int] = (8, 32, 128, 512)
    memory_gib: Sequence[float] = (1.0, 2.0, 8.0, 80.0)
    bandwidth_gib: float = 25.0


def drawn_tasks(count: int) -> Iterator[PiperTask]:
    """Tasks drawn by chance that the learned solver was not trained or validated on.

    Args:
        count: How many. Something fits each.

    Raises:
        StrategyError: If it is not above 0.
    """
    if count < 1:
        raise StrategyError(f"{count} drawn tasks; ask for 1 or more")
    from policies.piper.worlds import draw_tasks

    found = (t for t in draw_tasks(0, "test") if solve_piper(t, "exact").stages)
    return itertools.islice(found, count)


def tasks_of(folder: str | Path, grid: PiperGrid | None = None) -> Iterator[PiperTask]:
    """The tasks below a folder, for each number of devices and each memory.

    Args:
        folder: Where files are.
        grid: Devices that each is planned for.

    Raises:
        PlanFileError: If there is no task, or one is damaged.
    """
    grid = grid or PiperGrid()
    files = [path for path in sorted(Path(folder).rglob("*.json")) if _is_task(path)]
    if not files:
        raise PlanFileError(
            f"{folder} holds no Piper task: a JSON file with nodes whose TMPCs say how "
            f"they can run; give the folder that has some"
        )
    for path in files:
        task = read_piper(path)
        for devices, memory in itertools.product(grid.devices, grid.memory_gib):
            yield task.on(
                devices=devices,
                memory_bytes=memory * GIB,
                bandwidth=grid.bandwidth_gib * GIB,
            )


def _is_task(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return '"TMPCs"' in file.read()


def _methods() -> list[str]:
    names = piper_solver_names()
    return [n for n in _FIRST if n in names] + [n for n in names if n not in _FIRST]


def _finished(plan: PiperPlan, method: str) -> bool:
    return plan.exact if method == "exact" else bool(plan.stages) or plan.exact


def _time(plan: PiperPlan, method: str) -> float | None:
    """Time per sample; -1 if nothing fits, None if it was not found out."""
    if not _finished(plan, method):
        return None
    return plan.time_per_sample if plan.stages else -1.0


def _learned(search: SearchConfig, trained: bool) -> PiperSolver:
    """The learned solver with something left out."""
    import torch

    from policies.piper.network import PiperNetwork
    from policies.piper.saved import load_policy
    from policies.piper.solver import best_by_network

    torch.manual_seed(0)
    network = load_policy().network if trained else PiperNetwork().eval()

    def solve(task: PiperTask, *, time_limit_s: float, seed: int) -> PiperPlan:
        ends = time.monotonic() + time_limit_s
        return best_by_network(network, task, seed=seed, search=search, ends=ends)

    return solve


def _ablations() -> dict[str, PiperSolver]:
    from policies.piper.solver import SearchConfig

    return {
        "untrained": _learned(SearchConfig(), trained=False),
        "no_moves": _learned(SearchConfig(rounds=0), trained=True),
        "untrained_no_moves": _learned(SearchConfig(rounds=0), trained=False),
    }


def run_piper(
    tasks: Iterable[PiperTask],
    *,
    ablate: bool = False,
    methods: Sequence[str] | None = None,
    time_limit_s: float = 120.0,
    seed: int = 0,
    tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Plan Piper tasks with every solver.

    Args:
        tasks: What is planned.
        ablate: Whether parts of the learned one are left out, too.
        methods: Names of solvers; by default all that are registered.
        time_limit_s: For each solver and task.
        seed: Of all that is left to chance.
        tell: Called with each instance before it is planned.

    Returns:
        ``{"tasks": [{"instance", "devices", "memory_gib", "time_per_sample",
        "seconds", "stages"}]}``, the last three by solver; a time of -1 says that
        nothing fits, null that a solver did not find out.

    Raises:
        UnknownNameError: If there is no solver of a name.
    """
    methods = list(methods) if methods else _methods()
    parts = _ablations() if ablate else {}
    entries, warm = [], False
    for task in tasks:
        if tell:
            tell(
                f"{task.name}: {task.devices} devices, {task.memory_bytes / GIB:g} GiB"
            )
        if not warm:
            for method in methods:
                solve_piper(task.on(memory_bytes=1e15), method)
            warm = True
        plans = {
            method: solve_piper(task, method, time_limit_s=time_limit_s, seed=seed)
            for method in methods
        }
        for name, solver in parts.items():
            start = time.perf_counter()
            plan = judged(task, solver(task, time_limit_s=time_limit_s, seed=seed))
            plans[name] = replace(plan, seconds=time.perf_counter() - start)
        entries.append(
            {
                "instance": task.name,
                "devices": task.devices,
                "memory_gib": task.memory_bytes / GIB,
                "time_per_sample": {m: _time(p, m) for m, p in plans.items()},
                "seconds": {m: p.seconds for m, p in plans.items()},
                "stages": {m: [_stage(s) for s in p.stages] for m, p in plans.items()},
            }
        )
    return {"tasks": entries}


def _stage(stage: Any) -> dict[str, Any]:
    return {
        "nodes": list(stage.nodes),
        "data_parallel": stage.data_parallel,
        "tensor_parallel": stage.tensor_parallel,
        "options": {str(node): name for node, name in stage.options.items()},
    }


def _rows(entries: Sequence[dict[str, Any]], methods: Sequence[str]) -> list[list[str]]:
    heads = ["instance", "devices", "GiB"]
    for method in methods:
        heads += [method, "ms"]
    lines = [heads]
    for entry in entries:
        line = [entry["instance"], str(entry["devices"]), f"{entry['memory_gib']:g}"]
        for method in methods:
            found = entry["time_per_sample"][method]
            named = {None: "-", -1.0: "none fits"}.get(found)
            line += [named or f"{found:.6g}", f"{1e3 * entry['seconds'][method]:.1f}"]
        lines.append(line)
    return lines


def _shares(entries: Sequence[dict[str, Any]], method: str) -> list[str] | None:
    """Of a solver against the optimum: mean and worst time, how often equal, clock."""
    ratios, clocks = [], []
    for entry in entries:
        best, found = (entry["time_per_sample"][name] for name in ("exact", method))
        if best is None:
            continue
        clocks.append(entry["seconds"][method] / entry["seconds"]["exact"])
        if best > 0:
            ratios.append(np.inf if found is None or found < 0 else found / best)
    if not ratios:
        return None
    over = np.array(ratios)
    return [
        str(len(clocks)),
        f"{100 * (over.mean() - 1):.2f} %",
        f"{100 * (over.max() - 1):.2f} %",
        f"{int((over <= _SAME).sum())} of {len(over)}",
        f"{np.exp(np.log(clocks).mean()):.3f}",
    ]


def piper_table(result: dict[str, Any]) -> str:
    """The same for people: all times, and each solver against the proven optima."""
    entries = result["tasks"]
    methods = list(entries[0]["seconds"])
    text = aligned(_rows(entries, methods))
    if "exact" not in methods:
        return text
    lines = [["solver", "of", "tasks", "above", "at most", "optimal", "of its time"]]
    groups: dict[str, list[dict[str, Any]]] = {e["instance"]: [] for e in entries}
    for entry in entries:
        groups[entry["instance"]].append(entry)
    named = [*groups.items(), ("all", entries)] if len(groups) < _MANY else []
    named = named or [("all", entries)]
    for method in methods:
        for name, some in named if method != "exact" else ():
            shares = _shares(some, method)
            if shares:
                lines.append([method, name, *shares])
    return f"{text}\n\nagainst proven optima; time as geometric mean\n{aligned(lines)}"
