"""What a scorer is fitted to: candidates, and what rollouts say that each would block.

Rollouts are by a scorer itself, so that a new one, fitted to them, is a step of policy
iteration; the first ones are by the best constant degree of each law.

Source: Bertsekas 2020, "Rollout, policy iteration, and distributed reinforcement
learning".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.arrivals import LAWS, ArrivalLaw, BetaLaw
from envs.ramp.episodes import RampEpisodes
from envs.ramp.features import Candidates, empty_candidates, encode, make_memo
from envs.ramp.history import NUM_HISTORY, write_history
from envs.ramp.state import RampState, exact_state, moment_of, past
from envs.ramp.tables import RampTables, ramp_tables
from envs.ramp.world import RampJobs
from planner.errors import StrategyError
from planner.simulate.compiled import compiled
from policies.futures import LawFutures
from policies.lookahead import constant_base
from policies.rollouts import Base, Room, base_action, make_room, rollout_costs
from policies.scorer import Scorer, decide, no_scorer

__all__ = ["LabelConfig", "Labels", "draw_labels", "draw_law", "histories"]

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Index = NDArray[np.int64]

#: Streams, and jobs of each, that a first base is chosen by.
_CHOSEN_BY = (4, 250)


class Labels(NamedTuple):
    """Decisions with what rollouts say of them. n decisions of a candidates.

    Attributes:
        features: Of the candidates. Shape [n, a, NUM_FEATURES].
        history: Shape [n, NUM_HISTORY].
        possible: Shape [n, a].
        costs: Jobs blocked, less the mean of the possible candidates; 0 where it is not
            possible. Shape [n, a].
        variances: Of the costs, as the streams of a label differ. Shape [n, a].
    """

    features: Floats
    history: Floats
    possible: Flags
    costs: Floats
    variances: Floats

    @staticmethod
    def joined(parts: Sequence[Labels]) -> Labels:
        """Those of several, one after the other."""
        return Labels(*(np.concatenate(part) for part in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelConfig:
    """How labels are made.

    Attributes:
        futures: Streams a decision.
        arrivals: Jobs of each at most.
        labelled: Share of the decisions that rollouts are made for.
        explored: Share of the decisions that are taken at random, so that a scorer
            learns of states that it would not come to.
        other_laws: Share of episodes of deadlines, loads and processes other than the
            benchmark's.
        horizon_s: Of the episodes.
    """

    futures: int = 8
    arrivals: int = 48
    labelled: float = 0.1
    explored: float = 0.05
    other_laws: float = 0.3
    horizon_s: float = 1e6

    def __post_init__(self) -> None:
        for name in ("labelled", "explored", "other_laws"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise StrategyError(
                    f"{name}={getattr(self, name)}; a share is from 0 to 1"
                )
        if self.futures < 2 or self.arrivals < 1 or not self.horizon_s > 0.0:
            raise StrategyError(
                f"futures={self.futures} are at least 2, arrivals={self.arrivals} at "
                f"least 1 and horizon_s={self.horizon_s} is positive"
            )


def draw_law(other_laws: float, generator: np.random.Generator) -> ArrivalLaw:
    """One of the benchmark's laws, or one that it does not have.

    The others have deadlines of any skewness, between half and one and a half of the
    benchmark's load, and fixed, Poisson or bursty arrivals.

    Args:
        other_laws: Share of the others.
        generator: To draw with.
    """
    if generator.random() >= other_laws:
        return LAWS[str(generator.choice(list(LAWS)))]
    return ArrivalLaw(
        beta=BetaLaw(skewness=float(generator.uniform(-6.0, 6.0))),
        interval_s=float(1000.0 / generator.uniform(0.5, 1.5)),
        process=("fixed", "poisson", "bursty")[int(generator.choice([0, 0, 1, 2]))],
        burst=3.0,
    )


@compiled
def _write_histories(state: RampState, out: Floats) -> None:
    for row in range(len(out)):
        left = (state.horizon_s - state.now_s[row]) / state.interval_s[row]
        write_history(state.seen[row], left, out[row])


def histories(state: RampState) -> Floats:
    """Features of the streams so far. Shape [b, NUM_HISTORY]."""
    out = np.zeros((len(state.over), NUM_HISTORY), dtype=np.float32)
    _write_histories(state, out)
    return out


class _Labeller:
    """Rollouts of one base policy for episodes side by side."""

    def __init__(
        self,
        tables: RampTables,
        sources: Sequence[LawFutures],
        base: Scorer | None,
        config: LabelConfig,
        generator: np.random.Generator,
    ) -> None:
        self.tables, self.sources, self.config = tables, sources, config
        self.generator = generator
        self.base = None if base is None else Base(0, base)
        self.room: Room = make_room(tables, base or no_scorer())
        self.constants: list[Base] = []

    def choose_constants(self, episodes: RampEpisodes, state: RampState) -> None:
        """Of each episode's law, where a scorer does not decide."""
        for row, source in enumerate(self.sources):
            interval_s = source.law.interval_s
            futures = source.draw(
                past(episodes, row), interval_s, _CHOSEN_BY, self.generator
            )
            action = constant_base(self.tables, futures, state.jct_s[row], interval_s)
            self.constants.append(Base(action, no_scorer()))

    def standing(self, state: RampState) -> Index:
        """What the constants do. Shape [b]."""
        actions = np.zeros(len(self.constants), dtype=np.int64)
        for row in np.flatnonzero(~state.over).tolist():
            actions[row], _ = base_action(
                self.tables,
                moment_of(state, row),
                int(state.model[row]),
                float(state.beta[row]),
                state.jct_s[row, state.model[row]],
                self.constants[row],
                self.room,
            )
        return actions

    def label(
        self, episodes: RampEpisodes, state: RampState, found: Candidates, row: int
    ) -> tuple[Array, Array]:
        """Costs and their variances, of one decision."""
        shape = (self.config.futures, self.config.arrivals)
        futures = self.sources[row].draw(
            past(episodes, row),
            float(state.interval_s[row]),
            shape,
            self.generator,
        )
        costs, variances = np.empty((2, len(found.possible[row])))
        rollout_costs(
            self.tables,
            moment_of(state, row),
            float(state.beta[row]),
            state.jct_s[row],
            state.seen[row],
            Candidates(*(part[row] for part in found)),
            futures,
            self.base or self.constants[row],
            self.room,
            costs,
            variances,
        )
        return costs, variances


