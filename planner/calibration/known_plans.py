"""Plans that a measurement leaves out and its source's scripts or tables give.

Alpa's artifact names a method (``method=parax.intra_only``): what that runs on so many
GPUs stands in alpa-projects/alpa, benchmark/alpa/exp_intra_only.py, exp_inter_only.py
and exp_intra_ablation.py. Korthikanti et al. 2022 (arXiv:2205.05198) give batches and
interleaving of their four models in table 3 and section 6.1. What Pax recomputes on
GPUs stands in google/paxml, paxml/contrib/gpu/scripts_gpu/configs.py (policies of GPT
5B, 175B) and paxml/tasks/lm/model_params.py (layers that are not repeated recompute
nothing; repeated ones all, if not said otherwise).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from planner.calibration.points import Point
from planner.calibration.precisions import keeps_bfloat16_alone
from planner.schema import Optimizer

__all__ = ["known_plan", "optimizer_of"]

#: GPUs: replicas, tp, samples of all replicas' microbatches. Of GPT.
_INTRA_GPT = {
    1: (1, 1, 16),
    2: (2, 1, 16),
    4: (4, 1, 16),
    8: (4, 2, 32),
    16: (2, 8, 16),
    32: (4, 8, 8),
    64: (2, 32, 2),
}
#: Of its models with experts, which replicas share; the search maps tokens freely.
_INTRA_MOE = {1: 32, 2: 32, 4: 64, 8: 64, 16: 32, 32: 32, 64: 4}
#: Samples of a step in the ablation.
_SHALLOW_BATCH = 8
#: Microbatches of ``inter_only``: scripts try from 64 up, twice as many each time. The
#: first that leaves a bubble below a sixteenth is taken.
_FEWEST, _BY_STAGE = 64, 16
#: Hidden size: samples of a step and of a microbatch, virtual stages.
_KORTHIKANTI = {
    6144: (4, 4, 1),
    12288: (64, 1, 3),
    20480: (280, 1, 3),
    25600: (512, 1, 1),
}
#: Hidden size of Pax's GPT: SAVE_DOT_WITH_NO_BATCH_DIM keeps products of weights.
_PAX = {768: "none", 4096: "selective"}


def known_plan(point: Point) -> tuple[Point, tuple[str, ...]]:
    """Fill in what a row leaves blank and its source is known to have run.

    Args:
        point: As read.
    Returns:
        The row, itself where nothing is known; and what was filled in, in words.
    """
    source = point.source.lower()
    found: dict[str, Any] = {}
    if "alpa" in source and "wresnet" not in point.model.lower():
        found = _alpa(point)
    elif "korthikanti" in source and point.hidden in _KORTHIKANTI:
        total, each, virtual = _KORTHIKANTI[point.hidden]
        found = {"global_batch": total, "microbatch": each}
        if (point.pp or 1) > 1 and virtual > 1:
            found |= {"vp": virtual, "schedule": "interleaved 1f1b"}
    elif re.search(r"\bpax(ml)?\b", source) and not point.recompute:
        found = {"recompute": _PAX.get(point.hidden or 0, "full")}
    blank = {
        name: value
        for name, value in found.items()
        if getattr(point, name) in (None, "")
        or name == "recompute"
        or (name == "tp" and value > (point.tp or 1))
    }
    if not blank:
        return point, ()
    said = ", ".join(f"{name}={value}" for name, value in blank.items())
    return replace(point, **blank), (f"{said}, as the source's scripts or tables",)


def optimizer_of(point: Point) -> Optimizer:
    """The optimizer of a row: AdamW, its states in bfloat16 where all else is.

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
    if moe and count in _INTRA_MOE:
        each = max(1, _INTRA_MOE[count] // count)
        return {"dp": count, "tp": 1, "ep": count, "zero": 2, "microbatch": each}
    if moe or count not in _INTRA_GPT:
        return {}
    dp, tp, samples = _INTRA_GPT[count]
    return {"dp": dp, "tp": tp, "zero": 2, "microbatch": samples // dp}


def _inter_only(point: Point) -> dict[str, Any]:
    stages, total = point.n_gpus, point.global_batch or 1024
    count = _FEWEST
    while count < _BY_STAGE * stages and count < total:
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
    return {
        "dp": dp,
        "tp": tp,
        "pp": 1,
        "ep": ep,
        "zero": zero,
        "global_batch": _SHALLOW_BATCH,
        "microbatch": max(1, _SHALLOW_BATCH // dp),
        "recompute": "full",
    }


def _stated(point: Point) -> dict[str, Any]:
    return _shallow(point.dp or point.n_gpus, 1, point.zero or 0)


def _auto_sharding(point: Point) -> dict[str, Any]:
    """The search's choice: experts over all devices; else as square as it goes.

    Scripts run every shape of the mesh, and a row does not say which it has.
    """
    count = point.n_gpus
    if _has_experts(point):
        return _shallow(count, 1, 2, count)
    tp = 1
    while (2 * tp) ** 2 <= count:
        tp *= 2
    return _shallow(count // tp, tp, 2)


def _heuristic(point: Point) -> dict[str, Any]:
    """Every weight split along its largest axis: tp over all devices."""
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
