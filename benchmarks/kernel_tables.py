"""Fit the surfaces of kernels to measured tables, and say how far they are off.

python -m benchmarks.kernel_tables [--kinds KIND ...] [--write]

Prints one table a kind: the error on rows that were held out of the fit (30 % of each
table, drawn with seed 0; forms were chosen on a part of the others, but for products'
splits and collectives' protocols, of which errors on these were seen). ``--write``
writes the constants to ``planner/measurements/data/kernels.json`` and the tables to
``docs/results``. Needs the measurements, see :mod:`planner.calibration.kernels.rows`; a
quarter of a minute.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables import aligned
from planner.calibration.kernels import KINDS
from planner.calibration.kernels.experts import (
    balanced_pairs,
    busiest_pairs,
    expert_rows,
    expert_seconds,
)
from planner.calibration.kernels.fit import (
    KernelFit,
    errors_of,
    fit_case,
    fit_long_run,
)
from planner.calibration.kernels.products import (
    long_run_device,
    long_run_rows,
    product_seconds,
)
from planner.calibration.kernels.rows import SYSTEMS, read_kernel_rows
from planner.measurements.kernels import KERNELS
from planner.schema.base import write_atomically

__all__ = ["document", "fit_all", "main"]

_SOURCE = {
    "tables": "ai-dynamo/aiconfigurator @ 095f58a51c4ca8e61b66ec108d86f223f8d559ce, "
    "2026-08-21, aic-core/src/aiconfigurator_core/systems",
    "license": "Apache-2.0, Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES",
    "made_by": "python -m benchmarks.kernel_tables --write",
}

_RESULTS = Path(__file__).parent.parent / "docs" / "results"

#: Device types, and the one whose constants are tried on their tables.
_ALIKE = (
    ("h200-141", "h100-80"),
    ("b300-270", "b200-180"),
    ("gb300-279", "gb200-186"),
    ("l40s-48", "a100-80"),
)


def fit_all(kinds: Sequence[str]) -> list[KernelFit]:
    """Fit the cases of some kinds."""
    return [fit_case(case) for kind in kinds for case in KINDS[kind]()]


def document(fits: Sequence[KernelFit]) -> dict[str, Any]:
    """Return the content of the file of constants."""
    long_runs = _long_runs(fits)
    devices: dict[str, dict[str, dict[str, Any]]] = {}
    for fit in fits:
        case = fit.case
        constants = dict(fit.constants)
        if case.kind == "products":
            constants["long_run"] = long_runs[case.device, case.variant]
        entry: dict[str, Any] = {
            "constants": constants,
            "run": case.run,
            "rows": fit.rows,
            "held_out_error": round(fit.errors.mean, 4),
        }
        if np.isfinite(fit.errors.training):
            entry["training_error"] = round(fit.errors.training, 4)
        if case.kernel:
            entry["kernel"] = case.kernel
        kinds = devices.setdefault(case.device, {})
        kinds.setdefault(case.kind, {})[case.variant] = entry
    return {
        "format_version": 1,
        "source": _SOURCE | {"made": datetime.date.today().isoformat()},
        "devices": devices,
    }


def _long_runs(fits: Sequence[KernelFit]) -> dict[tuple[str, str], float]:
    """Slowdown of products in a run of seconds, less 1, by device and dtype.

    Of dtypes without long runs float8 stands in for narrow ones where it has them, and
    bfloat16 for all others. Devices without any are taken to hold their clocks.
    """
    products = {
        (fit.case.device, fit.case.variant): fit.constants
        for fit in fits
        if fit.case.kind == "products"
    }
    known = {
        key: fit_long_run(*key, values)
        for key, values in products.items()
        if long_run_rows(*key) is not None
    }
    found = {}
    for device, dtype in products:
        alike = long_run_device(device)
        order = (dtype, "bfloat16") if dtype == "bfloat16" else (dtype, "float8")
        names = (name for name in (*order, "bfloat16") if (alike, name) in known)
        found[device, dtype] = known[alike or "", next(names)] if alike else 0.0
    return found


def _percent(value: float) -> str:
    return "" if np.isnan(value) else f"{100 * value:.1f}"


_HEADS = ("rows", "held out %", "median", "p90", "bias", "training %")


def _line(fit: KernelFit) -> list[str]:
    case, errors = fit.case, fit.errors
    shown = (errors.mean, errors.median, errors.p90, errors.bias, errors.training)
    return [
        f"{case.device} {case.variant}",
        str(len(case.rows)),
        *(_percent(value) for value in shown),
    ]


def _others(fits: Sequence[KernelFit]) -> list[list[str]]:
    """Held-out errors of devices under constants of a device like them."""
    found = {(fit.case.device, fit.case.variant): fit for fit in fits}
    lines = []
    for (device, variant), fit in found.items():
        other = found.get((dict(_ALIKE).get(device, ""), variant))
        if other is None:
            continue
        held = fit.case.rows.at(fit.case.rows.held_out)
        moved = errors_of(
            fit.case.predict(other.constants, held),
            held.seconds,
            fit.case.training(held),
        )
        shown = (fit.errors.mean, moved.mean, moved.bias, moved.training)
        lines.append(
            [f"{device} by {other.case.device} {variant}", *map(_percent, shown)]
        )
    return lines


def _long_run_lines(fits: Sequence[KernelFit]) -> list[list[str]]:
    """Errors of products repeated for a second, as bursts and as long runs."""
    lines = []
    for fit in fits:
        case = fit.case
        rows = (
            None
            if case.kind != "products"
            else long_run_rows(case.device, case.variant)
        )
        if rows is None:
            continue
        held = rows.at(rows.held_out)
        slower = fit_long_run(case.device, case.variant, fit.constants)
        operand = 1.0 if case.variant == "float8" else 2.0
        predict = product_seconds(case.device, case.variant, operand, sustained=True)
        errors = [
            errors_of(
                predict(dict(fit.constants) | {"long_run": x}, held), held.seconds
            )
            for x in (0.0, slower)
        ]
        lines.append(
            [
                f"{case.device} {case.variant}",
                str(len(held)),
                f"{slower:.3f}",
                *(_percent(error.mean) for error in errors),
            ]
        )
    return lines


def _between_runs_lines(fits: Sequence[KernelFit]) -> list[list[str]]:
    """Differences between two runs of the same products on one type of device."""
    lines = []
    for fit in fits:
        case = fit.case
        if case.kind != "products" or case.variant != "bfloat16":
            continue
        system = next(name for name, device in SYSTEMS.items() if device == case.device)
        other = read_kernel_rows("gemm").where(
            system=system, run="trtllm-", dtype=case.variant
        )
        shapes = [
            list(zip(rows["m"], rows["n"], rows["k"], strict=True))
            for rows in (case.rows, other)
        ]
        seconds = dict(zip(shapes[1], other.seconds, strict=True))
        both = np.array([shape in seconds for shape in shapes[0]])
        rows = case.rows.at(both)
        again = np.array([seconds[shape] for shape in shapes[0] if shape in seconds])
        apart = errors_of(again, rows.seconds, case.training(rows))
        shown = (apart.mean, fit.errors.mean, apart.training, fit.errors.training)
        lines.append([case.device, str(len(rows)), *map(_percent, shown)])
    return lines


def _uneven_lines(fits: Sequence[KernelFit]) -> list[list[str]]:
    """Errors of the busiest rank's experts under power laws, by constants of even ones.

    The rows are of draws of their own, so that single ones cannot be told.
    """
    lines = []
    for fit in fits:
        case = fit.case
        if case.kind != "experts" or case.variant != "bfloat16":
            continue
        table, run = read_kernel_rows("moe"), case.run.split("-")[0]
        system = next(name for name, device in SYSTEMS.items() if device == case.device)
        line = [case.device]
        for exponent in (1.01, 1.2):
            rows = expert_rows(
                table, system, run, case.variant, f"power_law_{exponent}"
            )
            pairs = busiest_pairs(rows, exponent)
            predict = expert_seconds(case.device, case.variant, 2.0, pairs)
            errors = errors_of(predict(fit.constants, rows), rows.seconds)
            factor = float((pairs / balanced_pairs(rows)).mean())
            line += [str(len(rows)), f"{factor:.2f}"]
            line += map(_percent, (errors.mean, errors.median, errors.bias))
        lines.append(line)
    return lines


def report(kind: str, fits: Sequence[KernelFit]) -> str:
    """Return the tables of a kind."""
    parts = [f"{kind}\n" + aligned([["device", *_HEADS], *map(_line, fits)])]
    others = _others(fits)
    if others:
        heads = [
            "constants of another device",
            "own %",
            "other's %",
            "bias",
            "training %",
        ]
        parts.append(aligned([heads, *others]))
    long_runs = _long_run_lines(fits)
    if long_runs:
        heads = ["repeated for a second", "held out", "slower", "as burst %", "error %"]
        parts.append(aligned([heads, *long_runs]))
    runs = _between_runs_lines(fits)
    if runs:
        heads = ["rows", "apart %", "error %", "training: apart %", "error %"]
        parts.append(aligned([["two runs of a device", *heads], *runs]))
    uneven = _uneven_lines(fits)
    if uneven:
        heads = ["rows", "imbalance", "error %", "median", "bias"]
        first = "busiest rank, exponents 1.01 and 1.2"
        parts.append(aligned([[first, *heads, *heads], *uneven]))
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args(arguments)
    fits: list[KernelFit] = []
    reports: list[str] = []
    for kind in chosen.kinds:
        found = fit_all([kind])
        reports.append(report(kind, found))
        print(reports[-1] + "\n", flush=True)
        fits += found
    if chosen.write:
        text = json.dumps(document(fits), indent=1, allow_nan=False)
        write_atomically(KERNELS, (text + "\n").encode())
        day = datetime.date.today().isoformat()
        page = "\n".join(
            [
                f"# Measured kernels, {day}",
                "",
                "`python -m benchmarks.kernel_tables --write`; [what it means]"
                "(../kernels.md). Errors are means of absolute ones, in %; bias is the "
                "mean logarithm of predicted over measured.",
                "",
                "```",
                "\n\n".join(reports),
                "```",
                "",
            ]
        )
        write_atomically(_RESULTS / f"kernels_{day}.md", page.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
