"""The rollout planner of the job stream on any cluster: one-step Monte-Carlo lookahead.

Source: Bertsekas and Castanon 1999, "Rollout algorithms for stochastic scheduling
problems".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.stream.arrivals import StreamLaw
from envs.stream.env import JobStreamEnv
from envs.stream.events import Stream
from planner.errors import StrategyError
from policies.baselines import Flags, Index, Observation
from policies.futures import FutureSource, LawFutures, SeenFutures
from policies.stream_rollouts import follow, stream_room

__all__ = ["StreamRolloutPolicy"]

Array = NDArray[np.float64]

#: Expected rewards that differ by less are equal; the earlier action then stands, but
#: for turning away, which only a better one does not beat.
_EQUAL = 1e-9


class StreamRolloutPolicy:
    """Takes the action after which a simple rule earns the most.

    The rule takes the first possible candidate from a degree on (the smallest degree,
    packed on the fewest hosts), and waits where it can. Each action is followed by the
    same sampled futures in the exact world. The policy belongs to one environment,
    whose exact state it asks for; of observations and masks it uses the masks.

    Args:
        env: The environment that is decided for.
        least: Degree from which on the rule looks.
        futures: Streams a decision.
        arrivals: Jobs of each.
        law: That the futures are drawn from; None for what was seen so far, mixed with
            anything (see :class:`policies.futures.SeenFutures`).
        prior: Of SeenFutures.
        seed: Of what is drawn.

    Raises:
        StrategyError: If a number is not positive.
        UnknownNameError: If the law has a model that is no job.
    """

    def __init__(
        self,
        env: JobStreamEnv,
        *,
        least: int = 1,
        futures: int = 24,
        arrivals: int = 16,
        law: StreamLaw | None = None,
        prior: float = 20.0,
        seed: int = 0,
    ) -> None:
        if min(least, futures, arrivals) < 1:
            raise StrategyError(
                f"least={least}, futures={futures} and arrivals={arrivals} are at "
                f"least 1"
            )
        self.env, self._least, self._shape = env, least, (futures, arrivals)
        self._generator = np.random.default_rng(seed)
        names = env.session.names
        self._sizes = np.array([1.0] if law is None else law.sizes)
        self.source: FutureSource = SeenFutures(len(names), prior)
        if law is not None:
            interval_s = law.mean_interval_s(names, env.tables)
            self.source = LawFutures(law.arrival_law(interval_s), names, seed)

    def predict(self, obs: Observation, action_masks: Flags) -> Index:
        """Decide; see :class:`policies.baselines.Policy`.

        Raises:
            StrategyError: If the mask is not of one decision.
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
        values = np.where(mask, self.values(), -np.inf)
        best = int(allowed[1])
        for action in allowed.tolist():
            if values[action] > values[best] + _EQUAL:
                best = action
        return np.asarray(best, dtype=np.int64)

    def values(self) -> Array:
        """Expected reward after each action until the futures end. Shape [actions]."""
        env, state = self.env, self.env.exact_state()
        interval_s = float(state.clock[2])
        drawn = self.source.draw(env.past(), interval_s, self._shape, self._generator)
        future = Stream(
            time_s=np.cumsum(drawn.gap_s, axis=1).reshape(-1),
            model=drawn.model.reshape(-1).astype(np.int64),
            beta=drawn.beta.reshape(-1),
            size=self._generator.choice(self._sizes, drawn.model.size),
        )
        out = np.zeros((self._shape[0], int(env.session.observer.action_space.n)))
        room = stream_room(env.tables, state)
        follow(env.tables, state, future, env.session.rewards, self._least, room, out)
        return np.asarray(out.mean(axis=0))
