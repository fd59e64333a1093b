"""Fit the constants that are shipped: ``python -m benchmarks.publish_constants FILE``.

Writes ``planner/measurements/data/published.json``, or ``--out``. The fit is to
complete rows that nothing is doubtful of, one of each run, as the benchmark's is.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.cost_model_scores import time_rank
from planner.calibration.fit import FitResult, fit
from planner.calibration.rows import doubtful_reason
from planner.errors import MeshwrightError
from planner.measurements.cases import Case, prepare_all
from planner.measurements.points import Point, read_points
from planner.measurements.store import SHIPPED, Origin, save_calibration

__all__ = ["fitted_places", "main", "origin_of"]


def fitted_places(points: Sequence[Point]) -> list[int]:
    """Return the places of rows to fit to: complete, not doubtful, a run once.

    Assumed plans would teach the constants what was assumed; two figures of one run
    would count it twice.
    """
    chosen: dict[tuple[str, str], tuple[int, int]] = {}
    for place, row in enumerate(points):
        rank = time_rank(row.metric)
        if not row.complete or rank is None or doubtful_reason(row):
            continue
        key, order = (row.source, row.point_id), (rank, place)
        chosen[key] = min(chosen.get(key, order), order)
    return sorted(place for _, place in chosen.values())


def origin_of(cases: Sequence[Case], found: FitResult) -> Origin:
    """Return the rows that constants came from, and their errors."""
    rows: dict[str, list[str]] = {}
    errors: dict[str, list[float]] = {}
    for case in cases:
        measured = case.measured_step_s
        if measured is None:
            continue
        rows.setdefault(case.point.source, []).append(case.point.point_id)
        error = abs(case.step_s(found.calibration) / measured - 1)
        errors.setdefault(case.point.source, []).append(error)
    return Origin(
        rows=rows,
        made=datetime.date.today().isoformat(),
        errors={source: round(float(np.mean(e)), 4) for source, e in errors.items()},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("points", type=Path, help="CSV of measurements")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    options = parser.parse_args(arguments)
    try:
        points = read_points(options.points)
        places = fitted_places(points)
        prepared, _ = prepare_all([points[place] for place in places])
        cases = list(prepared.values())
        name = f"published {datetime.date.today().isoformat()}"
        found = fit(cases, name=name)
        save_calibration(found.calibration, options.out, origin_of(cases, found))
    except MeshwrightError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{options.out}: {name}, {len(cases)} runs\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
