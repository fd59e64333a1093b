"""Planning problems of any size in arrays of one size, for stable-baselines3.

Masks mark the padding. Edges are float boxes: integer boxes would be one-hot encoded,
and graph spaces are not supported.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.partition.features import (
    GROUP_FEATURES,
    MESH_FEATURES,
    UNIT_FEATURES,
    WHOLE_FEATURES,
    Observed,
)
from envs.partition.ordering import STEP_FEATURES
from planner.errors import StrategyError

__all__ = ["Sizes", "observation_space", "pad"]

Array = NDArray[np.float32]

#: Room for edges, per node: models are chains with a few skips, and groups have edges
#: to their nearest ones.
_UNIT_EDGES = 8
_GROUP_EDGES = 12
#: Bound of all numbers in an observation: features are of order one, edges are indices.
_LARGE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of an observation's arrays.

    Attributes:
        units: Pipeline units of the model.
        groups: Groups of devices.
        meshes: Meshes to choose from.
    """

    units: int = 512
    groups: int = 512
    meshes: int = 256

    def __post_init__(self) -> None:
        for name in ("units", "groups", "meshes"):
            if getattr(self, name) < 1:
                raise StrategyError(
                    f"max_{name}={getattr(self, name)} of an environment is at least 1"
                )

    @property
    def unit_edges(self) -> int:
        """Room for edges between units."""
        return _UNIT_EDGES * self.units

    @property
    def group_edges(self) -> int:
        """Room for edges between groups."""
        return _GROUP_EDGES * self.groups

    def violation(
        self, *, units: int, groups: int, meshes: int = 0, unit_edges: int = 0
    ) -> str | None:
        """Describe the part of a problem that is too large; None if all of it fits."""
        for name, many in (("units", units), ("groups", groups), ("meshes", meshes)):
            most = getattr(self, name)
            if many > most:
                return (
                    f"{many} {name} do not fit max_{name}={most} of the environment; "
                    f"make it with max_{name}={many}"
                )
        if unit_edges > self.unit_edges:
            return (
                f"{unit_edges} edges between units do not fit the {self.unit_edges} of "
                f"max_units={self.units}; make the environment with "
                f"max_units={-(-unit_edges // _UNIT_EDGES)}"
            )
        return None


def observation_space(sizes: Sizes) -> spaces.Dict:
    """Make the space of :class:`envs.partition.env.PartitionEnv`'s observations."""
    shapes: dict[str, tuple[int, ...]] = {
        "units": (sizes.units, UNIT_FEATURES),
        "unit_mask": (sizes.units,),
        "unit_edges": (2, sizes.unit_edges),
        "groups": (sizes.groups, GROUP_FEATURES),
        "group_mask": (sizes.groups,),
        "group_edges": (2, sizes.group_edges),
        "meshes": (sizes.meshes, MESH_FEATURES),
        "mesh_mask": (sizes.meshes,),
        "whole": (WHOLE_FEATURES,),
        "steps": (sizes.groups, STEP_FEATURES),
        "left": (sizes.groups,),
        "chosen": (1,),
        "phase": (1,),
    }
    return spaces.Dict(
        {
            name: spaces.Box(-_LARGE, _LARGE, shape=shape, dtype=np.float32)
            for name, shape in shapes.items()
        }
    )


def _padded(array: NDArray[np.generic], shape: tuple[int, ...], fill: float) -> Array:
    room = np.full(shape, fill, dtype=np.float32)
    room[tuple(slice(0, size) for size in array.shape)] = array
    return room


def pad(seen: Observed, sizes: Sizes) -> dict[str, Array]:
    """Make the observation before the first decision.

    Args:
        seen: The problem.
        sizes: Sizes of the arrays.

    Raises:
        StrategyError: If it does not fit.
    """
    reason = sizes.violation(
        units=len(seen.units),
        groups=len(seen.groups),
        meshes=len(seen.meshes),
        unit_edges=seen.unit_edges.shape[1],
    )
    if reason:
        raise StrategyError(reason)
    units, groups, meshes = sizes.units, sizes.groups, sizes.meshes
    ones = np.ones(max(len(seen.units), len(seen.groups), len(seen.meshes)), np.float32)
    return {
        "units": _padded(seen.units, (units, UNIT_FEATURES), 0.0),
        "unit_mask": _padded(ones[: len(seen.units)], (units,), 0.0),
        "unit_edges": _padded(seen.unit_edges, (2, sizes.unit_edges), -1.0),
        "groups": _padded(seen.groups, (groups, GROUP_FEATURES), 0.0),
        "group_mask": _padded(ones[: len(seen.groups)], (groups,), 0.0),
        "group_edges": _padded(seen.group_edges, (2, sizes.group_edges), -1.0),
        "meshes": _padded(seen.meshes, (meshes, MESH_FEATURES), 0.0),
        "mesh_mask": _padded(ones[: len(seen.meshes)], (meshes,), 0.0),
        "whole": seen.whole.astype(np.float32),
        "steps": np.zeros((groups, STEP_FEATURES), dtype=np.float32),
        "left": np.zeros(groups, dtype=np.float32),
        "chosen": np.full(1, -1.0, dtype=np.float32),
        "phase": np.zeros(1, dtype=np.float32),
    }
