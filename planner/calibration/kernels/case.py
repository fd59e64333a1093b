"""Cases to fit to tables of measured kernels: rows, bounds and a surface.

A case is one device and one variant (a dtype, a collective) of a kind of kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.calibration.kernels.rows import KernelRows

__all__ = ["Bounds", "KernelCase", "Predictor"]

Array = NDArray[np.float64]

#: Where constants start, and between what they stay.
Bounds = Mapping[str, tuple[float, float, float]]

#: Seconds of rows under constants.
Predictor = Callable[[Mapping[str, float], KernelRows], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """Rows of one device and variant, and the surface to fit to them.

    Attributes:
        kind: ``products``, ``attention``, ``collectives``, ``experts``, ``dispatch``.
        device: Name of the device type.
        variant: A dtype, a collective, a kernel.
        run: Whose measurements: framework and version.
        rows: All of them.
        bounds: Of the constants.
        predict: Seconds of rows under constants. Returns shape [rows].
        training: Mask of rows as large as training has them.
        kernel: Of several that the surface knows, the one that ran.
        starts: Constants that start elsewhere, in as many fits.
    """

    kind: str
    device: str
    variant: str
    run: str
    rows: KernelRows
    bounds: Bounds
    predict: Predictor
    training: Callable[[KernelRows], NDArray[np.bool_]]
    kernel: str = ""
    starts: Sequence[Mapping[str, float]] = ({},)
