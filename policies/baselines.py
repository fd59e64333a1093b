"""Fixed policies of the job stream, which others are compared with.

All decide by ``predict(obs, action_masks)``, on one observation or on a batch, and read
``job`` and ``job_graph`` alone. They serve both worlds: where several candidates have
one degree the first of them is taken, and where the job may wait, it waits instead of
being turned away.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from envs.ramp.arrivals import ArrivalLaw
from envs.ramp.episodes import RampEpisodes
from envs.ramp.jobs import RampJobs, RampTables
from planner.errors import StrategyError, UnknownNameError

__all__ = [
    "BASELINES",
    "Baseline",
    "Constant",
    "DegreeTables",
    "MinFeasible",
    "ParaMax",
    "ParaMin",
    "Policy",
    "RandomDegree",
    "best_constant",
    "make_baseline",
]

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Index = NDArray[np.int64]
Observation = Mapping[str, NDArray[np.float32]]

#: Names that :func:`make_baseline` takes; ``constant_K`` with a degree for K.
BASELINES = ("para_max", "para_min", "min_feasible", "random", "constant_K")


class DegreeTables(Protocol):
    """Tables that baselines need: part of RampTables and of StreamTables."""

    @property
    def degrees(self) -> Index:
        """Degrees of the candidates, ascending. Shape [d]."""
        ...

    @property
    def sequential_jct_s(self) -> Array:
        """Completion time of each job on one device. Shape [j]."""
        ...

    @property
    def empty_jct_s(self) -> Array:
        """Completion time of jobs at each candidate on an empty cluster. [j, d]."""
        ...


class Policy(Protocol):
    """Interface of all policies."""

    def predict(self, obs: Observation, action_masks: Flags) -> Index:
        """Decide.

        Args:
            obs: Observation of one decision, or of several with a leading axis.
            action_masks: Actions that are allowed. Shape [actions] or [b, actions].
        Returns:
            Actions: 0 turns the job away, 1 + i runs it at the i-th degree; one more,
            where there is one, lets it wait. Shape [] or [b].
        """
        ...


class Baseline(ABC):
    """A fixed policy.

    Args:
        tables: Jobs and topology, as environments have them.
    """

    def __init__(self, tables: DegreeTables) -> None:
        self.tables = tables

    def predict(self, obs: Observation, action_masks: Flags) -> Index:
        """Decide; see :class:`Policy`."""
        masks = np.asarray(action_masks, dtype=np.bool_)
        # Rounded because float32 loses the last digits of a beta.
        beta = np.round(np.asarray(obs["job"], dtype=np.float64)[..., 0], 6)
        model = np.asarray(obs["job_graph"])[..., 0].astype(np.int64)
        shape = masks.shape[:-1]
        flat, last = masks.reshape(beta.size, -1), len(self.tables.degrees)
        chosen = self._choose(
            model.reshape(-1), beta.reshape(-1), flat[:, 1 : 1 + last]
        )
        waits = (chosen == 0) & flat[:, 1 + last :].any(axis=1)
        chosen = np.where(waits, 1 + last, chosen)
        return np.asarray(chosen, dtype=np.int64).reshape(shape)

    @abstractmethod
    def _choose(self, model: Index, beta: Array, valid: Flags) -> Index:
        """Return actions, given the degrees that are allowed. Shapes [b], [b, d]."""


def _smallest(wanted: Flags) -> Index:
    """Return the first wanted degree as an action, 0 where none is. Shape [b]."""
    return np.where(wanted.any(axis=1), 1 + wanted.argmax(axis=1), 0)


def _largest(wanted: Flags, degrees: Index) -> Index:
    """Return the first of the largest wanted degree as an action, 0 where none is."""
    best = np.where(wanted, degrees, -1).argmax(axis=1)
    return np.where(wanted.any(axis=1), 1 + best, 0)


class ParaMax(Baseline):
    """Takes the largest degree that is allowed."""

    def _choose(self, model: Index, beta: Array, valid: Flags) -> Index:
        return _largest(valid, self.tables.degrees)


class ParaMin(Baseline):
    """Takes the smallest degree of at least 1 / beta, else the largest allowed."""

    def _choose(self, model: Index, beta: Array, valid: Flags) -> Index:
        # After the end of an episode beta is 0, and nothing is allowed.
        least = np.ceil(1.0 / np.maximum(beta, 1e-6))
        enough = valid & (self.tables.degrees >= least[:, None])
        most = _largest(valid, self.tables.degrees)
        return np.where(enough.any(axis=1), _smallest(enough), most)


class MinFeasible(Baseline):
    """Takes the smallest degree that meets the deadline on an empty cluster."""

    def _choose(self, model: Index, beta: Array, valid: Flags) -> Index:
        limit = beta * self.tables.sequential_jct_s[model]
        in_time = self.tables.empty_jct_s[model] <= limit[:, None]
        return _smallest(valid & in_time)


class Constant(Baseline):
    """Takes one degree where it is allowed, else none.

    Args:
        tables: Jobs and topology.
        degree: One of the degrees of the tables.

    Raises:
        StrategyError: If it is none of them.
    """

    def __init__(self, tables: DegreeTables, degree: int) -> None:
        super().__init__(tables)
        degrees = sorted(set(tables.degrees.tolist()))
        if degree not in degrees:
            raise StrategyError(
                f"degree {degree} has no block on the cluster; use one of "
                f"{', '.join(map(str, degrees))}"
            )
        self.degree = degree

    def _choose(self, model: Index, beta: Array, valid: Flags) -> Index:
        return _smallest(valid & (self.tables.degrees == self.degree))


class RandomDegree(Baseline):
    """Takes an allowed degree at random, each with equal probability.

    Args:
        tables: Jobs and topology.
        seed: Seed or generator.
    """

    def __init__(
        self, tables: DegreeTables, seed: int | np.random.Generator = 0
    ) -> None:
        super().__init__(tables)
        self._generator = np.random.default_rng(seed)

    def _choose(self, model: Index, beta: Array, valid: Flags) -> Index:
        drawn = self._generator.random(valid.shape)
        best = np.where(valid, drawn, -1.0).argmax(axis=1)
        return np.where(valid.any(axis=1), 1 + best, 0)


def make_baseline(name: str, tables: DegreeTables, seed: int = 0) -> Baseline:
    """Make a policy by its name in :data:`BASELINES`.

    Raises:
        UnknownNameError: If there is none of that name.
        StrategyError: If the degree of a constant has no block.
    """
    simple: dict[str, type[Baseline]] = {
        "para_max": ParaMax,
        "para_min": ParaMin,
        "min_feasible": MinFeasible,
    }
    if name in simple:
        return simple[name](tables)
    if name == "random":
        return RandomDegree(tables, seed)
    degree = name.removeprefix("constant_")
    if degree != name and degree.isdigit():
        return Constant(tables, int(degree))
    raise UnknownNameError("policy", name, BASELINES)


def best_constant(
    jobs: RampJobs,
    law: ArrivalLaw,
    seeds: Sequence[int],
    tables: RampTables,
    horizon_s: float = 1e6,
) -> Constant:
    """Find the constant degree that blocks the smallest share of a law's jobs.

    Args:
        jobs: Jobs that may arrive.
        law: Law to draw episodes from.
        seeds: Seeds of the episodes; other ones than those of a later comparison.
        tables: Tables of the jobs.
        horizon_s: End of the episodes.

    Raises:
        StrategyError: If there are no seeds.
    """
    if not seeds:
        raise StrategyError("seeds is empty; give at least one to choose a constant by")
    drawn = [law.draw(tuple(jobs.jobs), horizon_s, seed) for seed in seeds]
    best, least = 0, math.inf
    for column in range(len(tables.degrees)):
        many = RampEpisodes(jobs, drawn, horizon_s, tables)
        choice = np.full(len(drawn), column, dtype=np.int64)
        while not many.over.all():
            many.decide(choice)
        rates = [many.summary(row).blocking_rate for row in range(len(drawn))]
        if np.mean(rates) < least:
            best, least = column, float(np.mean(rates))
    return Constant(tables, int(tables.degrees[best]))
