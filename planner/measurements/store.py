"""Fitted constants: those that price a plan, and the JSON files that hold them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

from planner.cluster import Cluster
from planner.cost import Recipe, get_recipe
from planner.cost.constants import Calibration, DeviceConstants
from planner.errors import CalibrationError, UnknownNameError
from planner.measurements.catalogues import DATA, fitted_constants, frameworks
from planner.measurements.kernels import surfaces_of
from planner.reading import parse_json, read_text
from planner.schema.base import write_atomically

__all__ = [
    "SHIPPED",
    "CalibrationChoice",
    "Origin",
    "calibrated_recipe",
    "calibration_document",
    "choose_calibration",
    "has_shipped",
    "load_calibration",
    "save_calibration",
    "shipped",
]

#: File of the constants that come with Meshwright.
SHIPPED = DATA / "published.json"

_VERSION = 2

# -- Choosing --------------------------------------------------------------------

#: Names of constants: themselves, ``"shipped"``, a file, or None (``"none"``).
CalibrationChoice: TypeAlias = Calibration | str | os.PathLike[str] | None


def choose_calibration(
    choice: CalibrationChoice, cluster: Cluster
) -> Calibration | None:
    """Return the constants that were named, if there are any for these machines.

    Constants are fitted to GPUs. The shipped ones do not apply to clusters with CPU
    devices, whose documents state their efficiency, nor to single device types that
    were measured; see :func:`planner.cost.constants.constants_of`.

    Args:
        choice: Constants; ``"shipped"`` for those that come with Meshwright; a file
            that ``meshwright calibrate`` wrote; None or ``"none"`` for what the
            cluster's document says.
        cluster: The machines.
    Returns:
        None where nothing fitted is used.
    Raises:
        CalibrationError: If the file is none, or constants that are not the shipped
            ones are named for a cluster with CPU devices.
    """
    if choice is None or choice == "none":
        return None
    on_cpus = any(device.backend == "gloo" for device in cluster.device_types)
    if choice == "shipped":
        return shipped() if has_shipped() and not on_cpus else None
    found = choice if isinstance(choice, Calibration) else load_calibration(choice)
    if on_cpus:
        raise CalibrationError(
            f"calibration {found.name!r} is of GPUs and {cluster.name} has CPU "
            f"devices; leave it out, a probe of the machine says what they reach"
        )
    return found


def calibrated_recipe(name: str, calibration: Calibration | None) -> Recipe:
    """Return a framework's constants under a calibration.

    Args:
        name: ``torch``; with a calibration, any framework that measurements are of.
        calibration: Its recipes go first. Those that it lacks are the framework's own
            facts, which device constants were fitted along with.
    Raises:
        UnknownNameError: If there is no recipe of that name.
    """
    if calibration is None:
        return get_recipe(name)
    if name in calibration.recipes:
        return calibration.recipes[name]
    if name in frameworks():
        return frameworks()[name].recipe
    raise UnknownNameError("recipe", name, frameworks())


# -- Writing ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Measurements that constants were fitted to.

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
    document = calibration_document(calibration, origin)
    text = json.dumps(document, indent=1, allow_nan=False)
    write_atomically(path, (text + "\n").encode())


def calibration_document(
    calibration: Calibration, origin: Origin | None = None
) -> dict[str, Any]:
    """Return constants as JSON data, the content of a file."""
    names = [constant.name for constant in fitted_constants("recipe")]
    own = [constant.name for constant in fitted_constants("device")]

    def device(values: DeviceConstants) -> dict[str, float]:
        return _rounded({name: getattr(values, name) for name in own})

    return {
        "format_version": _VERSION,
        "name": calibration.name,
        "devices": {name: device(one) for name, one in calibration.devices.items()},
        "default": calibration.default and device(calibration.default),
        "recipes": {
            key: _rounded({name: getattr(recipe, name) for name in names})
            | ({"imbalance": recipe.imbalance} if recipe.imbalance != 1 else {})
            for key, recipe in calibration.recipes.items()
        },
        "origin": asdict(origin or Origin()),
    }


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in values.items()}


# -- Reading ---------------------------------------------------------------------


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Read constants.

    Raises:
        CalibrationError: If the file cannot be read, is of another version, or holds a
            constant that is unknown or out of its bounds.
    """
    text = read_text(path, "constants of meshwright calibrate", error=CalibrationError)
    return _parse(text, os.fspath(path))


def has_shipped() -> bool:
    """Say whether this copy of Meshwright came with fitted constants."""
    return SHIPPED.is_file()


@cache
def shipped() -> Calibration:
    """Return the constants that come with Meshwright.

    They are fitted to published measurements.

    Raises:
        CalibrationError: If this copy came without.
    """
    if not has_shipped():
        raise CalibrationError(
            f"this copy of Meshwright has no {SHIPPED.name}; install it again, or give "
            f"a file that `meshwright calibrate` wrote"
        )
    return _parse(SHIPPED.read_text(encoding="utf-8"), SHIPPED.name)


def _parse(text: str, where: str) -> Calibration:
    found = parse_json(text, where, "calibration", error=CalibrationError)
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
        surfaces=surfaces_of,
    )


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CalibrationError(
            f"{where} is {type(value).__name__} where names and constants belong; "
            f"calibrate again"
        )
    return value


def _recipe(name: str, values: Any, where: str) -> Recipe:
    if name not in frameworks():
        raise CalibrationError(
            f"{where}: recipe {name!r} is not known; known are "
            f"{', '.join(sorted(frameworks()))}"
        )
    given = _mapping(values, f"{where}: recipe {name!r}")
    bounds = {one.name: (one.low, one.high) for one in fitted_constants("recipe")}
    bounds["imbalance"] = (1.0, _MOST_UNEVEN)
    _check(given, bounds, f"{where}: recipe {name!r}")
    return replace(frameworks()[name].recipe, **given)


def _device(values: Any, where: str) -> DeviceConstants:
    given = _mapping(values, where)
    bounds = {one.name: (one.low, one.high) for one in fitted_constants("device")}
    _check(given, bounds, where)
    missing = [name for name in bounds if name not in given]
    if missing:
        raise CalibrationError(f"{where} lacks {missing[0]!r}; calibrate again")
    return DeviceConstants(**given)


#: Largest imbalance of routers of one's own that a file may hold.
_MOST_UNEVEN = 64.0


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
