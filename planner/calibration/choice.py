"""Which fitted constants price a plan: those that are shipped, a file's, or none."""

from __future__ import annotations

import os
from typing import TypeAlias

from planner.calibration.frameworks import FRAMEWORKS
from planner.calibration.store import has_shipped, load_calibration, shipped
from planner.cluster import Cluster
from planner.cost import Recipe, get_recipe
from planner.cost.constants import Calibration
from planner.errors import CalibrationError

__all__ = ["CalibrationChoice", "calibrated_recipe", "choose_calibration"]

#: What names constants: themselves, ``"shipped"``, a file, or None (``"none"``).
CalibrationChoice: TypeAlias = Calibration | str | os.PathLike[str] | None


def choose_calibration(
    choice: CalibrationChoice, cluster: Cluster
) -> Calibration | None:
    """The constants that were named, if there are any for these machines.

    Constants are fitted to GPUs. On clusters with CPU devices the shipped ones do not
    apply: their documents say what they reach. Of device types that were measured the
    same holds, one by one; see :func:`planner.cost.constants.constants_of`.

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
    """A framework's constants under a calibration.

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
    if name in FRAMEWORKS:
        return FRAMEWORKS[name].recipe
    return get_recipe(name)
