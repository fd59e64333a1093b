"""Plans that a measurement leaves out and its source's scripts or tables give.

Tables and their sources are in ``known_plans.yaml``. Alpa's artifact names a method
(``method=parax.intra_only``); its benchmarks say what that runs on so many GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from planner.measurements.catalogues import read_tree
from planner.measurements.plans import keeps_bfloat16_alone
from planner.measurements.points import Point
from planner.schema import Optimizer

__all__ = ["known_plan", "optimizer_of"]


@cache
def _table(name: str) -> Any:
    return read_tree("known_plans.yaml")[name]


def known_plan(point: Point) -> tuple[Point, tuple[str, ...]]:
    """Fill in the cells that a row leaves blank and its source is known to have run.

    Args:
        point: The row as read.
    Returns:
        The row, itself where nothing is known; and the words that say what was added.
    """
    source = point.source.lower()
    found: dict[str, Any] = {}
    if "alpa" in source and "wresnet" not in point.model.lower():
        found = _alpa(point)
    elif "korthikanti" in source:
        found = dict(_table("korthikanti")["by_hidden"].get(point.hidden, {}))
        virtual = found.pop("vp", 1)
        if (point.pp or 1) > 1 and virtual > 1:
            found |= {"vp": virtual, "schedule": "interleaved 1f1b"}
    elif re.search(r"\bpax(ml)?\b", source) and not point.recompute:
        found = {"recompute": _table("pax")["by_hidden"].get(point.hidden, "full")}
    blank = {
        name: value
        for name, value in found.items()
        if getattr(point, name) in (None, "")
        or name == "recompute"
        or (name == "tp" and value > (point.tp or 1))
    }
    if not blank:
        return point, ()
    words = ", ".join(f"{name}={value}" for name, value in blank.items())
    said = [f"{words}, as the source's scripts or tables"]
    for name, value in blank.items():
        own = getattr(point, name)
        if own not in (None, "", value):
            said.append(
                f"{name}={own} of the row, but source={point.source!r} is known to run "
                f"{name}={value}, which counts; correct {name} or source"
            )
    return replace(point, **blank), tuple(said)


def optimizer_of(point: Point) -> Optimizer:
    """Return the optimizer of a row: AdamW, its states in bfloat16 where all else is.

    Alpa's models with experts take Adafactor without momentum instead, whose factored
    second moment is next to nothing. Source: alpa-projects/alpa,
    benchmark/alpa/benchmark_2d_one_case_moe.py.
    """
    ours = "alpa" in point.source.lower() and "deepspeed" not in point.notes.lower()
    if ours and _has_experts(point):
        return Optimizer(name="SGD")
    alone = keeps_bfloat16_alone(point)
    return Optimizer(state_dtype="bfloat16" if alone else "float32")


def _has_experts(point: Point) -> bool:
    return "moe" in point.model.lower()


def _alpa(point: Point) -> dict[str, Any]:
    found = re.search(r"method=(?:parax|alpa)\.(\w+)", point.notes)
    if found is None:
        return {}
    shallow = "intra_ablation" in point.source
    plan = (_SHALLOW if shallow else _WHOLE).get(found[1])
    return {} if plan is None else plan(point)


def _intra_only(point: Point) -> dict[str, Any]:
    count, moe = point.n_gpus, _has_experts(point)
    found = _table(f"alpa_intra_only_{'moe' if moe else 'gpt'}")["by_gpus"].get(count)
    if found is None:
        return {}
    if moe:
        each = max(1, found // count)
        return {"dp": count, "tp": 1, "ep": count, "zero": 2, "microbatch": each}
    dp, tp, samples = found["dp"], found["tp"], found["samples"]
    return {"dp": dp, "tp": tp, "zero": 2, "microbatch": samples // dp}


def _inter_only(point: Point) -> dict[str, Any]:
    stages, total = point.n_gpus, point.global_batch or 1024
    tried = _table("alpa_inter_only")
    count = tried["fewest"]
    while count < tried["by_stage"] * stages and count < total:
        count *= 2
    # Alpa cuts within layers. Halves of one on two devices stand for that: tp.
    halves = 1
    while point.layers and stages // halves > point.layers:
        halves *= 2
    return {
        "dp": 1,
        "tp": halves,
        "pp": stages // halves,
        "zero": 0,
        "microbatch": max(1, total // count),
    }


def _shallow(dp: int, tp: int, zero: int, ep: int = 1) -> dict[str, Any]:
    batch = _table("alpa_ablation")["global_batch"]
    return {
        "dp": dp,
        "tp": tp,
        "pp": 1,
        "ep": ep,
        "zero": zero,
        "global_batch": batch,
        "microbatch": max(1, batch // dp),
        "recompute": "full",
    }


def _stated(point: Point) -> dict[str, Any]:
    return _shallow(point.dp or point.n_gpus, 1, point.zero or 0)


def _auto_sharding(point: Point) -> dict[str, Any]:
    """Spread experts over all devices, else as square a mesh as it goes.

    The search chooses so; scripts run every shape of the mesh, and a row does not say
    which it has.
    """
    count = point.n_gpus
    if _has_experts(point):
        return _shallow(count, 1, 2, count)
    tp = 1
    while (2 * tp) ** 2 <= count:
        tp *= 2
    return _shallow(count // tp, tp, 2)


def _heuristic(point: Point) -> dict[str, Any]:
    """Split every weight along its largest axis: tp over all devices."""
    if _has_experts(point):
        return _shallow(point.n_gpus, 1, 2, point.n_gpus)
    return _shallow(1, point.n_gpus, 0)


_Plan = Callable[[Point], dict[str, Any]]
_WHOLE: dict[str, _Plan] = {"intra_only": _intra_only, "inter_only": _inter_only}
_SHALLOW: dict[str, _Plan] = {
    "data_parallel": _stated,
    "zero_2": _stated,
    "zero_3": _stated,
    "auto_sharding": _auto_sharding,
    "heuristic": _heuristic,
}
