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
from planner.cost import Recipe
from planner.cost.constants import Calibration, DeviceConstants

__all__ = [
    "DEVICE_CONSTANTS",
    "INNER_RAMP",
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
        spread: How far, in logits, one device or recipe lies from the others.
        shared: How far all of them lie from the start.
    """

    name: str
    low: float
    high: float
    start: float
    spread: float = 0.3
    shared: float = 0.5

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

#: Inner length at which a product reaches half of its rate. Fitted for each device, it
#: came out as 293 to 331 on all ten.
INNER_RAMP = 310.0

_FIXED = {"memory_efficiency": MEMORY_REACHED, "inner_ramp": INNER_RAMP}

#: At most six of a device. The network between hosts is NCCL's and a machine's more
#: than a device type's, so that it may hardly differ: left free, six runs of ZeRO 3 of
#: 2021 set that of all A100s to .34. Hosts are compared with a framework's, whose
#: ``launch`` has what they share.
DEVICE_CONSTANTS = (
    Constant(name="matmul_efficiency", low=0.3, high=1.0, start=0.75),
    Constant(name="attention_efficiency", low=0.15, high=1.0, start=0.6),
    Constant(name="link_efficiency", low=0.2, high=1.0, start=0.75),
    Constant(name="network_efficiency", low=0.1, high=1.0, start=0.65, spread=0.15),
    Constant(name="float8_efficiency", low=0.3, high=1.0, start=0.85),
    Constant(name="host_overhead", low=0.25, high=4.0, start=1.0, shared=0.05),
)
#: Of recipes; at most four of each, see :func:`recipe_constants`. Little is known of a
#: launch beforehand (``LAUNCH`` of planner/calibration/frameworks), but what one
#: framework takes is likely for those whose hosts are as busy; what links give
#: collectives that nothing hides differs from DeepSpeed to the rest.
RECIPE_CONSTANTS = (
    Constant(name="launch", low=0.5, high=60.0, start=6.0, spread=0.8, shared=1.5),
    Constant(name="elementwise", low=0.1, high=1.6, start=0.5),
    Constant(name="layer_overlap", low=0.0, high=0.95, start=0.1),
    Constant(name="expert_overlap", low=0.0, high=0.95, start=0.2),
    Constant(name="overlap_cost", low=0.0, high=0.8, start=0.4),
    Constant(
        name="replica_efficiency", low=0.05, high=1.0, start=0.9, spread=1.0, shared=0.1
    ),
    Constant(name="newer_products", low=0.6, high=1.0, start=0.9),
)
#: Frameworks whose measurements have experts on several devices.
_WITH_EXPERTS = frozenset({"megatron", "megatron-2025"})
#: Those that have none of tp, on devices older and newer than they are.
_WITHOUT_TP = frozenset({"fsdp"})


def recipe_constants(name: str) -> tuple[Constant, ...]:
    """What is fitted of a framework: four constants, the first two the same for all.

    The others are what its measurements tell: of those with tp how much of its
    collectives hides, of those with experts the same of exchanges, of others what
    hiding collectives of data parallelism costs, of those that hide none what the links
    give them, and of one that has no tp what it makes of devices newer than itself.
    """
    chosen = {"launch", "elementwise", "layer_overlap"}
    if name in _WITH_EXPERTS:
        chosen |= {"expert_overlap"}
    elif FRAMEWORKS[name].recipe.overlap:
        chosen |= {"overlap_cost"}
    else:
        chosen |= {"replica_efficiency"}
    if name in _WITHOUT_TP:
        chosen = chosen - {"layer_overlap"} | {"newer_products"}
    return tuple(one for one in RECIPE_CONSTANTS if one.name in chosen)


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

    def precision(self) -> Array:
        """Inverse of the covariance of deviations from the start. [size, size]."""
        columns = self.columns()
        covariance = np.diag([constant.spread**2 for _, _, constant in columns])
        keys = [_likened(*column) for column in columns]
        for key, constant in {_likened(*c): c[2] for c in columns}.items():
            same = np.array([one == key for one in keys])
            covariance[np.ix_(same, same)] += constant.shared**2
        return np.asarray(np.linalg.inv(covariance))

    def calibration(self, places: Array, name: str) -> Calibration:
        """Constants of a vector. Shape [size].

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
            away.setdefault(_likened(kind, of, constant), []).append(float(far))
        others = {one: _unseen_recipe(one, away) for one in FRAMEWORKS}
        devices = {
            of: DeviceConstants(**_FIXED, **found)
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
            recipes=others | recipes,
            default=_unseen_device(away),
        )


#: What a constant is likely to be the same for: its kind, name, and a framework's host.
_Key = tuple[str, str, str]


def _likened(kind: str, name: str, constant: Constant) -> _Key:
    """Whose values of a constant tell of each other's.

    Those of all devices, or of all frameworks; but how long a host takes to launch
    says nothing of hosts that another kind of program keeps busy: mixtures of experts
    under Megatron-LM, which tell most of it, launch what stands for one of the graph's
    kernels in twice what eager torch takes for it, four times a compiled program's.
    """
    by_host = kind == "recipe" and constant.name == "launch"
    return kind, constant.name, FRAMEWORKS[name].host if by_host else ""


def _likely(constant: Constant, start: float, away: Sequence[float]) -> float:
    """A constant that nothing was measured of, as others lie away from their starts."""
    ratio = (constant.spread / constant.shared) ** 2
    mean = sum(away) / (len(away) + ratio)
    return constant.from_logit(constant.to_logit(start) + mean)


def _unseen_device(away: Mapping[_Key, Sequence[float]]) -> DeviceConstants:
    found = {
        one.name: _likely(one, one.start, away.get(_likened("device", "", one), ()))
        for one in DEVICE_CONSTANTS
    }
    return DeviceConstants(**_FIXED, **found)


def _unseen_recipe(name: str, away: Mapping[_Key, Sequence[float]]) -> Recipe:
    recipe = FRAMEWORKS[name].recipe
    found = {
        one.name: _likely(
            one, getattr(recipe, one.name), away.get(_likened("recipe", name, one), ())
        )
        for one in recipe_constants(name)
    }
    return replace(recipe, **found)  # type: ignore[arg-type]
