"""The constants that are fitted: bounds, starting values, and a vector of them all.

Every constant lies between two bounds and is fitted as its logit between them, where
steps are of one size and bounds are never met. A starting value stands on what is known
of GPUs in general, and pulls the fit towards it as far as data are few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.calibration.frameworks import FRAMEWORKS
from planner.cost.constants import Calibration, DeviceConstants

__all__ = [
    "DEVICE_CONSTANTS",
    "MEMORY_REACHED",
    "RECIPE_CONSTANTS",
    "Constant",
    "Vector",
    "recipe_constants",
]

Array = NDArray[np.float64]

#: Share between the bounds that a fit keeps from them at its start: logits of bounds
#: have no slope.
_MARGIN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One fitted number.

    Attributes:
        name: Field of :class:`DeviceConstants` or :class:`planner.cost.Recipe`.
        low: Bound.
        high: Bound.
        start: Where a fit begins; for recipes the framework's own value counts.
        spread: How far, in logits, a device or recipe lies from the start.
    """

    name: str
    low: float
    high: float
    start: float
    spread: float = 0.5

    def to_logit(self, value: float) -> float:
        """Place between the bounds on an endless scale."""
        share = (value - self.low) / (self.high - self.low)
        share = min(max(share, _MARGIN), 1 - _MARGIN)
        return float(np.log(share / (1 - share)))

    def from_logit(self, place: float) -> float:
        """The other way round."""
        return float(self.low + (self.high - self.low) / (1 + np.exp(-place)))


#: Share of the memory bandwidth that long reads and writes reach; what fused kernels
#: leave of the bytes is fitted, and the two cannot be told apart. Source: BabelStream's
#: triad on V100, A100 and H100, 0.8 to 0.93 of the datasheet.
MEMORY_REACHED = 0.8

#: At most six of a device.
DEVICE_CONSTANTS = (
    Constant(name="matmul_efficiency", low=0.3, high=1.0, start=0.75),
    Constant(name="inner_ramp", low=10.0, high=1500.0, start=250.0),
    Constant(name="attention_efficiency", low=0.15, high=1.0, start=0.6),
    Constant(name="link_efficiency", low=0.2, high=1.0, start=0.75),
    Constant(name="network_efficiency", low=0.1, high=1.0, start=0.65),
    Constant(name="float8_efficiency", low=0.3, high=1.0, start=0.7),
)
#: Of recipes; at most four of each, see :func:`recipe_constants`.
RECIPE_CONSTANTS = (
    Constant(name="launch", low=0.5, high=60.0, start=6.0),
    Constant(name="elementwise", low=0.1, high=1.6, start=0.5),
    Constant(name="layer_overlap", low=0.0, high=0.95, start=0.1),
    Constant(name="expert_overlap", low=0.0, high=0.95, start=0.2),
    Constant(name="replica_efficiency", low=0.05, high=1.0, start=0.8),
)
#: Frameworks whose measurements have experts on several devices.
_WITH_EXPERTS = frozenset({"megatron", "megatron-2025"})


def recipe_constants(name: str) -> tuple[Constant, ...]:
    """What is fitted of a framework: four constants.

    Those that have measurements of experts hide collectives of data parallelism well,
    and what the others would do with experts cannot be seen.
    """
    left = "replica_efficiency" if name in _WITH_EXPERTS else "expert_overlap"
    return tuple(one for one in RECIPE_CONSTANTS if one.name != left)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """Which devices and recipes are fitted, in the order of a vector.

    Attributes:
        devices: Names.
        recipes: Names of frameworks.
    """

    devices: tuple[str, ...]
    recipes: tuple[str, ...]

    @property
    def size(self) -> int:
        """Numbers in all."""
        return len(self.columns())

    def columns(self) -> list[tuple[str, str, Constant]]:
        """Kind (``device`` or ``recipe``), name and constant of each place."""
        return [
            ("device", name, constant)
            for name in self.devices
            for constant in DEVICE_CONSTANTS
        ] + [
            ("recipe", name, constant)
            for name in self.recipes
            for constant in recipe_constants(name)
        ]

    def start(self) -> Array:
        """Starting values. Shape [size]."""
        places = []
        for kind, name, constant in self.columns():
            value = constant.start
            if kind == "recipe":
                value = getattr(FRAMEWORKS[name].recipe, constant.name)
            places.append(constant.to_logit(value))
        return np.array(places)

    def spread(self) -> Array:
        """Prior deviation of each. Shape [size]."""
        return np.array([constant.spread for _, _, constant in self.columns()])

    def calibration(self, places: Array, name: str) -> Calibration:
        """Constants of a vector. Shape [size].

        Devices without measurements of their own get the mean of those that have.
        """
        values: dict[tuple[str, str], dict[str, float]] = {}
        logits: dict[str, list[float]] = {}
        for (kind, of, constant), place in zip(self.columns(), places, strict=True):
            values.setdefault((kind, of), {})[constant.name] = constant.from_logit(
                float(place)
            )
            if kind == "device":
                logits.setdefault(constant.name, []).append(float(place))
        devices = {
            of: DeviceConstants(memory_efficiency=MEMORY_REACHED, **found)
            for (kind, of), found in values.items()
            if kind == "device"
        }
        recipes = {
            of: replace(FRAMEWORKS[of].recipe, **found)  # type: ignore[arg-type]
            for (kind, of), found in values.items()
            if kind == "recipe"
        }
        return Calibration(
            name=name,
            devices=devices,
            recipes=recipes,
            default=_mean(logits),
        )


def _mean(logits: Mapping[str, Sequence[float]]) -> DeviceConstants:
    found = {
        constant.name: constant.from_logit(
            float(np.mean(logits[constant.name]))
            if logits.get(constant.name)
            else constant.to_logit(constant.start)
        )
        for constant in DEVICE_CONSTANTS
    }
    return DeviceConstants(memory_efficiency=MEMORY_REACHED, **found)
