"""The rollout planner of the job stream on any cluster: one-step Monte-Carlo lookahead.

Source: Bertsekas and Castanon 1999, "Rollout algorithms for stochastic scheduling
problems".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from envs.ramp.state import Past
from envs.stream.arrivals import StreamLaw
from envs.stream.env import JobStreamEnv
from envs.stream.events import Stream
from envs.stream.session import StreamSession
from envs.stream.state import StreamState
from planner.errors import StrategyError
from policies.baselines import Flags, Index, Observation
from policies.futures import FutureSource, LawFutures, SeenFutures
from policies.scorer import (
    Scorer,
    candidates_of,
    check_scorer,
    combined,
    scores,
    shortlist,
)
from policies.stream.rollouts import StreamBase, follow, rule, stream_room

__all__ = ["StreamRolloutPolicy", "costs_of", "draw_stream", "rewards_after"]

Array = NDArray[np.float64]

#: Expected rewards that differ by less count as equal.
_EQUAL = 1e-9
#: Standard errors by which another action must be better than the base's own. Source:
#: 1,110 decisions at loads .5 to 1.5 of seeds 5100 to 5102, evaluated on 192 other
#: futures: 0 loses more than it wins at load .5, 2 wins less from load 1 on.
_SURE = 1.0
#: As in policies.scorer, for scorers of this world. Source: 115 decisions at loads .5
#: to 1 of seeds 5100 to 5102, evaluated on 176 other futures: on candidates within .3
#: of the best, a scorer after two rounds of training had an error of variance .0017 to
#: .0036. With ten times as much doubt, 16 futures made decisions worse at loads .5 and
#: .75.
_FAR, _DOUBT = 0.25, 0.002
#: Variance added to that of a stream's cost: where jobs are seldom blocked, a few
#: streams may show no difference at all by chance.
_UNSEEN = 0.1
#: Number of candidates for which the number of futures is set.
_USUAL = 4


class StreamRolloutPolicy:
    """Takes the action after which a base policy earns the most.

    The base is a rule or a scorer. The rule takes the first possible candidate of at
    least some degree (the smallest degree, packed on the fewest hosts), and waits where
    it can. Each action is followed by the same sampled futures in the exact world.
    Another action than the rule's is taken only if it is better by more than chance.
    With a scorer, its estimates are combined with those of rollouts, weighted by
    variances, and the fewer candidates are close, the more futures each gets. The
    policy belongs to one environment, whose exact state it reads; with a rule it
    ignores observations.

    Args:
        env: The environment to decide in.
        base: Least degree of the rule, or a scorer.
        futures: Streams for a decision; with a scorer, for four close candidates.
        arrivals: Jobs in each stream.
        law: Law that futures are drawn from; None for the jobs seen so far, mixed with
            any (see :class:`policies.futures.SeenFutures`).
        prior: Prior of SeenFutures.
        seed: Seed of everything that is drawn.

    Raises:
        StrategyError: If a number is not positive, or a scorer is for other
            observations.
        UnknownNameError: If the law has a model that is no job.
    """

    def __init__(
        self,
        env: JobStreamEnv,
        *,
        base: int | Scorer = 1,
        futures: int = 24,
        arrivals: int = 16,
        law: StreamLaw | None = None,
        prior: float = 20.0,
        seed: int = 0,
    ) -> None:
        least = base if isinstance(base, int) else 1
        if min(least, futures, arrivals) < 1:
            raise StrategyError(
                f"base={least}, futures={futures} and arrivals={arrivals} are at "
                f"least 1"
            )
        self.env, self._shape = env, (futures, arrivals)
        self._scorer: Scorer | None = None
        self._base = rule(least)
        if isinstance(base, Scorer):
            self._scorer = check_scorer(base, self._base.scorer.first.shape[0])
            self._base = StreamBase(least, self._scorer)
        self._generator = np.random.default_rng(seed)
        names = env.session.names
        self._sizes = (1.0,) if law is None else law.sizes
        self.source: FutureSource = SeenFutures(len(names), prior)
        if law is not None:
            interval_s = law.mean_interval_s(names, env.tables)
            self.source = LawFutures(law.arrival_law(interval_s), names, seed)

    def predict(self, obs: Observation, action_masks: Flags) -> Index:
        """Decide; see :class:`policies.baselines.Policy`.

        Raises:
            StrategyError: If there are masks of several decisions.
        """
        mask = np.asarray(action_masks, dtype=np.bool_)
        if mask.ndim != 1:
            raise StrategyError(
                f"masks of shape {mask.shape}; a planner decides for the one "
                f"environment that it was made for"
            )
        allowed = np.flatnonzero(mask)
        if len(allowed) == 1:
            return np.asarray(allowed[0], dtype=np.int64)
        if self._scorer is not None:
            return self._weigh(obs, mask, self._scorer)
        rewards = self._follow(mask)
        allowed = np.flatnonzero(np.isfinite(rewards[0]))
        standing = self._standing(allowed)
        better = rewards[:, allowed]
        better -= better[:, allowed == standing]
        chance = better.std(axis=0, ddof=min(1, len(better) - 1)) / len(better) ** 0.5
        gains = better.mean(axis=0) - _SURE * chance
        best = int(gains.argmax())
        chosen = allowed[best] if gains[best] > _EQUAL else standing
        return np.asarray(chosen, dtype=np.int64)

    def _standing(self, allowed: Index) -> int:
        """Return the rule's action: the first candidate of its degree, else of any."""
        degrees = self.env.tables.degrees
        candidates = allowed[(allowed > 0) & (allowed <= len(degrees))]
        if not len(candidates):
            return int(allowed[-1])
        enough = degrees[candidates - 1] >= self._base.least
        return int(candidates[enough.argmax()])

    def values(self) -> Array:
        """Return the expected reward after each action. Shape [actions]."""
        actions = int(self.env.session.observer.action_space.n)
        every = np.ones(actions, dtype=np.bool_)
        return np.asarray(self._follow(every).mean(axis=0))

    def _weigh(self, obs: Observation, mask: Flags, scorer: Scorer) -> Index:
        """Weigh the scorer's estimate and that of rollouts by their variances."""
        one = {name: np.asarray(part)[None] for name, part in obs.items()}
        believed = scores(scorer, *candidates_of(scorer, one, mask[None]))[0]
        close = shortlist(believed, _FAR)
        if close.sum() == 1:
            return np.asarray(believed.argmin(), dtype=np.int64)
        streams = max(self._shape[0] * _USUAL // int(close.sum()), 1)
        costs, variances = costs_of(self._follow(close, streams))
        variances += _UNSEEN / streams
        found = np.full(len(mask), np.inf)
        found[close] = combined(believed[close], costs[close], variances[close], _DOUBT)
        return np.asarray(found.argmin(), dtype=np.int64)

    def _follow(self, wanted: Flags, streams: int | None = None) -> Array:
        """Return the rewards of some actions in each stream. Shape [m, actions]."""
        env, state = self.env, self.env.exact_state()
        count, length = streams or self._shape[0], self._shape[1]
        future = draw_stream(
            self.source,
            env.past(),
            float(state.clock[2]),
            (count, length),
            self._sizes,
            self._generator,
        )
        return rewards_after(env.session, state, future, self._base, wanted, count)


def draw_stream(
    source: FutureSource,
    past: Past,
    interval_s: float,
    shape: tuple[int, int],
    sizes: Sequence[float],
    generator: np.random.Generator,
) -> Stream:
    """Draw futures one after the other, with times in seconds from now.

    Args:
        source: Source of futures.
        past: Jobs seen so far.
        interval_s: Mean time between arrivals.
        shape: Number of streams, and of jobs in each.
        sizes: Sizes of jobs, drawn with equal chances.
        generator: Generator to draw with.
    Returns:
        Jobs of shape [streams x jobs].
    """
    drawn = source.draw(past, interval_s, shape, generator)
    return Stream(
        time_s=np.cumsum(drawn.gap_s, axis=1).reshape(-1),
        model=drawn.model.reshape(-1).astype(np.int64),
        beta=drawn.beta.reshape(-1),
        size=generator.choice(np.array(sizes), drawn.model.size),
    )


def rewards_after(
    session: StreamSession,
    state: StreamState,
    future: Stream,
    base: StreamBase,
    wanted: Flags,
    streams: int,
) -> Array:
    """Compute rewards after each action, each followed by the same futures.

    Args:
        session: Has the world and its rewards.
        state: State before the decision.
        future: Streams from :func:`draw_stream`.
        base: Base policy.
        wanted: Actions to be followed. Shape [a].
        streams: Number of streams.
    Returns:
        Minus infinity for actions that are not wanted or not possible. Shape
        [streams, a].
    """
    out = np.zeros((streams, len(wanted)))
    out[:, ~wanted] = -np.inf
    room = stream_room(session.tables, state, base, len(wanted))
    follow(session.tables, state, future, session.rewards, base, room, out)
    return out


def costs_of(rewards: Array) -> tuple[Array, Array]:
    """Convert rewards to jobs blocked, with the variances of their differences.

    A blocked job costs a reward of 2: 1 is not earned, and 1 is paid.

    Args:
        rewards: Shape [streams, a].
    Returns:
        Costs, infinite where rewards are not finite; and variances of the costs
        relative to the mean of the finite ones in each stream. Shapes [a].
    """
    costs, variances = np.full((2, rewards.shape[1]), np.inf)
    followed = np.isfinite(rewards[0])
    blocked = -rewards[:, followed] / 2.0
    costs[followed] = blocked.mean(axis=0)
    apart = blocked - blocked.mean(axis=1, keepdims=True)
    streams = len(rewards)
    variances[followed] = apart.var(axis=0, ddof=min(1, streams - 1)) / streams
    return costs, variances
