"""Label decisions in the replay; the first rollouts are by constant degrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envs.ramp.arrivals import LAWS, ArrivalLaw, BetaLaw
from envs.ramp.episodes import RampEpisodes
from envs.ramp.features import Candidates, empty_candidates, encode, make_memo
from envs.ramp.history import NUM_HISTORY, write_history
from envs.ramp.jobs import RampJobs, RampTables, ramp_tables, read_jobs
from envs.ramp.state import RampState, exact_state, moment_at, past
from planner.simulate.compiled import compiled
from policies.fitting import LabelConfig, Labels, MadeLabels
from policies.futures import LawFutures
from policies.ramp.lookahead import constant_base
from policies.ramp.rollouts import Base, Room, base_action, make_room, rollout_costs
from policies.scorer import Scorer, decide, no_scorer

__all__ = ["ReplayWorld", "draw_labels", "draw_law", "histories"]

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Index = NDArray[np.int64]

#: Streams, and jobs in each, by which the first base is chosen.
_CHOSEN_BY = (4, 250)


def draw_law(other_laws: float, generator: np.random.Generator) -> ArrivalLaw:
    """Draw one of the benchmark's laws, or another one.

    Other laws have deadlines of any skewness, between half and one and a half of the
    benchmark's load, and fixed, Poisson or bursty arrivals.

    Args:
        other_laws: Share of other laws.
        generator: Generator to draw with.
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
    """Compute features of the streams so far. Shape [b, NUM_HISTORY]."""
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
        """Choose the best constant of each episode's law, for lack of a scorer."""
        for row, source in enumerate(self.sources):
            interval_s = source.law.interval_s
            futures = source.draw(
                past(episodes, row), interval_s, _CHOSEN_BY, self.generator
            )
            action = constant_base(self.tables, futures, state.jct_s[row], interval_s)
            self.constants.append(Base(action, no_scorer()))

    def standing(self, state: RampState) -> Index:
        """Return the actions of the constants. Shape [b]."""
        actions = np.zeros(len(self.constants), dtype=np.int64)
        for row in np.flatnonzero(~state.over).tolist():
            actions[row], _ = base_action(
                self.tables,
                moment_at(state, row),
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
        """Return the costs of one decision's candidates, and their variances."""
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
            moment_at(state, row),
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
    horizon_s: float = 1e6,
) -> Labels:
    """Play episodes side by side, and label a part of their decisions.

    Args:
        jobs: Jobs that may arrive.
        actor: Decides, so that labelled states are those that the fitted scorer will
            reach. None for the best constant degree of each law.
        base: Decides in rollouts. None for the best constant degree of each law.
        config: Settings of labelling.
        episodes: Number of episodes.
        seed: Seed of everything that is drawn.
        horizon_s: End of the episodes.
    Returns:
        Labels in the order in which they were made; decisions with a single candidate
        have none.
    """
    generator = np.random.default_rng(seed)
    tables, names = ramp_tables(jobs), tuple(jobs.jobs)
    laws = [draw_law(config.other_laws, generator) for _ in range(episodes)]
    sources = [LawFutures(law, names, int(generator.integers(2**31))) for law in laws]
    drawn = [law.draw(names, horizon_s, generator) for law in laws]
    many = RampEpisodes(jobs, drawn, horizon_s, tables)
    interval_s = np.array([law.interval_s for law in laws])
    labeller = _Labeller(tables, sources, base, config, generator)
    memo, made = make_memo(), MadeLabels()
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
            costs, variances = labeller.label(many, state, found, row)
            features, possible = found.features[row], found.possible[row]
            made.add(features, seen[row], possible, costs, variances)
        anything = _any_of(found.possible, generator)
        explored = generator.random(episodes) < config.explored
        many.decide(np.where(explored, anything, actions) - 1)
    return made.labels()


def _any_of(possible: Flags, generator: np.random.Generator) -> Index:
    """Draw a possible candidate of each decision, with equal chances. Shape [b]."""
    drawn = generator.random(possible.shape)
    best: Index = np.where(possible, drawn, -1.0).argmax(axis=1)
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayWorld:
    """The replay as a source of labels.

    Attributes:
        profiles: Folder of the jobs' profiles; by default that of MESHWRIGHT_DATA.
        models: Names of the profiles that may arrive.
        horizon_s: End of the episodes.
    """

    profiles: str | None
    models: tuple[str, ...]
    horizon_s: float

    def draw_labels(
        self,
        actor: Scorer | None,
        base: Scorer | None,
        config: LabelConfig,
        episodes: int,
        seed: int | Sequence[int],
    ) -> Labels:
        """Label decisions; see :class:`policies.fitting.LabelWorld`."""
        jobs = read_jobs(self.profiles, self.models)
        return draw_labels(jobs, actor, base, config, episodes, seed, self.horizon_s)