def draw_labels(
    jobs: RampJobs,
    actor: Scorer | None,
    base: Scorer | None,
    config: LabelConfig,
    episodes: int,
    seed: int | Sequence[int],
) -> Labels:
    """Play episodes side by side, and label a part of their decisions.

    Args:
        jobs: What may arrive.
        actor: Who decides: labels should be of states that the fitted scorer will come
            to. None for the best constant degree of each law.
        base: Who decides in rollouts; likewise.
        config: How labels are made.
        episodes: To be played.
        seed: Of everything that is drawn.
    Returns:
        Labels in the order in which they were made; decisions with a single candidate
        have none.
    """
    generator = np.random.default_rng(seed)
    tables, names = ramp_tables(jobs), tuple(jobs.jobs)
    laws = [draw_law(config.other_laws, generator) for _ in range(episodes)]
    sources = [LawFutures(law, names, int(generator.integers(2**31))) for law in laws]
    drawn = [law.draw(names, config.horizon_s, generator) for law in laws]
    many = RampEpisodes(jobs, drawn, config.horizon_s, tables)
    interval_s = np.array([law.interval_s for law in laws])
    labeller = _Labeller(tables, sources, base, config, generator)
    memo, made = make_memo(), _Made()
    while not many.over.all():
        state = exact_state(many, interval_s)
        if None in (actor, base) and not many.arrivals.position.any():
            labeller.choose_constants(many, state)
        found = encode(tables, state, empty_candidates(tables, episodes), memo)
        seen = histories(state)
        if actor is None:
            actions = labeller.standing(state)
        else:
            actions = decide(actor, found, seen)
        worth = (found.possible.sum(axis=1) > 1) & ~state.over
        chosen = worth & (generator.random(episodes) < config.labelled)
        for row in np.flatnonzero(chosen).tolist():
            made.add(found, seen, row, *labeller.label(many, state, found, row))
        anything = _any_of(found.possible, generator)
        explored = generator.random(episodes) < config.explored
        many.decide(np.where(explored, anything, actions) - 1)
    return made.labels()


def _any_of(possible: Flags, generator: np.random.Generator) -> Index:
    """One of the possible candidates of each decision, each as likely. Shape [b]."""
    drawn = generator.random(possible.shape)
    best: Index = np.where(possible, drawn, -1.0).argmax(axis=1)
    return best


class _Made:
    """Labels made so far."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.generic], ...]] = []

    def add(
        self,
        found: Candidates,
        seen: Floats,
        row: int,
        costs: Array,
        variances: Array,
    ) -> None:
        possible = found.possible[row].copy()
        centred = np.where(possible, costs, 0.0)
        centred = np.where(possible, centred - centred.sum() / possible.sum(), 0.0)
        self._parts.append(
            (
                found.features[row].copy(),
                seen[row].copy(),
                possible,
                centred.astype(np.float32),
                variances.astype(np.float32),
            )
        )

    def labels(self) -> Labels:
        if not self._parts:
            raise StrategyError(
                "no decision was labelled; play more episodes, or label a larger share"
            )
        return Labels(*(np.stack(part) for part in zip(*self._parts, strict=True)))
