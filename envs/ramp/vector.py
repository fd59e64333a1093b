"""Many replays at once behind stable-baselines3's VecEnv, in one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils.seeding import np_random
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from envs.ramp.graphs import OpGraph, device_edges, op_graph
from envs.ramp.jobs import RampTables
from envs.ramp.session import ReplayConfig, ReplaySession, Step
from envs.ramp.state import Past, RampState, past
from planner.errors import StrategyError

__all__ = ["RampVecEnv"]

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Indices = int | Iterable[int] | None


class RampVecEnv(VecEnv):  # type: ignore[misc]  # stable-baselines3 is optional
    """Replays side by side, decided by compiled code.

    Row i equals a :class:`envs.ramp.replay_env.RampReplayEnv` with the i-th seed. An
    episode that ends is restarted at once; the observation after its last decision is
    in ``info["terminal_observation"]``.

    Args:
        num_envs: Episodes side by side.
        config: Configuration of the replays.
        seed: Seed of the first episode; those of the others count up from it.
        **options: Fields of a ReplayConfig, instead of one. With ``observe=False``,
            observations have ``job`` and ``job_graph`` alone.

    Raises:
        StrategyError: If there are no episodes.
        MeshwrightError: As :class:`envs.ramp.session.ReplaySession`.
    """

    def __init__(
        self,
        num_envs: int,
        config: ReplayConfig | None = None,
        *,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        if num_envs < 1:
            raise StrategyError(f"num_envs={num_envs}; run at least 1 episode")
        self.session = ReplaySession(config or ReplayConfig(**options), num_envs)
        # stable-baselines3 reads this attribute of gymnasium's environments.
        self.render_mode: str | None = None
        observer = self.session.observer
        super().__init__(num_envs, observer.observation_space, observer.action_space)
        self._generators = [np_random(None)[0] for _ in range(num_envs)]
        self._masks: Flags = np.zeros((num_envs, observer.action_space.n), np.bool_)
        self._masks[:, 0] = True
        self._step: Step | None = None
        if seed is not None:
            self.seed(seed)

    @property
    def tables(self) -> RampTables:
        """Jobs and topology as arrays."""
        return self.session.tables

    @property
    def graphs(self) -> tuple[OpGraph, ...]:
        """Op graph of every job, in the order of ``job_graph``."""
        return tuple(op_graph(job) for job in self.session.jobs.jobs.values())

    @property
    def device_graph(self) -> NDArray[np.int64]:
        """Pairs of servers that differ in one coordinate. Shape [2, edges]."""
        return device_edges(self.session.jobs.topology)

    def exact_state(self) -> RampState:
        """Return the exact state, for planners."""
        return self.session.state()

    def past(self, row: int) -> Past:
        """Return copies of the jobs of a row that have been decided."""
        return past(self.session.episodes, row)

    def action_masks(self) -> Flags:
        """Return the actions that are allowed. Shape [num_envs, actions]."""
        return self._masks.copy()

    def reset(self) -> dict[str, Floats]:
        """Begin the next episode of each row; a seed restarts its sequence."""
        for row, seed in enumerate(self._seeds):
            if seed is not None:
                self._generators[row] = np_random(seed)[0]
            self.session.begin(row, self._generators[row])
        self.reset_infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        obs, self._masks = self.session.see()
        return obs

    def step_async(self, actions: NDArray[np.int64]) -> None:
        """Decide the job at the head of each row.

        Raises:
            StrategyError: If an action is out of range, or there was no reset.
        """
        self._step = self.session.decide(np.asarray(actions).reshape(-1))

    def step_wait(
        self,
    ) -> tuple[dict[str, Floats], Floats, Flags, list[dict[str, Any]]]:
        """Return observations, rewards, dones and infos of the step."""
        step = self._step
        if step is None:
            raise StrategyError("there is no step to wait for; call step_async first")
        self._step = None
        infos = self.session.infos(step)
        ended = np.flatnonzero(step.over).tolist()
        if ended:
            last, _ = self.session.see()
            for row in ended:
                infos[row]["TimeLimit.truncated"] = False
                infos[row]["terminal_observation"] = {
                    name: part[row] for name, part in last.items()
                }
                self.session.begin(row, self._generators[row])
        obs, self._masks = self.session.see()
        return obs, step.reward, step.over, infos

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Return an attribute, once for each of some rows."""
        if attr_name == "action_masks":
            masks = self.action_masks()
            return [masks[row].copy for row in self._get_indices(indices)]
        return [getattr(self, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of all rows at once: they share them.

        Raises:
            StrategyError: If it is to be that of some rows only.
        """
        if indices is not None and set(self._get_indices(indices)) != set(
            range(self.num_envs)
        ):
            raise StrategyError(
                f"{attr_name} is shared by all {self.num_envs} rows; set it without "
                f"indices"
            )
        setattr(self, attr_name, value)

    def env_method(
        self,
        method_name: str,
        *method_args: Any,
        indices: Indices = None,
        **method_kwargs: Any,
    ) -> list[Any]:
        """Call a method of rows; ``action_masks`` is the one that rows have.

        Raises:
            StrategyError: If it is another.
        """
        if method_name != "action_masks":
            raise StrategyError(
                f"rows have no method {method_name!r} of their own; they have "
                f"action_masks, the RampVecEnv has the rest"
            )
        masks = self.action_masks(*method_args, **method_kwargs)
        return [masks[row] for row in self._get_indices(indices)]

    def env_is_wrapped(
        self,
        wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]],
        indices: Indices = None,
    ) -> list[bool]:
        """Rows are not wrapped."""
        return [False for _ in self._get_indices(indices)]

    def get_images(self) -> Sequence[None]:
        """Return None for each row: nothing is rendered."""
        return [None] * self.num_envs
