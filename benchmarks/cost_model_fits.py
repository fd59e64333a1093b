"""Predictions of published measurements under several fits, and the baselines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from benchmarks.cost_model_baselines import Fit as BaselineFit
from benchmarks.cost_model_baselines import bubble_only, constant_mfu
from benchmarks.cost_model_rows import Rows
from benchmarks.cost_model_scores import Prediction, family_of
from benchmarks.publish_constants import fitted_places
from planner.errors import CalibrationError
from planner.measurements.points import Point

__all__ = ["FITS", "Judged", "judge", "predict_by"]

#: Fits by the name that --fits takes, and what is said of them.
FITS = {
    "shipped": "the calibration that is shipped, which has seen the rows of points.csv",
    "fitted": "fitted to all rows",
    "loso": "each source predicted by a fit that never saw it, nor other releases of "
    "the same table",
    "lodo": "each device type predicted by a fit that never saw it",
}
#: The baseline that is beside a fit.
_BASELINE: Mapping[str, BaselineFit] = {
    "shipped": "fitted",
    "fitted": "fitted",
    "loso": "source",
    "lodo": "device",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Errors of one fit over the rows.

    Attributes:
        fit: A name of FITS.
        predictions: Of the cost model.
        constant_mfu: Of the first baseline, fitted to the same sources or devices.
        bubble_only: Of the second.
    """

    fit: str
    predictions: tuple[Prediction, ...]
    constant_mfu: tuple[Prediction, ...]
    bubble_only: tuple[Prediction, ...]


def _left_out(
    points: Sequence[Point], rows: Rows, labels: Sequence[str], kind: str
) -> tuple[Prediction, ...]:
    """Predict the rows of each label by a fit to the rows of all others."""
    names = list(dict.fromkeys(labels))
    if len(names) < 2:
        raise CalibrationError(
            f"all {len(points)} rows are of one {kind}, {names[0]!r}; leaving it out "
            f"leaves nothing to fit to; judge by --fits shipped or fitted"
        )
    usable = fitted_places(points)
    found: dict[int, list[Prediction]] = {}
    shown = tqdm(names, desc=f"leaving out a {kind}", disable=not sys.stderr.isatty())
    for name in shown:
        own = [place for place, label in enumerate(labels) if label == name]
        calibration = rows.fit([place for place in usable if labels[place] != name])
        for place in own:
            found[place] = rows.predict([place], calibration)
    return tuple(one for place in range(len(points)) for one in found[place])


def predict_by(fit: str, points: Sequence[Point], rows: Rows) -> tuple[Prediction, ...]:
    """Predict rows under a fit.

    Args:
        fit: A name of FITS.
        points: Rows, at least one.
        rows: The same, prepared.
    Returns:
        In order of the rows; of one that has a memory figure two.
    Raises:
        CalibrationError: If there is no row, or leaving one source or device out leaves
            none.
    """
    if not points:
        raise CalibrationError("there is no row to predict; give a file that has some")
    places = range(len(points))
    if fit == "shipped":
        return tuple(rows.predict(places, rows.shipped()))
    if fit == "fitted":
        return tuple(rows.predict(places, rows.fit(fitted_places(points))))
    if fit == "loso":
        labels = [family_of(point.source) for point in points]
        return _left_out(points, rows, labels, "source")
    devices = [rows.device(place) for place in places]
    return _left_out(points, rows, devices, "device type")


def judge(fit: str, points: Sequence[Point], rows: Rows) -> Judged:
    """Predictions of a fit and of the baselines beside it; errors are predict_by's."""
    predictions = predict_by(fit, points, rows)
    places = {(point.source, point.point_id): at for at, point in enumerate(points)}
    one, other = (
        baseline(
            predictions,
            points,
            flops_per_step=lambda p: rows.flops_per_step(places[p.source, p.point_id]),
            peak_flops_per_s=lambda p: rows.peak_flops_per_s(
                places[p.source, p.point_id]
            ),
            fit=_BASELINE[fit],
        )
        for baseline in (constant_mfu, bubble_only)
    )
    return Judged(fit=fit, predictions=predictions, constant_mfu=one, bubble_only=other)
