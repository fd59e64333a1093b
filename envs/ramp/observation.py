"""Observations of the job stream, as a flat Dict of arrays."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.ramp.features import (
    NUM_FEATURES,
    OFFSETS,
    Candidates,
    empty_candidates,
    encode,
    make_memo,
)
from envs.ramp.history import NUM_HISTORY, write_history
from envs.ramp.jobs import RampTables
from envs.ramp.state import RampState, moment_of
from planner.errors import UnknownNameError
from planner.simulate.compiled import compiled

__all__ = ["JOB_FEATURES", "MASKS", "NUM_DEVICE_FEATURES", "MaskKind", "RampObserver"]

Flags = NDArray[np.bool_]
Floats = NDArray[np.float32]

#: Actions that a mask allows besides turning away: those of the benchmark's own mask,
#: which does not look for a free block, or those that would meet the deadline.
MaskKind = Literal["benchmark", "possible"]
MASKS: tuple[MaskKind, ...] = ("benchmark", "possible")

#: Features of the job at the head: its beta; its deadline and its time on one device in
#: mean intervals, capped at 40, over 40; its demand in bytes over the largest.
JOB_FEATURES = ("beta", "deadline", "sequential", "demand")
#: Features of a server: free now and at each of the OFFSETS; time until it is free,
#: capped at 40 intervals.
NUM_DEVICE_FEATURES = 1 + len(OFFSETS) + 1

#: Cap of times, in mean intervals.
_LONGEST = 40.0
#: Ends of jobs and times this close count as equal, as in RampWorld.
_SAME_TIME_S = 1e-7


@compiled
def _observe(
    tables: RampTables,
    state: RampState,
    servers: NDArray[np.uint64],
    devices: Floats,
    candidate_devices: Floats,
    history: Floats,
) -> None:
    """Fill in the observation of servers and history; zeros after the end."""
    one = np.uint64(1)
    for row in range(len(state.over)):
        if state.over[row]:
            continue
        moment = moment_of(state, row)
        devices[row, :, :-1] = 1.0
        for job in range(moment.number):
            left = (moment.ends_s[job] - moment.now_s) / moment.interval_s
            for server in range(tables.num_servers):
                if (moment.masks[job] >> np.uint64(server)) & one == 0:
                    continue
                devices[row, server, 0] = 0.0
                devices[row, server, -1] = min(left, _LONGEST) / _LONGEST
                for offset in range(len(OFFSETS)):
                    at_s = moment.now_s + OFFSETS[offset] * moment.interval_s
                    if moment.ends_s[job] > at_s + _SAME_TIME_S:
                        devices[row, server, 1 + offset] = 0.0
        for choice in range(servers.shape[1]):
            for server in range(tables.num_servers):
                held = (servers[row, choice] >> np.uint64(server)) & one
                candidate_devices[row, choice, server] = held
        left = (moment.horizon_s - moment.now_s) / moment.interval_s
        write_history(state.seen[row], left, history[row])


class RampObserver:
    """Turns states of episodes into observations and masks.

    Args:
        tables: Tables of the jobs.
        observe: Whether observations are encoded in full; else they have ``job`` and
            ``job_graph`` alone, enough for baselines and planners.
        mask: Actions that are allowed.

    Raises:
        UnknownNameError: If there is no such mask.
    """

    def __init__(
        self, tables: RampTables, *, observe: bool = True, mask: MaskKind = "possible"
    ) -> None:
        if mask not in MASKS:
            raise UnknownNameError("mask", mask, MASKS)
        self.tables, self.observe, self.mask = tables, observe, mask
        self._memo = make_memo()
        choices, servers = 1 + len(tables.degrees), tables.num_servers
        self.action_space = spaces.Discrete(choices)
        most = float(max(len(tables.sequential_jct_s) - 1, 1))
        parts: dict[str, spaces.Space[Any]] = {
            "job_graph": _box((1,), most),
            "job": _box((len(JOB_FEATURES),), 1.0),
        }
        if observe:
            parts |= {
                "devices": _box((servers, NUM_DEVICE_FEATURES), 1.0),
                "candidates": _box((choices, NUM_FEATURES), 1.0),
                "candidate_devices": _box((choices, servers), 1.0),
                "history": _box((NUM_HISTORY,), 1.0),
            }
        self.observation_space = spaces.Dict(parts)

    def candidates(self, state: RampState, *, features: bool = True) -> Candidates:
        """List the candidates of every episode's job."""
        out = empty_candidates(self.tables, len(state.over))
        return encode(self.tables, state, out, self._memo, features=features)

    def see(self, state: RampState) -> tuple[dict[str, Floats], Flags]:
        """Return observations and masks with a leading axis, in new arrays.

        After the end of an episode they are zeros, and only turning away is allowed.

        Returns:
            Observations of :attr:`observation_space`, [b, …]; and the actions that are
            allowed, shape [b, actions].
        """
        found = None
        if self.observe or self.mask == "possible":
            found = self.candidates(state, features=self.observe)
        running = ~state.over
        obs: dict[str, Floats] = {
            "job_graph": (state.model * running).astype(np.float32)[:, None],
            "job": self._job(state),
        }
        if self.observe and found is not None:
            for name in ("devices", "candidate_devices", "history"):
                shape = self.observation_space[name].shape or ()
                obs[name] = np.zeros((len(state.over), *shape), dtype=np.float32)
            obs["candidates"] = found.features
            _observe(
                self.tables,
                state,
                found.servers,
                obs["devices"],
                obs["candidate_devices"],
                obs["history"],
            )
        if self.mask == "possible" and found is not None:
            return obs, found.possible
        left = (self.tables.num_servers - state.running.held) * running
        allowed = self.tables.degrees <= left[:, None]
        return obs, np.concatenate([np.ones_like(allowed[:, :1]), allowed], axis=1)

    def _job(self, state: RampState) -> Floats:
        tables = self.tables
        intervals = tables.sequential_jct_s[state.model] / state.interval_s
        most = max(tables.demand_bytes.max(), 1.0)
        columns = [
            state.beta,
            np.minimum(state.beta * intervals, _LONGEST) / _LONGEST,
            np.minimum(intervals, _LONGEST) / _LONGEST,
            tables.demand_bytes[state.model] / most,
        ]
        seen = np.stack(columns, axis=1) * ~state.over[:, None]
        return seen.astype(np.float32)


def _box(shape: tuple[int, ...], high: float) -> spaces.Box:
    return spaces.Box(0.0, high, shape, np.float32)
