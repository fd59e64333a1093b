"""The vector of all constants that are fitted, between their bounds.

Every constant lies between two bounds and is fitted as its logit between them, where
steps are of one size and bounds are never met. A starting value is what is known of
GPUs in general, and pulls the fit towards it as far as data are few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.cost import Recipe
from planner.cost.constants import Calibration, DeviceConstants
from planner.measurements.catalogues import Constant, fitted_constants, frameworks
from planner.measurements.kernels import surfaces_of

__all__ = [
    "Vector",
    "recipe_constants",
]

Array = NDArray[np.float64]


def recipe_constants(name: str) -> tuple[Constant, ...]:
    """Return the constants of a framework that are fitted, at most three."""
    chosen = frameworks()[name].fitted
    return tuple(one for one in fitted_constants("recipe") if one.name in chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """Layout of the vector: devices and recipes that are fitted, in its order.

    Attributes:
        devices: Names of device types.
        recipes: Names of frameworks.
    """

    devices: tuple[str, ...]
    recipes: tuple[str, ...]

    @property
    def size(self) -> int:
        """Length of the vector."""
        return len(self.columns())

    def columns(self) -> list[tuple[str, str, Constant]]:
        """Return kind (``device`` or ``recipe``), name and constant of each place."""
        return [
            ("device", name, constant)
            for name in self.devices
            for constant in fitted_constants("device")
        ] + [
            ("recipe", name, constant)
            for name in self.recipes
            for constant in recipe_constants(name)
        ]

    def start(self) -> Array:
        """Return the starting values. Shape [size]."""
        places = []
        for kind, name, constant in self.columns():
            value = constant.start
            if kind == "recipe":
                value = getattr(frameworks()[name].recipe, constant.name)
            places.append(constant.to_logit(value))
        return np.array(places)

    def precision(self) -> Array:
        """Return the inverse covariance of deviations from the start. [size, size]."""
        columns = self.columns()
        covariance = np.diag([constant.spread**2 for _, _, constant in columns])
        keys = [_alike_key(*column) for column in columns]
        for key, constant in {_alike_key(*c): c[2] for c in columns}.items():
            same = np.array([one == key for one in keys])
            covariance[np.ix_(same, same)] += constant.shared**2
        return np.asarray(np.linalg.inv(covariance))

    def calibration(self, places: Array, name: str) -> Calibration:
        """Return the constants of a vector. Shape [size].

        Devices and frameworks without measurements of their own get what those that
        have some make likely.
        """
        values: dict[tuple[str, str], dict[str, float]] = {}
        away: dict[_Key, list[float]] = {}
        moved = places - self.start()
        for (kind, of, constant), place, far in zip(
            self.columns(), places, moved, strict=True
        ):
            found = constant.from_logit(float(place))
            values.setdefault((kind, of), {})[constant.name] = found
            away.setdefault(_alike_key(kind, of, constant), []).append(float(far))
        others = {one: _unseen_recipe(one, away) for one in frameworks()}
        devices = {
            of: DeviceConstants(**found)  # type: ignore[arg-type]
            for (kind, of), found in values.items()
            if kind == "device"
        }
        recipes = {
            of: replace(frameworks()[of].recipe, **found)  # type: ignore[arg-type]
            for (kind, of), found in values.items()
            if kind == "recipe"
        }
        return Calibration(
            name=name,
            devices=devices,
            recipes=others | recipes,
            default=_unseen_device(away),
            surfaces=surfaces_of,
        )


#: Kind, name and framework's host: values of one key are likely to be alike.
_Key = tuple[str, str, str]


def _alike_key(kind: str, name: str, constant: Constant) -> _Key:
    """Return the key of constants that are likely to be alike.

    They are alike on all devices, or in all frameworks; but how long a host takes to
    launch says nothing of hosts that another kind of program keeps busy: mixtures of
    experts under Megatron-LM, which tell most of it, launch what stands for one of the
    graph's kernels in twice what eager torch takes for it, four times a compiled
    program's.
    """
    by_host = kind == "recipe" and constant.name == "launch"
    return kind, constant.name, frameworks()[name].host if by_host else ""


def _likely(constant: Constant, start: float, away: Sequence[float]) -> float:
    """Return an unmeasured constant, as far from its start as others lie."""
    ratio = (constant.spread / constant.shared) ** 2
    mean = sum(away) / (len(away) + ratio)
    return constant.from_logit(constant.to_logit(start) + mean)


def _unseen_device(away: Mapping[_Key, Sequence[float]]) -> DeviceConstants:
    found = {
        one.name: _likely(one, one.start, away.get(_alike_key("device", "", one), ()))
        for one in fitted_constants("device")
    }
    return DeviceConstants(**found)  # type: ignore[arg-type]


def _unseen_recipe(name: str, away: Mapping[_Key, Sequence[float]]) -> Recipe:
    recipe = frameworks()[name].recipe
    found = {
        one.name: _likely(
            one,
            getattr(recipe, one.name),
            away.get(_alike_key("recipe", name, one), ()),
        )
        for one in recipe_constants(name)
    }
    return replace(recipe, **found)  # type: ignore[arg-type]
