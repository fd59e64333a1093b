"""Observations of the job stream, as a flat Dict of arrays, and masks."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.ramp.history import NUM_HISTORY, write_history
from envs.stream.decisions import Options
from envs.stream.features import (
    LONGEST,
    NUM_CANDIDATE_FEATURES,
    NUM_DEVICE_FEATURES,
    write_candidates,
    write_devices,
)
from envs.stream.state import StreamState
from envs.stream.tables import StreamTables
from planner.simulate.compiled import compiled, inner

__all__ = ["JOB_FEATURES", "NUM_SHARED", "StreamObserver", "can_wait", "write_shared"]

Flags = NDArray[np.bool_]
Floats = NDArray[np.float32]

#: Features of the job at the head: the time left to its deadline over its time on one
#: reference device (its beta, if it has not waited), the same in mean intervals, its
#: time on one device in mean intervals, its work over the largest usual one, its
#: waiting time, the share of the queue behind it, and the free places in the queue:
#: with a queue, leaving room on the cluster matters less.
JOB_FEATURES = ("beta", "deadline", "sequential", "demand", "waited", "queue", "places")
#: Features that all candidates of a decision share.
NUM_SHARED = NUM_HISTORY + len(JOB_FEATURES)

#: Cap of the number of free places in the queue.
_MOST_PLACES = 8


@inner
def _capped(seconds: float, interval_s: float) -> float:
    return min(seconds / interval_s, LONGEST) / LONGEST


@compiled
def write_shared(tables: StreamTables, state: StreamState, out: Floats) -> None:
    """Write the features that all candidates share: the stream so far, then the job.

    Args:
        tables: Tables of jobs and network.
        state: State with a head.
        out: Filled in. Shape [NUM_SHARED].
    """
    now, horizon, interval = state.clock[0], state.clock[1], state.clock[2]
    write_history(state.seen, max(horizon - now, 0.0) / interval, out[:NUM_HISTORY])
    waiting, job = state.waiting, out[NUM_HISTORY:]
    work = waiting.size[0] * tables.sequential_jct_s[waiting.model[0]]
    left = max(waiting.due_s[0] - now, 0.0)
    job[0] = min(left / work, 1.0)
    job[1] = _capped(left, interval)
    job[2] = _capped(work, interval)
    job[3] = min(work / tables.sequential_jct_s.max(), 1.0)
    job[4] = _capped(now - waiting.arrived_s[0], interval)
    places = len(waiting.model)
    job[5] = (state.counts[0] - 1) / places
    job[6] = min(places - state.counts[0], _MOST_PLACES) / _MOST_PLACES


@compiled
def can_wait(tables: StreamTables, state: StreamState) -> bool:
    """Return True if the head could start at a running job's end and be in time."""
    fastest = state.waiting.size[0] * tables.fastest_s[state.waiting.model[0]]
    ending = np.inf
    for slot in range(len(state.running)):
        if state.running[slot]:
            ending = min(ending, state.ends_s[slot])
    return bool(ending + fastest <= state.waiting.due_s[0])


class StreamObserver:
    """Turns the state before a decision into an observation and a mask.

    Args:
        tables: Tables of jobs and network.
        observe: Whether observations are encoded in full; else they have ``job`` and
            ``job_graph`` alone, enough for baselines.
        max_waiting: Places in the queue; with 0 there is no action to wait.
    """

    def __init__(
        self, tables: StreamTables, *, observe: bool = True, max_waiting: int = 0
    ) -> None:
        self.tables, self.observe, self.max_waiting = tables, observe, max_waiting
        actions = 1 + len(tables.degrees) + (max_waiting > 0)
        devices = len(tables.host_of_device)
        self.action_space = spaces.Discrete(actions)
        most = float(max(len(tables.steps) - 1, 1))
        parts: dict[str, spaces.Space[Any]] = {
            "job_graph": _box((1,), most),
            "job": _box((len(JOB_FEATURES),), 1.0),
        }
        if observe:
            parts |= {
                "devices": _box((devices, NUM_DEVICE_FEATURES), 1.0),
                "candidates": _box((actions, NUM_CANDIDATE_FEATURES), 1.0),
                "candidate_devices": _box((actions, devices), 1.0),
                "history": _box((NUM_HISTORY,), 1.0),
            }
        self.observation_space = spaces.Dict(parts)

    def see(
        self, state: StreamState, options: Options
    ) -> tuple[dict[str, Floats], Flags]:
        """Return observation and mask, in new arrays.

        After the end of an episode they are zeros, and only turning away is allowed.

        Args:
            state: State before the decision.
            options: Candidates of the decision.
        Returns:
            An observation of :attr:`observation_space`; and the actions that are
            allowed, shape [actions]: turning away, possible candidates, and waiting if
            the job can wait for a running one to end.
        """
        mask = np.zeros(int(self.action_space.n), dtype=np.bool_)
        mask[0] = True
        obs = {
            name: np.zeros(space.shape or (), dtype=np.float32)
            for name, space in self.observation_space.spaces.items()
        }
        if state.counts[3]:
            return obs, mask
        count = len(self.tables.degrees)
        mask[1 : 1 + count] = options.possible
        if self.max_waiting:
            mask[1 + count] = can_wait(self.tables, state)
        obs["job_graph"][0] = state.waiting.model[0]
        shared = np.zeros(NUM_SHARED, dtype=np.float32)
        write_shared(self.tables, state, shared)
        obs["job"][:] = shared[NUM_HISTORY:]
        if self.observe:
            obs["history"][:] = shared[:NUM_HISTORY]
            write_candidates(self.tables, state, options, obs["candidates"])
            write_devices(
                self.tables, state, options, obs["devices"], obs["candidate_devices"]
            )
        return obs, mask


def _box(shape: tuple[int, ...], high: float) -> spaces.Box:
    return spaces.Box(0.0, high, shape, np.float32)
