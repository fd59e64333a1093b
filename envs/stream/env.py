"""``meshwright/JobStream-v0``: a stream of jobs on any cluster, for gymnasium."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from envs.ramp.graphs import OpGraph
from envs.ramp.state import Past
from envs.stream.network import Shape
from envs.stream.session import StreamConfig, StreamSession
from envs.stream.state import StreamState, copy_state
from envs.stream.tables import StreamTables

__all__ = ["JobStreamEnv"]

Floats = NDArray[np.float32]
Index = NDArray[np.int64]


class JobStreamEnv(gymnasium.Env[dict[str, Any], np.int64]):
    """Jobs arrive at a cluster; each action decides the one at the head.

    Action 0 turns the job away, action 1 + i runs it in the i-th of :attr:`shapes`, and
    if jobs may wait, one more action lets it wait until something changes. The
    observation is a flat Dict of float32 arrays (N devices, C actions):

    - ``job_graph`` [1]: index of the job's graph in :attr:`graphs`;
    - ``job`` [JOB_FEATURES]: its deadline and its size;
    - ``devices`` [N, NUM_DEVICE_FEATURES]: times at which devices are free;
    - ``candidates`` [C, NUM_CANDIDATE_FEATURES]: the state that each action leaves
      behind;
    - ``candidate_devices`` [C, N]: the devices that each would hold;
    - ``history`` [NUM_HISTORY]: recent deadlines, and the time left.

    ``info`` has ``outcome`` (placed, refused, no_room, late or waiting), ``degree``,
    ``hosts``, for a placed job the label of its ``plan``, and at the end ``summary``:
    the fields of StreamSummary and ``blocking_rate``. With ``record=True`` it then has
    ``record`` too, a :class:`planner.schema.stream.StreamRecord`.

    Args:
        config: Configuration of the stream.
        **options: Fields of a StreamConfig, instead of one.

    Raises:
        MeshwrightError: As :class:`envs.stream.session.StreamSession`.
    """

    def __init__(self, config: StreamConfig | None = None, **options: Any) -> None:
        self.session = StreamSession(config or StreamConfig(**options))
        self.observation_space = self.session.observer.observation_space
        self.action_space = self.session.observer.action_space
        self._masks = np.zeros(
            int(self.session.observer.action_space.n), dtype=np.bool_
        )
        self._masks[0] = True

    @property
    def tables(self) -> StreamTables:
        """Jobs, plans and network as arrays."""
        return self.session.tables

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Candidate shapes, in the order of actions."""
        return self.session.shapes

    @property
    def graphs(self) -> tuple[OpGraph, ...]:
        """Op graph of every job, in the order of ``job_graph``."""
        return self.session.graphs

    @cached_property
    def device_graph(self) -> Index:
        """Pairs of neighbouring devices. Shape [2, edges].

        Neighbours are devices of one host, and devices at the same place of two hosts
        below one switch, or of corresponding hosts below two switches.
        """
        switches = self.tables.switches
        host = self.tables.host_of_device
        place = _place_among(host)
        edges = (host[:, None] == host[None, :]) & ~np.eye(len(host), dtype=np.bool_)
        same = place[:, None] == place[None, :]
        for level in range(1, len(switches)):
            inner, outer = switches[level - 1], switches[level]
            # Hosts below two switches are joined if they have the same place there.
            local = _place_among(inner)[host]
            together = outer[host][:, None] == outer[host][None, :]
            apart = inner[host][:, None] != inner[host][None, :]
            alike = local[:, None] == local[None, :]
            edges |= same & together & apart & (alike if level > 1 else True)
        return np.stack(np.nonzero(edges)).astype(np.int64)

    def exact_state(self) -> StreamState:
        """Return a copy of the exact state, for planners."""
        return copy_state(self.session.state)

    def past(self) -> Past:
        """Return copies of the jobs that have arrived, the head included."""
        return self.session.past()

    def action_masks(self) -> NDArray[np.bool_]:
        """Return the actions that are allowed; turning away always is. [actions]."""
        return self._masks.copy()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Floats], dict[str, Any]]:
        """Begin the next episode; a seed restarts the sequence of episodes."""
        super().reset(seed=seed)
        self.session.begin(self.np_random)
        return self._see(), {}

    def step(
        self, action: np.int64
    ) -> tuple[dict[str, Floats], float, bool, bool, dict[str, Any]]:
        """Decide the job at the head.

        Raises:
            StrategyError: If the action is out of range, or the episode has ended.
        """
        reward, info = self.session.decide(int(action))
        return self._see(), reward, self.session.over, False, info

    def _see(self) -> dict[str, Floats]:
        obs, self._masks = self.session.observer.see(
            self.session.state, self.session.options
        )
        return obs


def _place_among(group: Index) -> Index:
    """Number the entries within each group. Shape [n]."""
    seen: dict[int, int] = {}
    found = []
    for member in group.tolist():
        found.append(seen.get(member, 0))
        seen[member] = found[-1] + 1
    return np.array(found, dtype=np.int64)
