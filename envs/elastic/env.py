"""``meshwright/ElasticStream-v0``: elastic jobs of a trace, for gymnasium."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.elastic.record import RecordedSession
from envs.elastic.session import (
    Allocation,
    ElasticConfig,
    ElasticSession,
    Fate,
)
from planner.errors import StrategyError

__all__ = ["JOB_FEATURES", "POOL_FEATURES", "ElasticStreamEnv"]

Floats = NDArray[np.float32]
Index = NDArray[np.int64]

#: Features of a job that is in view, in their order.
JOB_FEATURES = (
    "present",
    "undecided",
    "promised",
    "late",
    "settled",
    "slack",
    "work",
    "degree",
    "asked",
    "served",
)
#: Features of a device type, in their order.
POOL_FEATURES = ("alive", "free")
#: Moves that each job has before its types and degrees.
_MOVES = ("decline", "promise", "pause")
#: Largest time to a job's end over the time until its deadline.
_MOST = 10.0


class ElasticStreamEnv(gymnasium.Env[dict[str, Any], np.int64]):
    """Decide what jobs get, one job at a time, until time is let pass.

    Action 0 lets time pass until something happens. Action 1 + slot M + move decides
    the job in a slot, of :attr:`view`: to decline it, to promise it its deadline, to
    pause it, or to run it on a type and degree, with M = 3 + types x degrees moves.
    Decisions take effect when time passes; until then a job that was declined or given
    devices is settled, and can only be promised its deadline. An action that
    :meth:`action_masks` does not allow changes nothing.

    The reward is +1 for each job that meets its deadline and -1 for each that is
    declined or misses it. The observation is a Dict of float32 arrays, which show what
    was decided at once:

    - ``jobs`` [slots, JOB_FEATURES]: times on a log scale and relative to the deadline;
    - ``options`` [slots, types x degrees]: time to the job's end on each, without a
      restart, over the time until its deadline; 10 at most, and where it cannot run;
    - ``held`` [slots, types x degrees]: 1 for what the job has;
    - ``pools`` [types, POOL_FEATURES].

    At the end ``info["summary"]`` has the fields of an ElasticSummary.

    Args:
        config: Configuration of the stream.
        slots: Jobs in view, the earliest deadlines first; late jobs come last.
        observe: Whether observations are encoded; all are 0 otherwise.
        record: Whether to keep what happens; at the end ``info["record"]`` then is a
            :class:`planner.schema.elastic.ElasticRecord`, for ``meshwright report``.

    Raises:
        StrategyError: If there is no slot; or as
            :class:`envs.elastic.session.ElasticSession`.
    """

    def __init__(
        self,
        config: ElasticConfig,
        slots: int = 64,
        observe: bool = True,
        record: bool = False,
    ) -> None:
        if slots < 1:
            raise StrategyError(f"slots={slots}; give at least one job in view")
        self.session = RecordedSession(config) if record else ElasticSession(config)
        self._observe = observe
        session = self.session
        self._kinds, self._degrees = session.rates.shape[1:3]
        self.slots = slots
        options = self._kinds * self._degrees
        self.moves = len(_MOVES) + options
        self._rates = session.rates.max(axis=3)
        self._able = self._rates > 0.0
        self._size = session.capacity.copy()
        self._actions = 1 + slots * self.moves
        self.action_space = spaces.Discrete(self._actions)
        pools = (self._kinds, len(POOL_FEATURES))
        self.observation_space: spaces.Dict = spaces.Dict(
            {
                "jobs": spaces.Box(-10.0, 10.0, (slots, len(JOB_FEATURES)), np.float32),
                "options": spaces.Box(0.0, _MOST, (slots, options), np.float32),
                "held": spaces.Box(0.0, 1.0, (slots, options), np.float32),
                "pools": spaces.Box(0.0, 1.0, pools, np.float32),
            }
        )
        self._begin()

    def action_masks(self) -> NDArray[np.bool_]:
        """Return the actions that are allowed; passing time always is. [actions]."""
        mask = np.zeros(self._actions, dtype=np.bool_)
        mask[0] = True
        count = len(self.view)
        if not count:
            return mask
        table = mask[1:].reshape(self.slots, self.moves)
        session, jobs = self.session, self.view
        undecided, here = self._undecided(), ~self._settled[jobs]
        table[:count, 0] = undecided & here
        table[:count, 1] = undecided
        table[:count, 2] = here & (self._degree[jobs] > 0)
        own = np.zeros((count, self._kinds), dtype=np.int64)
        own[np.arange(count), self._kind[jobs]] = self._degree[jobs]
        room = self._free + own
        fits = session.degrees <= room[:, :, None]
        fits &= self._able[session.config.trace.model[jobs]] & here[:, None, None]
        same = (own[:, :, None] == session.degrees) & (own[:, :, None] > 0)
        table[:count, len(_MOVES) :] = (fits & ~same).reshape(count, -1)
        return mask

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Floats], dict[str, Any]]:
        """Begin the trace anew; a seed restarts the sequence of failures."""
        super().reset(seed=seed)
        self.session.begin(self.np_random)
        self._begin()
        return self._see(), {}

    def step(
        self, action: np.int64
    ) -> tuple[dict[str, Floats], float, bool, bool, dict[str, Any]]:
        """Decide one job, or let time pass.

        Raises:
            StrategyError: If the action is out of range, or the episode has ended.
        """
        number = int(action)
        if not 0 <= number < self._actions:
            raise StrategyError(
                f"action={number} of {self._actions}; give one that "
                "action_masks() allows"
            )
        reward, info = 0.0, dict[str, Any]()
        if number:
            if self.session.over:
                raise StrategyError("the episode has ended; call reset for the next")
            self._decide(*divmod(number - 1, self.moves))
        else:
            reward = self._proceed()
            if self.session.over:
                info["summary"] = asdict(self.session.summary())
                if isinstance(self.session, RecordedSession):
                    info["record"] = self.session.record()
        return self._see(), reward, self.session.over, False, info

    def _begin(self) -> None:
        self._score = 0.0
        self._look()

    def _look(self) -> None:
        """Take the jobs into view, with nothing decided."""
        session = self.session
        here = session.alive
        due_s = session.config.trace.deadline_s[here]
        #: Jobs in view, by slot.
        self.view: Index = here[np.lexsort((due_s, session.late[here]))[: self.slots]]
        self._degree = session.degree.copy()
        self._kind = session.kind.copy()
        self._free = session.capacity - np.bincount(
            session.kind, session.degree, minlength=self._kinds
        ).astype(np.int64)
        self._promised, self._declined, self._settled = np.zeros(
            (3, len(session.fate)), dtype=np.bool_
        )

    def _undecided(self) -> NDArray[np.bool_]:
        """Return the new jobs in view that are neither promised nor declined."""
        session, jobs = self.session, self.view
        fresh = (session.fate[jobs] == Fate.WAITING) & (session.served_s[jobs] == 0.0)
        found: NDArray[np.bool_] = fresh & ~(self._promised | self._declined)[jobs]
        return found

    def _decide(self, slot: int, move: int) -> None:
        """Note a move of the job in a slot, if it is allowed."""
        if not self._allowed(slot, move):
            return
        job = int(self.view[slot])
        if move == 1:
            self._promised[job] = True
            return
        self._free[self._kind[job]] += self._degree[job]
        self._degree[job] = 0
        self._settled[job] = move != 2
        if move == 0:
            self._declined[job] = True
        elif move >= len(_MOVES):
            kind, at = divmod(move - len(_MOVES), self._degrees)
            self._kind[job], self._degree[job] = kind, self.session.degrees[at]
            self._free[kind] -= self._degree[job]

    def _allowed(self, slot: int, move: int) -> bool:
        """Return True if :meth:`action_masks` allows a move, without all its work."""
        if slot >= len(self.view):
            return False
        job, session = int(self.view[slot]), self.session
        if move != 1 and self._settled[job]:
            return False
        if move < 2:
            fresh = session.fate[job] == Fate.WAITING and session.served_s[job] == 0.0
            return bool(fresh and not (self._promised[job] or self._declined[job]))
        held, on = self._degree[job], self._kind[job]
        if move == 2:
            return bool(held > 0)
        kind, at = divmod(move - len(_MOVES), self._degrees)
        degree = session.degrees[at]
        room = self._free[kind] + (held if on == kind else 0)
        able = self._able[session.config.trace.model[job], kind, at]
        return bool(able and degree <= room and (held != degree or on != kind))

    def _proceed(self) -> float:
        """Apply what was decided, let time pass, and return the reward."""
        session, jobs = self.session, self.view
        kept = jobs[~self._declined[jobs]]
        session.apply(
            Allocation(
                jobs=kept,
                degree=self._degree[kept],
                kind=self._kind[kept],
                promised=np.flatnonzero(self._promised),
                declined=np.flatnonzero(self._declined),
            )
        )
        met = (session.fate == Fate.DONE) & ~session.late
        blocked = session.late | (session.fate == Fate.DECLINED)
        before, self._score = self._score, float(met.sum() - blocked.sum())
        self._look()
        return self._score - before

    def _see(self) -> dict[str, Floats]:
        seen: dict[str, Floats] = {
            name: np.zeros(box.shape or (), dtype=np.float32)
            for name, box in self.observation_space.items()
        }
        if not self._observe:
            return seen
        session, view, trace = self.session, self.view, self.session.config.trace
        capacity = np.maximum(self._size, 1)
        seen["pools"][:, 0] = session.capacity / capacity
        seen["pools"][:, 1] = np.clip(self._free / capacity, 0.0, 1.0)
        if not len(view):
            return seen
        slack_s = np.maximum(trace.deadline_s[view] - session.now_s, 1.0)
        rates = self._rates[trace.model[view]].reshape(len(view), -1)
        with np.errstate(divide="ignore"):
            share = session.left[view, None] / rates / slack_s[:, None]
        seen["options"][: len(view)] = np.minimum(share, _MOST)
        runs = self._degree[view] > 0
        at = self._kind[view] * self._degrees
        at += np.searchsorted(session.degrees, self._degree[view])
        seen["held"][np.flatnonzero(runs), at[runs]] = 1.0
        promised = session.fate[view] == Fate.PROMISED
        columns = (
            np.ones(len(view)),
            self._undecided(),
            promised | self._promised[view],
            session.late[view],
            self._settled[view],
            np.log10(slack_s),
            share.min(axis=1),
            np.log2(self._degree[view] + 1.0),
            np.log2(trace.gpus[view] + 1.0),
            np.log10(session.served_s[view] + 1.0),
        )
        seen["jobs"][: len(view)] = np.clip(np.column_stack(columns), -10.0, 10.0)
        return seen
