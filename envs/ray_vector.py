"""Environments on Ray actors behind one VecEnv, on this machine or on several."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from planner.errors import ExecutionError, StrategyError

__all__ = ["Factory", "RayVecEnv", "start_ray"]

#: Makes the environment of one worker: a gymnasium one, or many as a VecEnv.
Factory = Callable[[], "gymnasium.Env[Any, Any] | VecEnv"]
Indices = int | Iterable[int] | None
Flags = NDArray[np.bool_]
Floats = NDArray[np.float32]

#: How long workers may take to close by themselves.
_CLOSE_S = 5.0


class _Worker:
    """An actor that holds a VecEnv and calls its methods."""

    _env: VecEnv

    def make(self, factory: Factory) -> tuple[int, Any, Any]:
        """Make the environment; return its number of rows and its spaces.

        Not in the constructor, where Ray reports errors in less detail.
        """
        made = factory()
        if isinstance(made, VecEnv):
            self._env = made
        elif isinstance(made, gymnasium.Env):
            self._env = DummyVecEnv([lambda: made])
        else:
            raise StrategyError(
                f"a factory made a {type(made).__name__}; return a gymnasium Env or a "
                f"VecEnv of stable-baselines3"
            )
        env = self._env
        return env.num_envs, env.observation_space, env.action_space

    def reset(
        self, seed: int | None, options: list[dict[str, Any]]
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Reset all rows; return observations and infos."""
        if seed is not None:
            self._env.seed(seed)
        self._env.set_options(options)
        obs = self._env.reset()
        return obs, self._env.reset_infos

    def step(self, actions: NDArray[Any]) -> tuple[Any, Floats, Flags, Any, Any]:
        """Step all rows; return the infos of the last resets, too."""
        obs, rewards, dones, infos = self._env.step(actions)
        return obs, rewards, dones, infos, self._env.reset_infos

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call any other method of the VecEnv."""
        return getattr(self._env, method)(*args, **kwargs)


def _joined(parts: Sequence[Any]) -> Any:
    """Concatenate observations of workers."""
    if isinstance(parts[0], Mapping):
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}
    if isinstance(parts[0], tuple):
        return tuple(_joined(column) for column in zip(*parts, strict=True))
    return np.concatenate(parts)


class RayVecEnv(VecEnv):  # type: ignore[misc]  # stable-baselines3 is optional
    """A VecEnv whose rows live in Ray actors, and step at the same time.

    The rows are those of the first worker, then those of the second, and so on; with
    the same seed they equal those of a single VecEnv with as many rows. An error in a
    worker stops all of them.

    Ray is started on this machine if it does not run yet, and then stopped by
    :meth:`close`. To use several machines, join them with Ray's own ``ray start`` and
    give its address, or call ``ray.init`` yourself. They all need what the factories
    import.

    Args:
        factories: One for each worker; cloudpickle must be able to pickle it.
        address: Address of a running Ray cluster, ``"auto"`` for this machine's.
        cpus_per_worker: CPUs that Ray reserves for each worker.
        start_timeout_s: Limit of the time to make the environments.

    Raises:
        StrategyError: If there are no factories, the cluster has too few CPUs, or the
            workers' spaces differ.
        ExecutionError: If no cluster is at the address, or a worker fails, at any time.
    """

    def __init__(
        self,
        factories: Sequence[Factory],
        *,
        address: str | None = None,
        cpus_per_worker: float = 1.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        if not factories or not 0.0 < cpus_per_worker < np.inf:
            raise StrategyError(
                f"{len(factories)} factories for workers of {cpus_per_worker} CPUs; "
                f"give at least one, and more than 0 CPUs"
            )
        wanted = cpus_per_worker * len(factories)
        self._actors: list[Any] = []
        self._pending: list[Any] = []
        self._started = not ray.is_initialized()
        if self._started:
            start_ray(address, wanted)
        try:
            self._check_room(wanted)
            actor = ray.remote(_Worker).options(num_cpus=cpus_per_worker)
            self._actors = [actor.remote() for _ in factories]
            made = zip(self._actors, factories, strict=True)
            refs = [one.make.remote(factory) for one, factory in made]
            found = self._get(refs, start_timeout_s)
            self._check_spaces(found)
            counts = [count for count, _, _ in found]
            self._begins = np.concatenate([[0], np.cumsum(counts)]).tolist()
            super().__init__(sum(counts), *found[0][1:])
        except BaseException:
            self._stop(graceful=False)
            raise

    @staticmethod
    def _check_room(wanted: float) -> None:
        has = ray.cluster_resources().get("CPU", 0.0)
        if wanted > has:
            raise StrategyError(
                f"the workers want {wanted:g} CPUs and the Ray cluster has {has:g}; "
                f"use fewer workers, a smaller cpus_per_worker, or more machines"
            )

    @staticmethod
    def _check_spaces(found: Sequence[tuple[int, Any, Any]]) -> None:
        for index, (_, *spaces) in enumerate(found):
            if spaces != list(found[0][1:]):
                raise StrategyError(
                    f"worker {index} has the spaces {spaces}, worker 0 "
                    f"{list(found[0][1:])}; all must be equal"
                )

    def reset(self) -> Any:
        """Reset all rows, with new seeds if there are any."""
        refs = []
        for actor, begin, end in self._each():
            options = [dict(self._options[row]) for row in range(begin, end)]
            refs.append(actor.reset.remote(self._seeds[begin], options))
        found = self._get(refs)
        self.reset_infos = [info for _, infos in found for info in infos]
        self._reset_seeds()
        self._reset_options()
        return _joined([obs for obs, _ in found])

    def step_async(self, actions: NDArray[Any]) -> None:
        """Start a step in all workers."""
        self._pending = [
            actor.step.remote(np.asarray(actions)[begin:end])
            for actor, begin, end in self._each()
        ]

    def step_wait(self) -> tuple[Any, Floats, Flags, list[dict[str, Any]]]:
        """Wait for the step; return observations, rewards, dones and infos.

        Raises:
            ExecutionError: If a worker failed; the others are stopped.
            StrategyError: If no step was begun.
        """
        if not self._pending:
            raise StrategyError("there is no step to wait for; call step_async first")
        found, self._pending = self._get(self._pending), []
        obs, rewards, dones, infos, begun = zip(*found, strict=True)
        self.reset_infos = [info for part in begun for info in part]
        told = [info for part in infos for info in part]
        return _joined(obs), np.concatenate(rewards), np.concatenate(dones), told

    def close(self) -> None:
        """Close the environments; stop the actors, and Ray if it was started here."""
        self._stop(graceful=True)

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Return an attribute of some rows; it must be possible to pickle it."""
        return self._ask("get_attr", indices, attr_name)

    def has_attr(self, attr_name: str) -> bool:
        """Return True if all rows have an attribute."""
        return all(
            self._get(
                [a.call.remote("has_attr", attr_name) for a, _, _ in self._each()]
            )
        )

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of some rows."""
        self._ask("set_attr", indices, attr_name, value)

    def env_method(
        self,
        method_name: str,
        *method_args: Any,
        indices: Indices = None,
        **method_kwargs: Any,
    ) -> list[Any]:
        """Call a method of some rows."""
        return self._ask(
            "env_method", indices, method_name, *method_args, **method_kwargs
        )

    def env_is_wrapped(
        self,
        wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]],
        indices: Indices = None,
    ) -> list[bool]:
        """Return for some rows whether they are wrapped in a class."""
        return self._ask("env_is_wrapped", indices, wrapper_class)

    def get_images(self) -> Sequence[NDArray[np.uint8] | None]:
        """Return the image of each row that can be rendered."""
        parts = self._get(
            [actor.call.remote("get_images") for actor, _, _ in self._each()]
        )
        return [image for part in parts for image in part]

    def _each(self) -> Iterable[tuple[Any, int, int]]:
        """Return the actors with their ranges of rows."""
        if not self._actors:
            raise ExecutionError("the workers have been stopped; make a new RayVecEnv")
        return zip(self._actors, self._begins, self._begins[1:], strict=False)

    def _ask(
        self, method: str, indices: Indices, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Call a method in the workers of some rows; answer in their order."""
        rows = [range(self.num_envs)[row] for row in self._get_indices(indices)]
        refs, places = [], []
        for actor, begin, end in self._each():
            mine = [place for place, row in enumerate(rows) if begin <= row < end]
            if not mine:
                continue
            local = [rows[place] - begin for place in mine]
            named = {**kwargs, "indices": local}
            refs.append(actor.call.remote(method, *args, **named))
            places.append(mine)
        answers: list[Any] = [None] * len(rows)
        for mine, found in zip(places, self._get(refs), strict=True):
            for place, answer in zip(mine, found or [None] * len(mine), strict=True):
                answers[place] = answer
        return answers

    def _get(self, refs: list[Any], timeout_s: float | None = None) -> list[Any]:
        """Wait for the answers of workers; stop all workers if one fails."""
        try:
            found: list[Any] = ray.get(refs, timeout=timeout_s)
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, AttributeError):
                # A missing attribute does not harm a worker.
                raise AttributeError(str(cause)) from error  # noqa: TRY004
            said = self._failure(refs, timeout_s)
            self._stop(graceful=False)
            raise ExecutionError(said) from error
        return found

    def _failure(self, refs: Sequence[Any], timeout_s: float | None) -> str:
        """Describe in a line the worker that has failed."""
        for index, ref in enumerate(refs):
            ended, _ = ray.wait([ref], timeout=0)
            if not ended:
                continue
            try:
                ray.get(ref)
            except RayError as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                why = str(cause).strip().split("\n", 1)[0]
                return (
                    f"worker {index} of {len(refs)} failed with "
                    f"{type(cause).__name__}: {why}; the others have been stopped"
                )
        return (
            f"the {len(refs)} workers did not answer within {timeout_s} s; give them a "
            f"longer start_timeout_s, or the Ray cluster free CPUs"
        )

    def _stop(self, *, graceful: bool) -> None:
        actors, self._actors, self._pending = self._actors, [], []
        if ray.is_initialized():
            if graceful and actors:
                closing = [actor.call.remote("close") for actor in actors]
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
            for actor in actors:
                ray.kill(actor)
            if self._started:
                ray.shutdown()
        self._started = False


def start_ray(address: str | None, cpus: float) -> None:
    """Start Ray, or join a running cluster."""
    quiet = {"log_to_driver": False, "logging_level": "warning"}
    if address is not None:
        try:
            ray.init(address=address, **quiet)
        except ConnectionError as error:
            raise ExecutionError(
                f"no Ray cluster answers at address={address!r}; start one with "
                f"'ray start --head', or leave the address out"
            ) from error
        return
    # A cluster for this process alone sends no usage reports.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cores = max(os.cpu_count() or 1, int(np.ceil(cpus)))
    ray.init(num_cpus=cores, include_dashboard=False, **quiet)
