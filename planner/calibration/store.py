"""Fitted constants as JSON: what they are, and which rows they came from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from planner.calibration.frameworks import FRAMEWORKS
from planner.calibration.parameters import DEVICE_CONSTANTS, RECIPE_CONSTANTS
from planner.cost.constants import Calibration, DeviceConstants
from planner.errors import CalibrationError

__all__ = ["Origin", "load_calibration", "save_calibration", "shipped"]

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
    calibration: Calibration, path: str | Path, origin: Origin | None = None
) -> None:
    """Write constants; what is there already is replaced as a whole."""
    names = [constant.name for constant in RECIPE_CONSTANTS]
    document = {
        "format_version": _VERSION,
        "name": calibration.name,
        "devices": {k: _rounded(asdict(v)) for k, v in calibration.devices.items()},
        "default": None
        if calibration.default is None
        else _rounded(asdict(calibration.default)),
        "recipes": {
            key: _rounded({name: getattr(recipe, name) for name in names})
            for key, recipe in calibration.recipes.items()
        },
        "origin": asdict(origin or Origin()),
    }
    target = Path(path)
    half = target.with_name(target.name + ".part")
    half.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    half.replace(target)


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in values.items()}


def load_calibration(path: str | Path) -> Calibration:
    """Read constants.

    Raises:
        CalibrationError: If the file cannot be read, is of another version, or holds a
            constant that is unknown or out of its bounds.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(
            f"{path} cannot be read ({error}); give a file that `meshwright calibrate` "
            f"wrote"
        ) from error
    return _parse(text, str(path))


@cache
def shipped() -> Calibration:
    """The constants that come with Meshwright, fitted to published measurements."""
    file = resources.files("planner.calibration").joinpath("data", _SHIPPED)
    return _parse(file.read_text(encoding="utf-8"), _SHIPPED)


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
    known = {constant.name: constant for constant in DEVICE_CONSTANTS}
    recipes = {}
    for name, values in found["recipes"].items():
        if name not in FRAMEWORKS:
            raise CalibrationError(
                f"{where}: recipe {name!r} is not known; known are "
                f"{', '.join(sorted(FRAMEWORKS))}"
            )
        fitted = {constant.name: constant for constant in RECIPE_CONSTANTS}
        _check(values, fitted, f"{where}: recipe {name!r}")
        recipes[name] = replace(FRAMEWORKS[name].recipe, **values)
    return Calibration(
        name=str(found["name"]),
        devices={
            name: _device(values, known, f"{where}: device {name!r}")
            for name, values in found["devices"].items()
        },
        recipes=recipes,
        default=None
        if found["default"] is None
        else _device(found["default"], known, f"{where}: default"),
    )


def _device(
    values: Mapping[str, Any], known: Mapping[str, Any], where: str
) -> DeviceConstants:
    names = {one.name for one in fields(DeviceConstants)}
    given = {name: value for name, value in values.items() if name in known}
    unknown = sorted(set(values) - names)
    if unknown:
        raise CalibrationError(
            f"{where} has {unknown[0]!r}, which is none of {', '.join(sorted(names))}"
        )
    _check(given, known, where)
    return DeviceConstants(**values)


def _check(values: Mapping[str, Any], known: Mapping[str, Any], where: str) -> None:
    for name, value in values.items():
        if name not in known:
            raise CalibrationError(
                f"{where} has {name!r}, which is none of {', '.join(sorted(known))}"
            )
        low, high = known[name].low, known[name].high
        if not isinstance(value, int | float) or not low <= value <= high:
            raise CalibrationError(
                f"{where}: {name}={value!r} is not a number from {low} to {high}; "
                f"calibrate again"
            )
