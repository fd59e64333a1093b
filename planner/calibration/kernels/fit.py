"""Fits of the surfaces of kernels to measured tables.

Least squares of the logarithm of predicted over measured seconds, with a soft absolute
loss beyond 5 %, because a library that chooses badly for one shape in twenty is not to
bend the others. Constants are scaled by where they start. No randomness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.calibration.kernels.case import Bounds, KernelCase
from planner.calibration.kernels.products import long_run_rows, product_seconds
from planner.errors import CalibrationError

__all__ = [
    "Bounds",
    "KernelErrors",
    "KernelFit",
    "errors_of",
    "fit_case",
    "fit_constants",
    "fit_long_run",
]

Array = NDArray[np.float64]

#: Of where a constant starts, what is as good as 0.
_NOTHING = 1e-6

_SOFT, _STEP, _EVALUATIONS = 0.05, 1e-3, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelErrors:
    """Errors of predictions, as shares of what was measured.

    Attributes:
        rows: How many.
        mean: Mean absolute error.
        median: Of the absolute errors.
        p90: Their 90th percentile.
        bias: Mean of the logarithm of predicted over measured.
        training: Mean absolute error of shapes as large as training has them.
    """

    rows: int
    mean: float
    median: float
    p90: float
    bias: float
    training: float


def errors_of(
    predicted: Array, measured: Array, training: NDArray[np.bool_] | None = None
) -> KernelErrors:
    """Compare predictions with measurements.

    Args:
        predicted: Seconds. Shape [rows].
        measured: Likewise.
        training: Rows of training's sizes; all if None.
    """
    off = np.abs(predicted / measured - 1)
    large = off if training is None else off[training]
    return KernelErrors(
        rows=len(off),
        mean=float(off.mean()),
        median=float(np.median(off)),
        p90=float(np.quantile(off, 0.9)),
        bias=float(np.log(predicted / measured).mean()),
        training=float(large.mean()) if len(large) else float("nan"),
    )


def fit_constants(
    predict: Callable[[dict[str, float]], Array],
    measured: Array,
    bounds: Bounds,
    starts: Sequence[Mapping[str, float]] = ({},),
) -> dict[str, float]:
    """Fit constants to measured seconds.

    Args:
        predict: Seconds of the rows under given constants. Returns shape [rows].
        measured: Shape [rows].
        bounds: Start, least and most of each constant.
        starts: Constants that start elsewhere, of as many fits; the best counts.
    Returns:
        The constants, to five significant digits.
    """
    # Of the extra dev: only making constants needs it.
    from scipy.optimize import least_squares

    names = list(bounds)
    start, low, high = np.array(list(bounds.values())).T
    scale = start

    def residual(point: Array) -> Array:
        values = dict(zip(names, (point * scale).tolist(), strict=True))
        return np.asarray(np.log(predict(values) / measured))

    tries = [
        least_squares(
            residual,
            np.array([other.get(name, bounds[name][0]) for name in names]) / scale,
            bounds=(low / scale, high / scale),
            loss="soft_l1",
            f_scale=_SOFT,
            diff_step=_STEP,
            max_nfev=_EVALUATIONS,
        )
        for other in starts
    ]
    found = min(tries, key=lambda one: float(one.cost))
    # A bound of 0 is approached, but not met.
    point = np.where(np.abs(found.x) > _NOTHING, found.x, np.maximum(low / scale, 0.0))
    return {
        name: float(f"{value:.5g}")
        for name, value in zip(names, point * scale, strict=True)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFit:
    """A fitted case.

    Attributes:
        case: What was fitted.
        constants: Found.
        rows: Rows fitted to.
        errors: On the rows that were held out.
    """

    case: KernelCase
    constants: Mapping[str, float]
    rows: int
    errors: KernelErrors


def fit_case(case: KernelCase) -> KernelFit:
    """Fit a device's kernels, and compare with the rows that were held out."""
    held = case.rows.held_out
    kept, tried = case.rows.at(~held), case.rows.at(held)

    def predict(values: dict[str, float]) -> Array:
        return case.predict(values, kept)

    found = fit_constants(predict, kept.seconds, case.bounds, case.starts)
    return KernelFit(
        case=case,
        constants=found,
        rows=len(kept),
        errors=errors_of(
            case.predict(found, tried), tried.seconds, case.training(tried)
        ),
    )


def fit_long_run(device: str, dtype: str, constants: Mapping[str, float]) -> float:
    """Fit how much longer products take that are repeated for a second.

    Args:
        device: One that :func:`planner.calibration.kernels.products.long_run_rows` has.
        dtype: Likewise.
        constants: Of bursts.
    """
    rows = long_run_rows(device, dtype)
    if rows is None:
        raise CalibrationError(f"there are no long runs of {dtype} on {device}")
    kept = rows.at(~rows.held_out)
    predict = product_seconds(
        device, dtype, 1.0 if dtype == "float8" else 2.0, sustained=True
    )

    def predicted(values: dict[str, float]) -> Array:
        return predict(dict(constants) | values, kept)

    bounds = {"long_run": (0.15, 0.0, 1.0)}
    return fit_constants(predicted, kept.seconds, bounds)["long_run"]
