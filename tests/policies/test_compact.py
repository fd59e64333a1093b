"""The pointer network without torch decides as it does with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from envs.ramp.jobs import RampJobs
from envs.ramp.vector import RampVecEnv
from envs.stream.env import JobStreamEnv
from policies.compact import CompactPointer, PointerDecider
from policies.pointer import PointerConfig, PointerNetwork, widths_of
from policies.stream.evaluation import StreamCase
from policies.stream.worlds import StreamWorld

#: A queue, so that the last action lets a job wait.
WORLD = StreamWorld(
    cluster="dgx-a100:3", models=("bert-large", "gpt2-xl", "vit-h"), max_waiting=2
)


def _random_network(env: Any, **config: Any) -> PointerNetwork:
    torch.manual_seed(3)
    network = PointerNetwork(
        env.graphs,
        env.device_graph,
        widths_of(env.observation_space),
        PointerConfig(**config),
    )
    with torch.no_grad():
        for part in network.parameters():
            part.add_(0.1 * torch.randn_like(part))
    return network


def _by_torch(network: PointerNetwork, obs: dict[str, Any]) -> NDArray[np.float32]:
    with torch.no_grad():
        logits, _ = network({n: torch.from_numpy(part) for n, part in obs.items()})
    found: NDArray[np.float32] = logits.numpy()
    return found


def _decisions(env: JobStreamEnv, count: int) -> dict[str, Any]:
    """Observations of an episode's first decisions, taken at random."""
    generator = np.random.default_rng(0)
    obs, _ = env.reset(seed=5)
    seen = []
    while len(seen) < count:
        seen.append(obs)
        action = generator.choice(np.flatnonzero(env.action_masks()))
        obs, *_ = env.step(np.int64(action))
    return {name: np.stack([one[name] for one in seen]) for name in obs}


@pytest.mark.parametrize("config", [{}, {"width": 8, "layers": 3, "hidden": 16}])
def test_logits_are_those_of_the_network_in_any_batch(config: dict[str, int]) -> None:
    env = StreamCase(world=WORLD, load=1.2, intervals=80.0).env(observe=True)
    network, obs = _random_network(env, **config), _decisions(env, 60)
    expected, compact = _by_torch(network, obs), CompactPointer(network)
    assert expected.std() > 0.1
    np.testing.assert_allclose(compact.logits(obs), expected, rtol=1e-5, atol=1e-5)
    for row in range(0, 60, 7):
        one = {name: part[row : row + 1] for name, part in obs.items()}
        np.testing.assert_allclose(
            compact.logits(one)[0], expected[row], rtol=1e-5, atol=1e-5
        )


def test_logits_are_those_of_the_network_in_the_replay(jobs: RampJobs) -> None:
    env = RampVecEnv(4, jobs=jobs, law=["A", "B"], horizon_s=1e5, seed=0)
    env.reset()
    for _ in range(20):
        env.step(env.action_masks().argmax(axis=1))
    network, (obs, masks) = _random_network(env), env.session.see()
    expected = _by_torch(network, obs)
    np.testing.assert_allclose(
        CompactPointer(network).logits(obs), expected, rtol=1e-5, atol=1e-5
    )
    best = np.where(masks, expected, -np.inf).argmax(axis=1)
    assert PointerDecider(network).predict(obs, masks).tolist() == best.tolist()


def test_what_the_devices_say_counts_where_it_has_weights() -> None:
    """Without weights for them they are not looked at; a single one is enough."""
    env = StreamCase(world=WORLD, load=1.2, intervals=80.0).env(observe=True)
    network, obs = _random_network(env), _decisions(env, 20)
    held = network.context.weight
    with torch.no_grad():
        held.zero_()
    blind = CompactPointer(network).logits(obs)
    np.testing.assert_allclose(blind, _by_torch(network, obs), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        held[:, : network.config.width] = 0.5
    found = CompactPointer(network).logits(obs)
    np.testing.assert_allclose(found, _by_torch(network, obs), rtol=1e-5, atol=1e-5)
    assert np.abs(found - blind).max() > 1e-3


def test_what_the_network_learns_later_is_not_seen() -> None:
    env = StreamCase(world=WORLD, load=1.2, intervals=80.0).env(observe=True)
    network, obs = _random_network(env), _decisions(env, 5)
    compact = CompactPointer(network)
    before = compact.logits(obs)
    with torch.no_grad():
        for part in network.parameters():
            part.add_(1.0)
    np.testing.assert_array_equal(compact.logits(obs), before)
