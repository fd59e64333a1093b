"""Fitted constants as JSON: what they are, and which rows they came from."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from planner.calibration.frameworks import FRAMEWORKS
from planner.calibration.parameters import DEVICE_CONSTANTS, RECIPE_CONSTANTS
from planner.cost import Recipe
from planner.cost.constants import Calibration, DeviceConstants
from planner.errors import CalibrationError
from planner.schema.base import write_atomically

__all__ = [
    "Origin",
    "document_of",
    "has_shipped",
    "load_calibration",
    "save_calibration",
    "shipped",
]

_VERSION = 1
_SHIPPED = "published.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What constants were fitted to.

    Attributes:
        rows: Source to ids of its rows.
        made: Date, ISO 8601.
        errors: Source to mean absolute error of the fitted steps, a share.
    """

    rows: Mapping[str, Sequence[str]] = field(default_factory=dict)
    made: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)


def save_calibration(
    calibration: Calibration,
    path: str | os.PathLike[str],
    origin: Origin | None = None,
) -> None:
    """Write constants; what is there already is replaced as a whole.

    Raises:
        PlanFileError: If the place cannot be written.
    """
    text = json.dumps(document_of(calibration, origin), indent=1, allow_nan=False)
    write_atomically(path, (text + "\n").encode())


def document_of(
    calibration: Calibration, origin: Origin | None = None
) -> dict[str, Any]:
    """Constants as JSON data: what a file holds."""
    names = [constant.name for constant in RECIPE_CONSTANTS]
    return {
        "format_version": _VERSION,
        "name": calibration.name,
        "devices": {k: _rounded(asdict(v)) for k, v in calibration.devices.items()},
        "default": None
        if calibration.default is None
        else _rounded(asdict(calibration.default)),
        "recipes": {
            key: _rounded({name: getattr(recipe, name) for name in names})
            | ({"imbalance": recipe.imbalance} if recipe.imbalance != 1 else {})
            for key, recipe in calibration.recipes.items()
        },
        "origin": asdict(origin or Origin()),
    }


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in values.items()}


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Read constants.

    Raises:
        CalibrationError: If the file cannot be read, is of another version, or holds a
            constant that is unknown or out of its bounds.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(
            f"{os.fspath(path)} cannot be read ({error}); give a file that "
            f"`meshwright calibrate` wrote"
        ) from error
    return _parse(text, os.fspath(path))


def has_shipped() -> bool:
    """Whether this copy of Meshwright came with fitted constants."""
    return _shipped_file().is_file()


@cache
def shipped() -> Calibration:
    """The constants that come with Meshwright, fitted to published measurements.

    Raises:
        CalibrationError: If this copy came without.
    """
    if not has_shipped():
        raise CalibrationError(
            f"this copy of Meshwright has no {_SHIPPED}; install it again, or give a "
            f"file that `meshwright calibrate` wrote"
        )
    return _parse(_shipped_file().read_text(encoding="utf-8"), _SHIPPED)


def _shipped_file() -> Traversable:
    return resources.files("planner.calibration").joinpath("data", _SHIPPED)


def _parse(text: str, where: str) -> Calibration:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise CalibrationError(
            f"{where} is not JSON ({error}); give a file that `meshwright calibrate` "
            f"wrote"
        ) from error
    version = found.get("format_version") if isinstance(found, dict) else None
    if version != _VERSION:
        raise CalibrationError(
            f"{where} has format_version={version!r}, this release reads {_VERSION}; "
            f"calibrate again"
        )
    parts = {
        name: _mapping(found.get(name), f"{where}: {name}")
        for name in ("devices", "recipes")
    }
    default = found.get("default")
    return Calibration(
        name=str(found.get("name", where)),
        devices={
            name: _device(values, f"{where}: device {name!r}")
            for name, values in parts["devices"].items()
        },
        recipes={
            name: _recipe(name, values, where)
            for name, values in parts["recipes"].items()
        },
        default=None if default is None else _device(default, f"{where}: default"),
    )


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CalibrationError(
            f"{where} is {type(value).__name__} where names and constants belong; "
            f"calibrate again"
        )
    return value


def _recipe(name: str, values: Any, where: str) -> Recipe:
    if name not in FRAMEWORKS:
        raise CalibrationError(
            f"{where}: recipe {name!r} is not known; known are "
            f"{', '.join(sorted(FRAMEWORKS))}"
        )
    given = _mapping(values, f"{where}: recipe {name!r}")
    _check(given, _BOUNDS_OF_RECIPES, f"{where}: recipe {name!r}")
    return replace(FRAMEWORKS[name].recipe, **given)


def _device(values: Any, where: str) -> DeviceConstants:
    given = _mapping(values, where)
    _check(given, _BOUNDS_OF_DEVICES, where)
    missing = [
        one.name
        for one in fields(DeviceConstants)
        if one.default is MISSING and one.name not in given
    ]
    if missing:
        raise CalibrationError(f"{where} lacks {missing[0]!r}; calibrate again")
    return DeviceConstants(**given)


#: Lowest and highest of each constant; of what is not fitted, at least 0.
_BOUNDS_OF_DEVICES = {
    **{one.name: (0.0, math.inf) for one in fields(DeviceConstants)},
    **{one.name: (one.low, one.high) for one in DEVICE_CONSTANTS},
}
#: How uneven routers of one's own are can be written into a file, 1 to this.
_MOST_UNEVEN = 64.0
_BOUNDS_OF_RECIPES = {
    **{one.name: (one.low, one.high) for one in RECIPE_CONSTANTS},
    "imbalance": (1.0, _MOST_UNEVEN),
}


def _check(
    values: Mapping[str, Any], bounds: Mapping[str, tuple[float, float]], where: str
) -> None:
    for name, value in values.items():
        if name not in bounds:
            raise CalibrationError(
                f"{where} has {name!r}, which is none of {', '.join(sorted(bounds))}"
            )
        low, high = bounds[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (low <= value <= high and math.isfinite(value)):
            raise CalibrationError(
                f"{where}: {name}={value!r} is not a number from {low:g} to {high:g}; "
                f"calibrate again"
            )
