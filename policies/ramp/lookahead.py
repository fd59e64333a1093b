"""The rollout planner: one-step Monte-Carlo lookahead on a base policy.

Source: Bertsekas and Castanon 1999, "Rollout algorithms for stochastic scheduling
problems".
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from envs.ramp.arrivals import ArrivalLaw
from envs.ramp.features import Candidates, empty_candidates, encode
from envs.ramp.history import NUM_HISTORY, NUM_SEEN, write_history
from envs.ramp.jobs import RampTables
from envs.ramp.state import Moment, Past, RampState, moment_at
from planner.errors import StrategyError
from policies.baselines import Constant, Flags, Index, Observation
from policies.futures import Futures, FutureSource, LawFutures, SeenFutures
from policies.ramp.rollouts import Base, base_action, make_room, rollout_costs
from policies.scorer import Scorer, check_scorer, combined, no_scorer, scores, shortlist

__all__ = ["ExactWorld", "RolloutPolicy", "constant_base"]

Array = NDArray[np.float64]

#: Costs that differ by less count as equal; the base's own action is then taken.
_EQUAL = 1e-9
#: How much more than the best a smaller base degree may block: rollouts improve more
#: on small blocks. On law B the best constant is 16 (.259 blocked), the better base 8
#: (.250 after rollouts, 16: .264; 4 episodes). Source: measured here.
_NEARLY = 1.15
#: Jobs after which the base degree is chosen again; streams and jobs for the choice.
_CHOSEN_EVERY, _CHOSEN_BY = 50, (4, 250)


class ExactWorld(Protocol):
    """An environment with an exact state: RampReplayEnv or RampVecEnv."""

    @property
    def tables(self) -> RampTables:
        """Jobs and topology."""
        ...

    def exact_state(self) -> RampState:
        """Return the state before the next decisions."""
        ...

    def past(self, row: int) -> Past:
        """Return the jobs of a row that have been decided."""
        ...


class RolloutPolicy:
    """Takes the candidate after which a base policy blocks the fewest jobs.

    Each candidate is followed by the same sampled futures, in the exact world. The
    policy belongs to one environment, whose exact state it reads at every decision; it
    ignores observations.

    Args:
        world: The environment to decide in.
        base: Decides in rollouts: a degree; a scorer; or None for the smallest
            constant degree that blocks nearly least of the expected arrivals.
        futures: Streams for a decision.
        arrivals: Jobs in each stream.
        law: Law that futures are drawn from; None for the jobs seen so far, mixed with
            any (see SeenFutures).
        models: Names of the jobs in the world's order, for a law over some of them.
        prior: Prior of SeenFutures.
        seed: Seed of everything that is drawn.

    Raises:
        StrategyError: If a number is not positive, or the base is no degree.
        UnknownNameError: If the law has a model that is no job.
    """

    def __init__(
        self,
        world: ExactWorld,
        *,
        base: int | Scorer | None = None,
        futures: int = 40,
        arrivals: int = 16,
        law: ArrivalLaw | None = None,
        models: tuple[str, ...] = (),
        prior: float = 20.0,
        seed: int = 0,
    ) -> None:
        if futures < 1 or arrivals < 1:
            raise StrategyError(
                f"futures={futures} of arrivals={arrivals}; both are at least 1"
            )
        self.world, self.tables = world, world.tables
        count = len(self.tables.sequential_jct_s)
        names = models or tuple(str(number) for number in range(count))
        self.source: FutureSource = (
            SeenFutures(count, prior) if law is None else LawFutures(law, names, seed)
        )
        self._shape = (futures, arrivals)
        self._generator = np.random.default_rng(seed)
        scorer = no_scorer()
        self._degree: int | None = None
        if isinstance(base, Scorer):
            scorer, self._degree = check_scorer(base), 0
        elif base is not None:
            degree = Constant(self.tables, base).degree
            self._degree = 1 + self.tables.degrees.tolist().index(degree)
        self._scorer, self._scored = scorer, len(scorer.first_bias) > 0
        self._room = make_room(self.tables, scorer)
        self._chosen: dict[int, tuple[int, int]] = {}

    def predict(self, obs: Observation, action_masks: Flags) -> Index:
        """Decide for every row of the environment; see Policy.

        Raises:
            StrategyError: If the masks have another number of rows.
        """
        masks = np.asarray(action_masks, dtype=np.bool_)
        state = self.world.exact_state()
        rows = masks.reshape(-1, masks.shape[-1])
        if len(rows) != len(state.over):
            raise StrategyError(
                f"masks of {len(rows)} decisions for {len(state.over)} episodes; a "
                f"planner decides for the environment that it was made for"
            )
        actions = [
            0 if state.over[row] else self._decide(state, row, mask)
            for row, mask in enumerate(rows)
        ]
        return np.array(actions, dtype=np.int64).reshape(masks.shape[:-1])

    def costs(self, row: int = 0) -> Array:
        """Return the jobs expected to be blocked after each candidate.

        Infinite if it is not possible. Shape [actions].
        """
        state = self.world.exact_state()
        every = np.ones(1 + len(self.tables.degrees), dtype=np.bool_)
        return self._roll(state, row, self._candidates(state, row, every))[0]

    def _decide(self, state: RampState, row: int, mask: Flags) -> int:
        candidates = self._candidates(state, row, mask)
        if self._scored:
            return self._decide_scored(state, row, candidates)
        costs, _ = self._roll(state, row, candidates)
        standing = self._standing(state, row)
        best = standing if np.isfinite(costs[standing]) else 0
        for action, cost in enumerate(costs.tolist()):
            if cost < costs[best] - _EQUAL:
                best = action
        return best

    def _decide_scored(self, state: RampState, row: int, candidates: Candidates) -> int:
        """Weigh the scorer's estimate and that of rollouts by their variances."""
        one = Candidates(
            possible=candidates.possible[None],
            servers=candidates.servers[None],
            jct_s=candidates.jct_s[None],
            features=candidates.features[None],
        )
        believed = scores(self._scorer, one, self._history(state, row)[None])[0]
        close = shortlist(believed)
        if close.sum() == 1:
            return int(believed.argmin())
        candidates.possible[~close] = False
        costs, variances = self._roll(state, row, candidates)
        found = np.full(len(close), np.inf)
        found[close] = combined(believed[close], costs[close], variances[close])
        return int(found.argmin())

    def _candidates(self, state: RampState, row: int, mask: Flags) -> Candidates:
        every = encode(
            self.tables,
            state,
            empty_candidates(self.tables, len(state.over)),
            self._room.memo,
            features=self._scored,
        )
        candidates = Candidates(*(part[row] for part in every))
        candidates.possible[1:] &= mask[1:]
        return candidates

    def _history(self, state: RampState, row: int) -> NDArray[np.float32]:
        history = np.zeros(NUM_HISTORY, dtype=np.float32)
        left = (state.horizon_s - state.now_s[row]) / state.interval_s[row]
        write_history(state.seen[row], left, history)
        return history

    def _roll(
        self, state: RampState, row: int, candidates: Candidates
    ) -> tuple[Array, Array]:
        """Return the costs of candidates, and the variances of their differences."""
        past = self.world.past(row)
        base = Base(self._base(state, row, past), self._scorer)
        interval_s = float(state.interval_s[row])
        futures = self.source.draw(past, interval_s, self._shape, self._generator)
        costs, variances = np.empty((2, len(candidates.possible)))
        rollout_costs(
            self.tables,
            moment_at(state, row),
            float(state.beta[row]),
            state.jct_s[row],
            state.seen[row],
            candidates,
            futures,
            base,
            self._room,
            costs,
            variances,
        )
        return costs, variances

    def _standing(self, state: RampState, row: int) -> int:
        """Return the base policy's own action."""
        model = int(state.model[row])
        base = Base(self._base(state, row, self.world.past(row)), self._scorer)
        self._room.seen[:] = state.seen[row]
        standing, _ = base_action(
            self.tables,
            moment_at(state, row),
            model,
            float(state.beta[row]),
            state.jct_s[row, model],
            base,
            self._room,
        )
        return standing

    def _base(self, state: RampState, row: int, past: Past) -> int:
        """Return the base degree's action, chosen again at intervals if not given."""
        if self._degree is not None:
            return self._degree
        due = len(past.beta) // _CHOSEN_EVERY if self.source.learns else 0
        before = self._chosen.get(row)
        # A restarted episode has seen fewer jobs than before.
        if before is None or before[0] != due:
            interval_s = float(state.interval_s[row])
            futures = self.source.draw(past, interval_s, _CHOSEN_BY, self._generator)
            chosen = constant_base(self.tables, futures, state.jct_s[row], interval_s)
            self._chosen[row] = before = (due, chosen)
        return before[1]


