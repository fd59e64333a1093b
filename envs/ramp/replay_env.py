"""``meshwright/RampReplay-v0``: the job-stream benchmark as a gymnasium environment."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from envs.ramp.graphs import OpGraph, device_edges, op_graph
from envs.ramp.jobs import RampTables
from envs.ramp.session import ReplayConfig, ReplaySession
from envs.ramp.state import Past, RampState, past

__all__ = ["RampReplayEnv"]

Floats = NDArray[np.float32]


class RampReplayEnv(gymnasium.Env[dict[str, Any], np.int64]):
    """A stream of jobs on a RAMP cluster; each action places the job at the head.

    Action 0 turns the job away, action 1 + i runs it at the i-th degree. The
    observation is a flat Dict of float32 arrays (N servers, C actions):

    - ``job_graph`` [1]: index of the job's graph in :attr:`graphs`;
    - ``job`` [JOB_FEATURES]: its deadline and its size;
    - ``devices`` [N, NUM_DEVICE_FEATURES]: times at which servers are free;
    - ``candidates`` [C, NUM_FEATURES]: the state that each action leaves behind;
    - ``candidate_devices`` [C, N]: the servers that each would hold;
    - ``history`` [NUM_HISTORY]: recent deadlines, and the time left.

    ``info`` has ``outcome`` (placed, refused, no_room or late), ``degree``, and at
    the end ``summary``: the fields of Summary and ``blocking_rate``. With
    ``record=True`` it then has ``record`` too, a
    :class:`planner.schema.stream.StreamRecord`.

    Args:
        config: Configuration of the replay.
        **options: Fields of a ReplayConfig, instead of one.

    Raises:
        MeshwrightError: As :class:`envs.ramp.session.ReplaySession`.
    """

    def __init__(self, config: ReplayConfig | None = None, **options: Any) -> None:
        self.session = ReplaySession(config or ReplayConfig(**options), 1)
        self.observation_space = self.session.observer.observation_space
        self.action_space = self.session.observer.action_space
        self._masks = np.zeros(self.session.observer.action_space.n, dtype=np.bool_)
        self._masks[0] = True

    @property
    def tables(self) -> RampTables:
        """Jobs and topology as arrays."""
        return self.session.tables

    @cached_property
    def graphs(self) -> tuple[OpGraph, ...]:
        """Op graph of every job, in the order of ``job_graph``."""
        return tuple(op_graph(job) for job in self.session.jobs.jobs.values())

    @cached_property
    def device_graph(self) -> NDArray[np.int64]:
        """Pairs of servers that differ in one coordinate. Shape [2, edges]."""
        return device_edges(self.session.jobs.topology)

    def exact_state(self) -> RampState:
        """Return the exact state, a batch of one episode, for planners."""
        return self.session.state()

    def past(self, row: int = 0) -> Past:
        """Return copies of the jobs of the episode that have been decided."""
        return past(self.session.episodes, row)

    def action_masks(self) -> NDArray[np.bool_]:
        """Return the actions that are allowed; turning away always is. [actions]."""
        return self._masks.copy()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Floats], dict[str, Any]]:
        """Begin the next episode; a seed restarts the sequence of episodes."""
        super().reset(seed=seed)
        self.session.begin(0, self.np_random)
        return self._see(), {}

    def step(
        self, action: np.int64
    ) -> tuple[dict[str, Floats], float, bool, bool, dict[str, Any]]:
        """Decide the job at the head.

        Raises:
            StrategyError: If the action is out of range, or the episode has ended.
        """
        step = self.session.decide(np.array([action]))
        info = self.session.infos(step)[0]
        return self._see(), float(step.reward[0]), bool(step.over[0]), False, info

    def _see(self) -> dict[str, Floats]:
        obs, masks = self.session.see()
        self._masks = masks[0]
        return {name: part[0] for name, part in obs.items()}
