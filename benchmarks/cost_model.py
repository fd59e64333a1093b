"""The cost model against published measurements.

python benchmarks/cost_model.py --out docs
python benchmarks/cost_model.py --fits loso
python benchmarks/cost_model.py --points FILE.csv --json

The first predicts the measurements of MESHWRIGHT_DATA under three fits (fitted to all
rows; each source left out; each device type left out), prints errors, order of plans,
regret and memory beside two baselines, says which goals are met, and writes a results
file and two figures. The second takes one fit alone.

The third predicts any file with the columns of points.csv by the calibration that is
shipped and prints {"points": [...]}: point_id, source, group (what is comparable),
metric, measured, predicted (null if it cannot be) and why. Rows that ran out of memory
come back as metric feasible; rows that cannot be read come last, with what is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not __package__:
    # Run as a file, Python looks for modules beside it and not in the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import cost_model_rows
from benchmarks.cost_model_fits import FITS, judge, predict_by
from benchmarks.cost_model_scores import Prediction
from planner.errors import CalibrationError, MeshwrightError
from planner.measurements.points import parse_point, read_cells, read_points

__all__ = ["main"]

_SHOWN = ("point_id", "source", "group", "metric", "measured", "predicted", "why")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--points", type=Path, help="CSV; measured/points.csv of MESHWRIGHT_DATA"
    )
    parser.add_argument("--json", action="store_true", help="print predictions as JSON")
    parser.add_argument(
        "--fits",
        nargs="+",
        choices=FITS,
        help="shipped for --json or --points, else fitted loso lodo",
    )
    parser.add_argument(
        "--out", type=Path, help="folder for results/ and figures/; none by default"
    )
    return parser.parse_args(arguments)


def _file(given: Path | None) -> Path:
    if given is not None:
        return given
    folder = os.environ.get("MESHWRIGHT_DATA")
    if not folder:
        raise CalibrationError(
            "MESHWRIGHT_DATA is not set and --points is not given; give a CSV of "
            "measurements, or the folder that holds measured/points.csv"
        )
    return Path(folder) / "measured" / "points.csv"


def _row(one: Prediction) -> dict[str, object]:
    row: dict[str, object] = {name: getattr(one, name) for name in _SHOWN}
    if one.predicted is not None and not math.isfinite(one.predicted):
        # JSON has no NaN.
        row["predicted"] = None
    return row


def _unreadable(cells: Mapping[str, str], why: str) -> dict[str, object]:
    shown: dict[str, object] = dict.fromkeys(_SHOWN)
    for name in ("point_id", "source", "metric"):
        shown[name] = (cells.get(name) or "").strip()
    shown["group"] = ""
    try:
        measured = float(cells["value"])
    except (TypeError, ValueError):
        measured = math.nan
    shown["measured"] = measured if math.isfinite(measured) else None
    shown["why"] = why
    return shown


def _print_json(fits: Sequence[str], file: Path) -> None:
    if len(fits) != 1:
        raise CalibrationError(
            f"--json prints the predictions of one fit, {' '.join(fits)} are "
            f"{len(fits)}; give one of {', '.join(FITS)}"
        )
    points, unreadable = [], []
    for cells, where in read_cells(file):
        try:
            points.append(parse_point(cells, where))
        except CalibrationError as error:
            unreadable.append((cells, str(error)))
    if unreadable and not points:
        raise CalibrationError(unreadable[0][1])
    found = predict_by(fits[0], points, cost_model_rows.Rows(points))
    rows = [*map(_row, found), *(_unreadable(*row) for row in unreadable)]
    print(json.dumps({"points": rows}, allow_nan=False))


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict and print what it came to; 1 if the input is wrong."""
    options = _parse(arguments)
    try:
        file = _file(options.points)
        alone = options.json or options.points is not None
        fits = options.fits or (["shipped"] if alone else ["fitted", "loso", "lodo"])
        fits = list(dict.fromkeys(fits))
        if options.json and options.out is None:
            _print_json(fits, file)
            return 0
        if options.json:
            raise CalibrationError("--json writes no report; leave --out away")
        # Needs matplotlib, which predicting does without.
        from benchmarks.cost_model_report import Report, write_report

        points = read_points(file)
        rows = cost_model_rows.Rows(points)
        judged = tuple(judge(fit, points, rows) for fit in fits)
        report = Report(points=file.name, judged=judged)
        print(report.text())
        if options.out is not None:
            print(f"written: {write_report(report, options.out)}", file=sys.stderr)
    except (MeshwrightError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
