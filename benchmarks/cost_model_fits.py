"""Predictions of published measurements under several fits, and the floors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from planner.calibration.floors import Figure, bubble_only, constant_mfu
from planner.calibration.floors import Fit as FloorFit
from planner.calibration.groups import family_of, precision_family
from planner.calibration.points import Point
from planner.calibration.predictions import Prediction
from planner.cluster.presets import device_type, device_type_names
from planner.errors import CalibrationError

__all__ = [
    "FITS",
    "Judged",
    "judge",
    "model_flops",
    "predict_by",
    "shipped_predictions",
]

#: Fits by the name that --fits takes, and what is said of them.
FITS = {
    "shipped": "the calibration that is shipped, which has seen the rows of points.csv",
    "fitted": "fitted to all rows",
    "loso": "each source predicted by a fit that never saw it, nor other releases of "
    "the same table",
    "lodo": "each device type predicted by a fit that never saw it",
}
#: The floor that is beside a fit.
_FLOOR: Mapping[str, FloorFit] = {
    "shipped": "fitted",
    "fitted": "fitted",
    "loso": "source",
    "lodo": "device",
}
#: Widths of numbers by what datasheets call the rate, widest rate last.
_RATES = {
    "4 bit": ("float4", "float8", "bfloat16", "float16"),
    "8 bit": ("float8", "bfloat16", "float16"),
    "16 bit": ("bfloat16", "float16"),
    "32 bit": ("tensorfloat32", "float32"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What one fit says of the rows.

    Attributes:
        fit: A name of FITS.
        predictions: Of the cost model.
        constant_mfu: Of the first floor, fitted to the same sources or devices.
        bubble_only: Of the second.
    """

    fit: str
    predictions: tuple[Prediction, ...]
    constant_mfu: tuple[Prediction, ...]
    bubble_only: tuple[Prediction, ...]


def _predict(points: Sequence[Point], calibration: Any) -> tuple[Prediction, ...]:
    from planner.calibration.predict import predict_points

    return tuple(predict_points(points, calibration))


def _fit(points: Sequence[Point]) -> Any:
    from planner.calibration.fit import fit

    return fit(points)


def _shipped() -> Any:
    from planner.calibration.store import shipped

    return shipped()


def shipped_predictions(points: Sequence[Point]) -> tuple[Prediction, ...]:
    """What a user gets who fits nothing."""
    return _predict(points, _shipped())


def _left_out(
    points: Sequence[Point], label_of: Callable[[Point], str], kind: str
) -> tuple[Prediction, ...]:
    """Predict the rows of each label by a fit to the rows of all others."""
    labels = list(dict.fromkeys(map(label_of, points)))
    if len(labels) < 2:
        raise CalibrationError(
            f"all {len(points)} rows are of one {kind}, {labels[0]!r}; leaving it out "
            f"leaves nothing to fit to; judge by --fits shipped or fitted"
        )
    found: list[Prediction] = []
    shown = tqdm(labels, desc=f"leaving out a {kind}", disable=not sys.stderr.isatty())
    for label in shown:
        rest = [point for point in points if label_of(point) != label]
        own = [point for point in points if label_of(point) == label]
        found += _predict(own, _fit(rest))
    order = {(p.source, p.point_id): at for at, p in reversed([*enumerate(points)])}
    return tuple(sorted(found, key=lambda one: order[one.source, one.point_id]))


def predict_by(fit: str, points: Sequence[Point]) -> tuple[Prediction, ...]:
    """Predict rows under a fit.

    Args:
        fit: A name of FITS.
        points: Rows, at least one.
    Raises:
        CalibrationError: If there is no row, or leaving one source or device out leaves
            none.
    """
    if not points:
        raise CalibrationError("there is no row to predict; give a file that has some")
    if fit == "shipped":
        return shipped_predictions(points)
    if fit == "fitted":
        return _predict(points, _fit(points))
    if fit == "loso":
        return _left_out(points, lambda point: family_of(point.source), "source")
    devices = {(p.source, p.point_id): p.device for p in shipped_predictions(points)}
    return _left_out(
        points,
        lambda point: devices.get((point.source, point.point_id), point.gpu),
        "device type",
    )


def model_flops(point: Point) -> float | None:
    """FLOPs of a step by the shape, for the floors: 6 a parameter and token, attention.

    flops = tokens (6 n + 6 layers hidden seq), n = 12 layers hidden^2 + vocab hidden;
    None where the row lacks a figure or its experts are not in its columns.
    Source: Narayanan et al. 2021, arXiv 2104.04473, equation 3, attention halved.
    """
    layers, hidden, seq = point.layers, point.hidden, point.seq
    if not (layers and hidden and seq and point.global_batch) or (point.ep or 1) > 1:
        return None
    by_shape = 12 * layers * hidden**2 + (point.vocab or 50257) * hidden
    count = point.params or by_shape
    if count > 2 * by_shape:
        # Most of these parameters are experts that a token does not see.
        return None
    tokens = point.global_batch * seq
    return tokens * (6 * count + 6 * layers * hidden * seq)


def _peaks(predictions: Sequence[Prediction]) -> Figure:
    devices = {(p.source, p.point_id): p.device for p in predictions}
    known = set(device_type_names())

    def peak_flops_per_s(point: Point) -> float | None:
        name = devices.get((point.source, point.point_id), "")
        if name not in known:
            return None
        rates = device_type(name).peak_flops_per_s
        for wanted in _RATES.get(precision_family(point.precision), _RATES["16 bit"]):
            for dtype, rate in rates.items():
                if dtype.startswith(wanted):
                    return rate
        return None

    return peak_flops_per_s


def judge(fit: str, points: Sequence[Point]) -> Judged:
    """Predictions of a fit and of the floors beside it; errors are predict_by's."""
    predictions = predict_by(fit, points)
    peaks = _peaks(predictions)
    one, other = (
        floor(
            predictions,
            points,
            flops_per_step=model_flops,
            peak_flops_per_s=peaks,
            fit=_FLOOR[fit],
        )
        for floor in (constant_mfu, bubble_only)
    )
    return Judged(fit=fit, predictions=predictions, constant_mfu=one, bubble_only=other)
