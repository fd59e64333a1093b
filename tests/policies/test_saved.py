"""Weights in files, and the policies that read them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from envs.ramp.features import NUM_FEATURES
from envs.ramp.history import NUM_HISTORY
from envs.ramp.jobs import RampJobs
from envs.ramp.replay_env import RampReplayEnv
from envs.ramp.vector import RampVecEnv
from planner.errors import StrategyError, UnknownNameError
from policies.by_name import POLICIES, make_policy
from policies.compact import PointerDecider
from policies.pointer import (
    PointerConfig,
    PointerNetwork,
    SavedPolicy,
    load_policy,
    save_policy,
    widths_of,
)
from policies.ramp.evaluation import play
from policies.scorer import Scorer, ScorerPolicy


def _scorer(hidden: int = 32) -> Scorer:
    generator = np.random.default_rng(0)
    inputs = NUM_FEATURES + NUM_HISTORY
    shapes = ((inputs, hidden), (hidden,), (hidden, hidden), (hidden,), (hidden,))
    parts = (generator.normal(size=shape) / 3 for shape in shapes)
    return Scorer(*(part.astype(np.float32) for part in parts))


@pytest.fixture
def env(jobs: RampJobs) -> RampVecEnv:
    return RampVecEnv(3, jobs=jobs, law=["A", "B"], horizon_s=1e5, seed=4)


@pytest.fixture
def folder(env: RampVecEnv, tmp_path: Path) -> Path:
    network = PointerNetwork(
        env.graphs,
        env.device_graph,
        widths_of(env.observation_space),
        PointerConfig(width=8),
    )
    network.start_from(_scorer())
    made = SavedPolicy(network=network, scorer=_scorer(), notes={"seed": 1})
    save_policy(made, tmp_path / "policy")
    return tmp_path / "policy"


def test_what_was_saved_decides_the_same(env: RampVecEnv, folder: Path) -> None:
    saved = load_policy(env.graphs, env.device_graph, folder)
    assert saved.notes == {"seed": 1}
    obs, masks = env.reset(), env.action_masks()
    by_network = PointerDecider(saved.network)
    by_scorer = ScorerPolicy(saved.scorer)
    for _ in range(30):
        actions = by_network.predict(obs, masks)
        # The network began as the scorer, and has learned nothing since.
        assert actions.tolist() == by_scorer.predict(obs, masks).tolist()
        one = {name: part[1] for name, part in obs.items()}
        assert by_network.predict(one, masks[1]) == actions[1]
        assert by_scorer.predict(one, masks[1]) == actions[1]
        obs, *_ = env.step(actions)
        masks = env.action_masks()
    with pytest.raises(StrategyError, match="forbid turning a job away"):
        by_network.predict(obs, np.zeros_like(masks))


def test_damaged_weights_are_refused(env: RampVecEnv, folder: Path) -> None:
    def load() -> SavedPolicy:
        return load_policy(env.graphs, env.device_graph, folder)

    config, weights = folder / "config.json", folder / "policy.safetensors"
    text, data = config.read_text(), weights.read_bytes()
    for change, message in (
        ({"format_version": 99}, "format_version=99, this Meshwright reads"),
        ({"format_version": "new"}, "format_version: Input should be"),
        ({"surprise": 1}, "surprise: Extra inputs"),
    ):
        config.write_text(json.dumps(json.loads(text) | change))
        with pytest.raises(StrategyError, match=message):
            load()
    other = json.loads(text)
    other["observation"]["offsets"] = [1.0]
    config.write_text(json.dumps(other))
    with pytest.raises(StrategyError, match="has observation="):
        load()
    config.write_text(text)
    weights.write_bytes(data[:100])
    with pytest.raises(StrategyError, match="holds no weights"):
        load()
    smaller = json.loads(text)
    smaller["network"]["width"] = 16
    config.write_text(json.dumps(smaller))
    weights.write_bytes(data)
    with pytest.raises(StrategyError, match=r"does not go with its config\.json"):
        load()
    weights.unlink()
    config.unlink()
    with pytest.raises(StrategyError, match=r"config\.json cannot be read"):
        load()


@pytest.mark.parametrize("name", [*POLICIES[:-1], "constant_4", "learned+lookahead"])
def test_every_policy_by_its_name(jobs: RampJobs, folder: Path, name: str) -> None:
    if name == "constant_K":
        with pytest.raises(UnknownNameError, match="constant_K"):
            make_policy(name, RampVecEnv(1, jobs=jobs))
        return
    env = RampReplayEnv(jobs=jobs, law="A", horizon_s=3e4, mask="benchmark")
    obs, _ = env.reset(seed=0)
    policy = make_policy(name, env, folder=folder)
    taken = []
    for _ in range(10):
        action = policy.predict(obs, env.action_masks())
        taken.append(int(action))
        obs, *_ = env.step(np.int64(action))
    assert any(taken)


def test_the_policy_that_comes_with_the_package_blocks_less(jobs: RampJobs) -> None:
    """Half a stream, on seeds of no other use, against the best constant of law B."""
    seeds = range(400, 404)
    rates = {
        name: play(
            lambda env, name=name: make_policy(name, env),
            jobs,
            "B",
            seeds,
            horizon_s=3e5,
            mask="possible" if name == "learned" else "benchmark",
        ).blocking_rate
        for name in ("learned", "constant_16")
    }
    assert rates["learned"] < 0.9 * rates["constant_16"]
