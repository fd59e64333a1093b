"""Scores of rows that lack memory by closed forms but fit once they are cut by it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostTable
from planner.search.base import Objective
from planner.space import MESH_COLUMNS, StrategyTable

__all__ = ["RecutMeshes", "scores_of"]

Array = NDArray[np.float64]


def scores_of(
    costs: CostTable,
    table: StrategyTable,
    objective: Objective,
    *,
    fitting: bool = True,
) -> Array:
    """Objective of each row, infinite where memory does not suffice. Shape [n].

    Args:
        costs: Of the rows.
        table: The rows.
        objective: Of the request.
        fitting: False takes memory as enough.
    """
    if objective == "memory":
        value = costs.memory_bytes
    elif objective == "throughput_per_device":
        value = costs.step_time_s * table.num_devices
    else:
        value = costs.step_time_s
    return np.where(costs.fits, value, np.inf) if fitting else value


@dataclass(eq=False, slots=True)
class RecutMeshes:
    """Meshes of which a row fitted once it was cut by memory.

    Other rows and orders of such a mesh that lack no more are taken to fit, too.

    Attributes:
        known: By degrees: the most that was lacked, in bytes; and what the simulator
            said of the best over what closed forms promised.
    """

    known: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)

    def learn(
        self, mesh: tuple[int, ...], lacked: float, hope: float, value: float
    ) -> None:
        """Take in a row that fits.

        Args:
            mesh: Its degrees.
            lacked: Bytes, by closed forms.
            hope: Its score by closed forms, if memory were enough.
            value: Its score when it was cut and simulated.
        """
        most, ratio = self.known.get(mesh, (0.0, np.inf))
        self.known[mesh] = max(most, lacked), min(ratio, value / hope)

    def scores(
        self, costs: CostTable, table: StrategyTable, objective: Objective
    ) -> Array:
        """:func:`scores_of`, also of rows that a cut by memory lets fit. Shape [n]."""
        found = scores_of(costs, table, objective)
        if not self.known or costs.fits.all():
            return found
        hope = scores_of(costs, table, objective, fitting=False)
        degrees = np.stack([getattr(table, name) for name in MESH_COLUMNS], axis=1)
        for mesh, (lacked, ratio) in self.known.items():
            alike = (degrees == mesh).all(axis=1) & ~costs.fits
            alike &= costs.excess_bytes <= lacked
            found[alike] = hope[alike] * ratio
        return found