def constant_base(
    tables: RampTables, futures: Futures, jct_s: Array, interval_s: float
) -> int:
    """Find the smallest degree that blocks nearly least, from an empty cluster on.

    Args:
        tables: Tables of the jobs.
        futures: Streams to compare degrees on.
        jct_s: Expected completion times. Shape [j, d].
        interval_s: Mean time between arrivals.
    Returns:
        The action of that degree.
    """
    servers = tables.num_servers
    empty = Moment(
        np.zeros(servers),
        np.zeros(servers, dtype=np.uint64),
        0,
        0,
        np.uint64(0),
        0.0,
        np.inf,
        interval_s,
    )
    away = empty_candidates(tables)
    away.possible[0] = True
    seen = np.zeros(NUM_SEEN, dtype=np.float32)
    room = make_room(tables, no_scorer())
    costs = np.empty(1 + len(tables.degrees))
    blocked = []
    for action in range(1, len(costs)):
        rollout_costs(
            tables,
            empty,
            1.0,
            jct_s,
            seen,
            away,
            futures,
            Base(action, no_scorer()),
            room,
            costs,
            np.empty_like(costs),
        )
        blocked.append(costs[0])
    enough = np.array(blocked) <= _NEARLY * min(blocked)
    return 1 + int(enough.argmax())
