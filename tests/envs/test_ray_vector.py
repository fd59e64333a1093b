"""Rows on Ray actors: they go as rows of one process do, and fail clearly."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from planner.errors import ExecutionError, MeshwrightError, StrategyError

ray = pytest.importorskip("ray", reason="ray is not installed")

from envs.ray_vector import RayVecEnv  # noqa: E402  # after the skip

# Ray alone takes seconds to start.
pytestmark = pytest.mark.slow

_PROFILES = Path(os.environ.get("MESHWRIGHT_DATA", "none")) / "pipedream"


class _Count(gymnasium.Env[Any, np.int64]):
    """Adds up its actions from a start drawn by its seed; ends after five."""

    def __init__(self, fault: str = "", actions: int = 4) -> None:
        self.observation_space = spaces.Dict(
            {"sum": spaces.Box(-1e6, 1e6, (2,), np.float32)}
        )
        self.action_space = spaces.Discrete(actions)
        self.fault, self.scale, self.count = fault, 1.0, 0
        self.sum = np.zeros(2, dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        self.sum = self.np_random.integers(100, size=2).astype(np.float32)
        self.sum += (options or {}).get("more", 0)
        return {"sum": self.sum.copy()}, {"seed": seed}

    def step(
        self, action: np.int64
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        if self.fault == "raise" and self.count == 1:
            raise ValueError("the wheel came off\nand rolled away")
        if self.fault == "die" and self.count == 1:
            os._exit(3)
        self.count += 1
        self.sum += action
        reward = float(self.scale * action)
        return {"sum": self.sum.copy()}, reward, self.count == 5, False, {"at": action}

    def action_masks(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return np.arange(4) <= self.count


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The rows that tests share hold two of the CPUs all the time.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def many(running: None) -> Iterator[RayVecEnv]:
    made = RayVecEnv([_two(_Count, 3), _Count])
    yield made
    made.close()


def _follow(env: Any, seed: int, steps: int) -> list[Any]:
    generator = np.random.default_rng(0)
    env.seed(seed)
    seen = [env.reset(), list(env.reset_infos)]
    for _ in range(steps):
        masks = np.stack(env.env_method("action_masks"))
        drawn = generator.random(masks.shape) * masks
        seen += [masks, *env.step(drawn.argmax(axis=1)), list(env.reset_infos)]
    return seen


def _two(make: Callable[[], Any], rows: int) -> Callable[[], DummyVecEnv]:
    return lambda: DummyVecEnv([make] * rows)


def test_rows_go_as_in_one_process(many: RayVecEnv) -> None:
    one = DummyVecEnv([_Count] * 4)
    assert many.num_envs == 4
    assert many.observation_space == one.observation_space
    assert many.action_space == one.action_space
    # Beyond the end of episodes.
    np.testing.assert_equal(_follow(many, 7, 12), _follow(one, 7, 12))


@pytest.mark.skipif(
    not _PROFILES.is_dir(), reason="MESHWRIGHT_DATA has no pipedream folder"
)
def test_the_job_stream_goes_as_in_one_process(running: None) -> None:
    from envs.ramp.vector import RampVecEnv

    def make(rows: int) -> Callable[[], RampVecEnv]:
        return lambda: RampVecEnv(rows, law="A", horizon_s=1.5e4)

    many = RayVecEnv([make(2), make(1)])
    np.testing.assert_equal(_follow(many, 3, 20), _follow(make(3)(), 3, 20))
    many.close()
    many.close()
    with pytest.raises(ExecutionError, match="have been stopped"):
        many.reset()
    assert ray.is_initialized()


def test_a_masked_policy_learns_on_it(many: RayVecEnv) -> None:
    from sb3_contrib import MaskablePPO
    from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported

    assert is_masking_supported(many)
    many.reset()
    assert get_action_masks(many).tolist() == [[True, False, False, False]] * 4
    model = MaskablePPO("MultiInputPolicy", many, n_steps=8, batch_size=8, seed=0)
    model.learn(64)
    assert model.num_timesteps == 64


def test_attributes_and_options_reach_their_rows(many: RayVecEnv) -> None:
    many.set_attr("scale", 5.0, indices=[3, 0])
    assert many.get_attr("scale") == [5.0, 1.0, 1.0, 5.0]
    assert many.get_attr("scale", indices=[3, 1]) == [5.0, 1.0]
    assert many.get_attr("scale", indices=-1) == [5.0]
    many.seed(0)
    plain = many.reset()["sum"]
    many.seed(0)
    many.set_options([{"more": 10 * row} for row in range(4)])
    more = many.reset()["sum"]
    assert (more - plain).tolist() == [[10 * row] * 2 for row in range(4)]
    _, rewards, _, _ = many.step(np.ones(4, dtype=np.int64))
    assert rewards.tolist() == [5, 1, 1, 5]
    assert not any(many.env_is_wrapped(gymnasium.Wrapper))
    assert many.has_attr("scale")
    assert not many.has_attr("weight")
    # What a row does not have harms no worker.
    with pytest.raises(AttributeError, match="weight"):
        many.get_attr("weight")
    assert many.get_attr("count") == [1] * 4
    many.set_attr("scale", 1.0)


def test_a_step_is_begun_before_it_is_waited_for(many: RayVecEnv) -> None:
    many.reset()
    with pytest.raises(StrategyError, match="step_async"):
        many.step_wait()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "worker 1 of 2 failed with ValueError: the wheel came off; the"),
        ("die", "worker 1 of 2 failed with ActorDiedError: .*; the others have been"),
    ],
)
def test_an_error_of_a_worker_stops_all(running: None, fault: str, words: str) -> None:
    many = RayVecEnv([_Count, lambda: _Count(fault)])
    many.reset()
    many.step(np.array([0, 0]))
    actors = list(many._actors)
    with pytest.raises(ExecutionError, match=words) as caught:
        many.step(np.array([0, 0]))
    assert "\n" not in str(caught.value)
    for actor in actors:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.call.remote("close"), timeout=30)
    with pytest.raises(ExecutionError, match="have been stopped"):
        many.step(np.array([0, 0]))


def _no_env() -> Any:
    return "an environment"


def _no_module() -> Any:
    raise ImportError("no module named 'moat'")


@pytest.mark.parametrize(
    ("factories", "options", "error", "words"),
    [
        ([], {}, StrategyError, "0 factories"),
        ([_Count], {"cpus_per_worker": 0}, StrategyError, "of 0 CPUs"),
        ([_Count] * 2, {"cpus_per_worker": 8}, StrategyError, "want 16 CPUs .* has 4"),
        ([_Count, lambda: _Count("", 3)], {}, StrategyError, r"worker 1 .*Discrete\(3"),
        ([_no_env], {}, ExecutionError, "StrategyError: a factory made a str"),
        ([_no_module], {}, ExecutionError, "worker 0 of 1 failed .*moat"),
    ],
)
def test_bad_workers_are_named(
    running: None,
    factories: list[Any],
    options: dict[str, Any],
    error: type[MeshwrightError],
    words: str,
) -> None:
    with pytest.raises(error, match=words):
        RayVecEnv(factories, **options)
