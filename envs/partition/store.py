"""Worlds made ready for episodes, kept for the next time that they come."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from envs.partition.padding import Sizes
from envs.partition.problem import Fidelity, Problem, open_problem
from envs.partition.sampler import WorldSampler
from envs.partition.world import World
from planner.errors import NoFeasiblePlanError, StrategyError

__all__ = ["ProblemStore"]

#: Drawn worlds in a row that may not be taken before that is an error.
_ATTEMPTS = 100
#: Problems that are kept, as making one ready takes longer than an episode.
_KEPT = 256


class ProblemStore:
    """Draws worlds and makes them ready; several environments may share one.

    Args:
        worlds: A sampler to draw from, or some worlds.
        sizes: Room for each of them.
        baselines: As for :func:`envs.partition.problem.open_problem`.
        fidelity: Likewise.
        pool: Worlds of a sampler that are drawn from.

    Raises:
        StrategyError: If there are no worlds.
    """

    def __init__(
        self,
        worlds: WorldSampler | Sequence[World],
        sizes: Sizes,
        *,
        baselines: Sequence[str],
        fidelity: Fidelity,
        pool: int,
    ) -> None:
        if not isinstance(worlds, WorldSampler) and not len(worlds):
            raise StrategyError("worlds is empty; give at least one world")
        if pool < 1:
            raise StrategyError(f"pool={pool} of worlds is at least 1")
        self.worlds, self.sizes, self.pool = worlds, sizes, pool
        self.baselines, self.fidelity = tuple(baselines), fidelity
        self._ready: OrderedDict[str, Problem] = OrderedDict()
        self._drawn: dict[int, World] = {}
        self._refused: dict[int, str] = {}

    def draw(self, rng: np.random.Generator) -> Problem:
        """A world at random; those of a sampler that cannot be taken are passed over.

        Raises:
            NoFeasiblePlanError: If no mesh of a given world fits.
            StrategyError: If there is no room for a given world, or if none of many
                that are drawn can be taken.
        """
        if not isinstance(self.worlds, WorldSampler):
            return self.open(self.worlds[int(rng.integers(len(self.worlds)))])
        index = 0
        for _ in range(_ATTEMPTS):
            index = int(rng.integers(self.pool))
            if index in self._refused:
                continue
            if index not in self._drawn:
                self._drawn[index] = self.worlds.world(index)
            try:
                return self.open(self._drawn[index])
            except (NoFeasiblePlanError, StrategyError) as error:
                self._refused[index] = str(error)
        raise StrategyError(
            f"of {_ATTEMPTS} worlds drawn none can be taken; the last: "
            f"{self._refused[index]}"
        )

    def open(self, world: World) -> Problem:
        """Make a world ready, or find it as it was made ready before.

        Raises:
            MeshwrightError: As :func:`envs.partition.problem.open_problem`.
        """
        key = world.to_json()
        if key not in self._ready:
            source = self.worlds
            self._ready[key] = open_problem(
                world,
                self.sizes,
                baselines=self.baselines,
                fidelity=self.fidelity,
                graphs=source.graphs if isinstance(source, WorldSampler) else None,
            )
            if len(self._ready) > _KEPT:
                self._ready.popitem(last=False)
        self._ready.move_to_end(key)
        return self._ready[key]
