"""What an agent of the job stream sees, as a flat Dict of arrays."""

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

#: Which actions a mask allows besides turning away: what the benchmark's own mask does
#: (it does not look for a free block), or what would be placed and meet its deadline.
MaskKind = Literal["benchmark", "possible"]
MASKS: tuple[MaskKind, ...] = ("benchmark", "possible")

#: Of the job at the head: its beta; its deadline and its time on one device in mean
#: intervals, capped at 40, over 40; the bytes that throughput counts, over the most.
JOB_FEATURES = ("beta", "deadline", "sequential", "demand")
#: Of a server: free now and at each of the OFFSETS; time until it is, capped likewise.
NUM_DEVICE_FEATURES = 1 + len(OFFSETS) + 1

#: Mean intervals that are told apart.
_LONGEST = 40.0
#: Ends of jobs and times this close are one; as in RampWorld.
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
    """Fill in what is seen of servers and history; zeros where an episode is over."""
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
        tables: Of the jobs.
        observe: Whether observations are encoded in full; else they are of ``job`` and
            ``job_graph`` alone, which baselines and planners do with.
        mask: Which actions are allowed.

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
        """Of every episode's job."""
        out = empty_candidates(self.tables, len(state.over))
        return encode(self.tables, state, out, self._memo, features=features)

    def see(self, state: RampState) -> tuple[dict[str, Floats], Flags]:
        """Observations and masks, with a leading axis; new arrays at each call.

        An episode that is over is seen as zeros, and all but turning away is masked.

        Returns:
            What :attr:`observation_space` says, [b, …]; and which actions are allowed,
            shape [b, actions].
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
