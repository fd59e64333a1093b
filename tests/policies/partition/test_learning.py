"""Losses that go down, of meshes and of orders, and training in the environment."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from planner.errors import NoFeasiblePlanError, StrategyError
from policies.partition.decoding import draw_orders
from policies.partition.examples import Example, prepare_example
from policies.partition.learning import mesh_regret, study
from policies.partition.network import PartitionNetwork
from policies.partition.ppo import PartitionPPOConfig, reinforce
from policies.partition.settings import LearningConfig
from tests.cost.made import device, hosts
from tests.envs.partition.small import small_world
from tests.policies.partition.made import example_of, network, site_world


def test_an_example_holds_the_prices_of_its_meshes() -> None:
    example = example_of(small_world())
    assert len(example.score) == len(example.priced) == len(example.choices)
    layouts = example.pricer.layouts
    assert len(layouts) <= 32
    assert (example.score[layouts.choice] == layouts.score).all()
    assert layouts.score[0] == example.score.min()
    assert len(example.seen.meshes) == len(example.choices)


def test_a_world_that_nothing_fits_teaches_nothing() -> None:
    full = hosts((1, 2, device(memory_bytes=1e6)))
    world = small_world(cluster=full.document)
    assert prepare_example(world, np.random.default_rng(0)) is None


def test_meshes_are_learned_by_studying_them_again_and_again() -> None:
    net, example = network(), example_of(site_world())
    before = {name: part.clone() for name, part in net.state_dict().items()}
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    config, rng = LearningConfig(), np.random.default_rng(0)
    regret = mesh_regret(net, example, (1, 10_000))
    losses = []
    for _ in range(60):
        learned = study(net, example, config, rng, orders=False)
        optimizer.zero_grad()
        learned.loss.backward()
        optimizer.step()
        losses.append(learned.mesh_loss)
    assert losses[-1] < losses[0] - 0.5
    assert (learned.reward, learned.best) == (None, None)
    after = mesh_regret(net, example, (1, 10_000))
    assert after[0] <= regret[0]
    # All of them have the best among them.
    assert regret[1] == after[1] == 0.0
    changed = [k for k, part in net.state_dict().items() if (part != before[k]).any()]
    assert any(name.startswith("mesh") for name in changed)
    assert not any(name.startswith(("step", "point")) for name in changed)


def test_the_loss_is_least_where_wanted_meshes_are_likely() -> None:
    """Its lower bound is the entropy of what is wanted."""
    example, config = example_of(site_world()), LearningConfig()
    ratio = np.log(example.score / example.score.min())
    wanted = np.exp(-ratio / config.softness)
    wanted /= wanted.sum()
    some = wanted[wanted > 0]
    least = float(-(some * np.log(some)).sum())
    rng = np.random.default_rng(0)
    for seed in range(3):
        learned = study(network(seed), example, config, rng, orders=False)
        assert learned.mesh_loss > least


def _mean_price(net: PartitionNetwork, example: Example, layout: int) -> float:
    many = 64
    drawn = draw_orders(
        net,
        example.seen,
        net.encode(example.seen),
        example.groups,
        example.choices,
        np.full(many, example.pricer.layouts.choice[layout]),
        np.random.default_rng(7),
    )
    priced = example.pricer.price(np.full(many, layout), drawn.sequence)
    return float(np.log(priced.score).mean())


def test_orders_are_learned_from_what_they_cost() -> None:
    net, example = network(), example_of(site_world(6, global_batch=12))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    config, rng = LearningConfig(meshes=4, draws=16), np.random.default_rng(0)
    picked = range(min(4, len(example.pricer.layouts)))
    before = np.mean([_mean_price(net, example, at) for at in picked])
    for _ in range(40):
        learned = study(net, example, config, rng, orders=True)
        optimizer.zero_grad()
        learned.loss.backward()
        optimizer.step()
    assert learned.reward is not None
    assert learned.best is not None
    assert learned.reward <= learned.best
    after = np.mean([_mean_price(net, example, at) for at in picked])
    assert after < before - 0.02


def test_a_lone_group_has_no_order_to_learn() -> None:
    example = example_of(small_world(cluster=hosts((1, 4, device())).document))
    rng = np.random.default_rng(0)
    learned = study(network(), example, LearningConfig(), rng, orders=True)
    assert learned.reward is None
    assert torch.isfinite(learned.loss)


TINY = PartitionPPOConfig(num_envs=2, n_steps=32, batch_size=32, learning_rate=1e-3)
ROOM = {"max_units": 16, "max_groups": 8, "max_meshes": 48}


def test_ppo_begins_with_a_networks_weights_and_changes_them() -> None:
    worlds = [small_world(), site_world(), site_world(3, global_batch=6)]
    ends = []
    for _ in range(2):
        net = network()
        before = {name: part.clone() for name, part in net.state_dict().items()}
        episodes = reinforce(
            net, worlds, steps=128, seed=1, config=TINY, fidelity="analytic", **ROOM
        )
        assert len(episodes.rewards) == len(episodes.worlds) > 10
        assert set(episodes.worlds) == {world.name for world in worlds}
        assert min(episodes.rewards) >= -2.0
        state = net.state_dict()
        moved = {k: float((state[k] - before[k]).abs().max()) for k in state}
        for part in ("units", "devices", "mesh", "group", "context", "step", "point"):
            assert any(v > 1e-5 for k, v in moved.items() if k.startswith(part)), part
        # Small steps from where it began, not a new network.
        assert max(moved.values()) < 0.1
        ends.append((episodes.rewards, {k: v.clone() for k, v in state.items()}))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(part, ends[1][1][k]) for k, part in ends[0][1].items())


@pytest.mark.slow
def test_ppo_comes_closer_to_the_baseline() -> None:
    net = network(width=16, hidden=32)
    config = PartitionPPOConfig(
        num_envs=4, n_steps=128, batch_size=128, learning_rate=3e-3
    )
    episodes = reinforce(
        net,
        [small_world(), site_world()],
        steps=5_000,
        seed=0,
        config=config,
        fidelity="analytic",
        baselines=("plain",),
        **ROOM,
    )
    assert np.mean(episodes.rewards[-200:]) > np.mean(episodes.rewards[:200]) + 0.2


def test_training_that_makes_no_sense_is_refused() -> None:
    net = network()
    with pytest.raises(StrategyError, match="steps=0 of training"):
        reinforce(net, [small_world()], steps=0, seed=0)
    with pytest.raises(StrategyError, match="n_epochs=0 of training"):
        PartitionPPOConfig(n_epochs=0)
    with pytest.raises(StrategyError, match="learning_rate=-1"):
        PartitionPPOConfig(learning_rate=-1)
    with pytest.raises(StrategyError, match="needs at least 2 decisions"):
        PartitionPPOConfig(num_envs=1, n_steps=1)
    full = hosts((1, 2, device(memory_bytes=1e6)))
    world = small_world(cluster=full.document)
    with pytest.raises(NoFeasiblePlanError):
        reinforce(net, [world], steps=4, seed=0, config=TINY, **ROOM)
