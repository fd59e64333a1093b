"""Label decisions in the job stream on any cluster.

The first rollouts use the rule of :mod:`policies.stream.rollouts`: the smallest degree
that meets the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envs.stream.arrivals import StreamLaw
from envs.stream.decisions import decide, list_options
from envs.stream.events import proceed
from envs.stream.features import NUM_CANDIDATE_FEATURES, write_candidates
from envs.stream.observation import NUM_SHARED, can_wait, write_shared
from envs.stream.session import StreamSession
from planner.errors import StrategyError
from policies.fitting import LabelConfig, Labels, MadeLabels
from policies.futures import LawFutures
from policies.scorer import Scorer
from policies.stream.lookahead import costs_of, draw_stream, rewards_after
from policies.stream.rollouts import StreamBase, base_action, rule, stream_room
from policies.stream.worlds import StreamWorld, draw_stream_law

__all__ = ["StreamWorlds"]

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamWorlds:
    """Worlds as a source of labels; one of them is drawn for each episode.

    Attributes:
        worlds: Drawn with equal chances.
        intervals: Length of an episode in mean times between arrivals.
    """

    worlds: tuple[StreamWorld, ...]
    intervals: float = 400.0

    def __post_init__(self) -> None:
        if not self.worlds or not 0.0 < self.intervals < np.inf:
            raise StrategyError(
                f"{len(self.worlds)} worlds of intervals={self.intervals}; give at "
                f"least one world, and a positive number of intervals"
            )

    def draw_labels(
        self,
        actor: Scorer | None,
        base: Scorer | None,
        config: LabelConfig,
        episodes: int,
        seed: int | Sequence[int],
    ) -> Labels:
        """Label decisions; see :class:`policies.fitting.LabelWorld`."""
        generator = np.random.default_rng(seed)
        most = max(
            int(world.session().observer.action_space.n) for world in self.worlds
        )
        made = MadeLabels()
        for _ in range(episodes):
            world = self.worlds[int(generator.integers(len(self.worlds)))]
            law = draw_stream_law(generator)
            session = world.session()
            interval_s = law.mean_interval_s(session.names, session.tables)
            horizon_s = self.intervals * interval_s
            arrivals = law.draw(session.names, interval_s, horizon_s, generator)
            session.start(arrivals, horizon_s, interval_s)
            episode = _Episode(session, law, _base(actor), _base(base), generator)
            episode.play(config, most, made)
        return made.labels()


def _base(scorer: Scorer | None) -> StreamBase:
    return rule(1) if scorer is None else StreamBase(1, scorer)


class _Episode:
    """An episode, some of whose decisions are labelled.

    Args:
        session: Session at the first decision.
        law: Law of the arrivals, which rollouts draw futures from.
        actor: Decides.
        base: Decides in rollouts.
        generator: Generator to draw with.
    """

    def __init__(
        self,
        session: StreamSession,
        law: StreamLaw,
        actor: StreamBase,
        base: StreamBase,
        generator: np.random.Generator,
    ) -> None:
        self.session, self.law = session, law
        self.actor, self.base, self.generator = actor, base, generator
        self.actions = int(session.observer.action_space.n)
        self.room = stream_room(session.tables, session.state, actor, self.actions)
        interval_s = float(session.state.clock[2])
        arrival_law = law.arrival_law(interval_s)
        self.source = LawFutures(
            arrival_law, session.names, int(generator.integers(2**31))
        )

    def play(self, config: LabelConfig, most: int, made: MadeLabels) -> None:
        """Play to the end.

        Args:
            config: Settings of labelling.
            most: Largest number of actions in any world.
            made: Gets the labels.
        """
        tables, rewards = self.session.tables, self.session.rewards
        state, stream = self.session.state, self.session.stream
        features = np.zeros((most, NUM_CANDIDATE_FEATURES), dtype=np.float32)
        shared = np.zeros(NUM_SHARED, dtype=np.float32)
        room = self.room._replace(state=state)
        while not state.counts[3]:
            list_options(tables, state, room.options, 0)
            mask = self._mask()
            worth = mask.sum() > 1
            if worth and self.generator.random() < config.labelled:
                write_candidates(tables, state, room.options, features[: self.actions])
                write_shared(tables, state, shared)
                costs, variances = self._costs(mask, config)
                possible, wide, spread = np.zeros((3, most))
                possible[: self.actions] = mask
                wide[: self.actions], spread[: self.actions] = costs, variances
                made.add(features, shared, possible > 0, wide, spread)
            if worth and self.generator.random() < config.explored:
                action = int(self.generator.choice(np.flatnonzero(mask)))
            else:
                action = base_action(tables, self.actor, room)
            decide(tables, state, room.options, rewards, action)
            proceed(tables, state, stream, rewards)

    def _mask(self) -> Flags:
        """Return the actions that are allowed."""
        possible = self.room.options.possible
        mask = np.ones(self.actions, dtype=np.bool_)
        mask[1 : 1 + len(possible)] = possible
        if self.actions > 1 + len(possible):
            mask[-1] = can_wait(self.session.tables, self.session.state)
        return mask

    def _costs(self, mask: Flags, config: LabelConfig) -> tuple[Array, Array]:
        shape = (config.futures, config.arrivals)
        state = self.session.state
        future = draw_stream(
            self.source,
            self.session.past(),
            float(state.clock[2]),
            shape,
            self.law.sizes,
            self.generator,
        )
        return costs_of(
            rewards_after(self.session, state, future, self.base, mask, shape[0])
        )
