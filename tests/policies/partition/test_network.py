"""Logits that depend on the problem, not on how it is written down."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from envs.partition.env import PartitionEnv
from envs.partition.ordering import STEP_FEATURES
from envs.partition.padding import Sizes, pad
from planner.errors import StrategyError
from policies.partition.network import NetworkConfig, PartitionNetwork
from policies.partition.ppo import encode_padded, padded_logits
from tests.envs.partition.small import small_world, uneven_machines
from tests.policies.partition.made import example_of, network, renumbered, site_world

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@torch.no_grad()
def test_meshes_are_scored_each_by_itself() -> None:
    net, seen = network(), example_of(site_world()).seen
    encoded = net.encode(seen)
    whole = net.mesh_logits(seen, encoded)
    order = np.random.default_rng(0).permutation(len(seen.meshes))
    permuted = net.mesh_logits(replace(seen, meshes=seen.meshes[order]), encoded)
    torch.testing.assert_close(permuted, whole[order], **CLOSE)
    few = net.mesh_logits(replace(seen, meshes=seen.meshes[:3]), encoded)
    torch.testing.assert_close(few, whole[:3], **CLOSE)
    assert whole.std() > 0


@pytest.mark.parametrize("graphs", [True, False])
@torch.no_grad()
def test_renumbering_groups_permutes_what_is_said_of_them(graphs: bool) -> None:
    net = network(graphs=graphs)
    seen = example_of(small_world(cluster=uneven_machines().document)).seen
    rng = np.random.default_rng(1)
    groups = rng.permutation(len(seen.groups))
    other = renumbered(seen, groups)
    first, second = net.encode(seen), net.encode(other)
    torch.testing.assert_close(second.world, first.world, **CLOSE)
    torch.testing.assert_close(second.groups, first.groups[groups], **CLOSE)
    assert bool(first.groups.any()) == graphs
    torch.testing.assert_close(
        net.mesh_logits(other, second), net.mesh_logits(seen, first), **CLOSE
    )
    choice = torch.tensor([0, 2])
    steps = torch.from_numpy(
        rng.normal(size=(2, len(groups), STEP_FEATURES)).astype(np.float32)
    )
    logits = net.step_logits(net.bases(seen, first, choice), steps)
    moved = net.step_logits(net.bases(other, second, choice), steps[:, groups])
    torch.testing.assert_close(moved, logits[:, groups], **CLOSE)


@torch.no_grad()
def test_graphs_are_read() -> None:
    net, seen = network(), example_of(site_world()).seen
    cut = replace(seen, group_edges=seen.group_edges[:, :2])
    assert not torch.allclose(net.encode(seen).groups, net.encode(cut).groups)
    deaf = network(graphs=False)
    assert torch.equal(deaf.encode(seen).world, deaf.encode(cut).world)


@torch.no_grad()
def test_padding_and_neighbours_in_a_batch_change_nothing() -> None:
    net = network()
    problems = [
        example_of(world).seen
        for world in (site_world(), small_world(), site_world(3, global_batch=6))
    ]
    rooms = [Sizes(units=7, groups=5, meshes=70), Sizes(units=30, groups=9, meshes=99)]
    rng = np.random.default_rng(0)
    for sizes in rooms:
        padded = [pad(seen, sizes) for seen in problems]
        for obs, seen in zip(padded, problems, strict=True):
            shape = seen.groups.shape[0], STEP_FEATURES
            obs["steps"][: shape[0]] = rng.normal(size=shape)
            obs["chosen"][0] = rng.integers(len(seen.meshes))
        batch = {
            name: torch.from_numpy(np.stack([obs[name] for obs in padded]))
            for name in padded[0]
        }
        groups, world = encode_padded(net, batch)
        meshes, steps, same = padded_logits(net, batch)
        assert torch.equal(same, world)
        for at, seen in enumerate(problems):
            encoded = net.encode(seen)
            many = len(seen.groups)
            torch.testing.assert_close(world[at], encoded.world, **CLOSE)
            torch.testing.assert_close(groups[at, :many], encoded.groups, **CLOSE)
            wanted = net.mesh_logits(seen, encoded)
            torch.testing.assert_close(meshes[at, : len(wanted)], wanted, **CLOSE)
            chosen = batch["chosen"][at].long()
            bases = net.bases(seen, encoded, chosen)
            wanted = net.step_logits(bases, batch["steps"][at : at + 1, :many])[0]
            torch.testing.assert_close(steps[at, :many], wanted, **CLOSE)


@torch.no_grad()
def test_the_environment_shows_what_the_network_would_see() -> None:
    net, world = network(), site_world()
    env = PartitionEnv(
        [world],
        max_units=16,
        max_groups=8,
        max_meshes=64,
        fidelity="analytic",
        baselines=("plain",),
    )
    obs, _ = env.reset()
    batch = {name: torch.from_numpy(part)[None] for name, part in obs.items()}
    meshes, _, _ = padded_logits(net, batch)
    seen = env.problem.seen
    wanted = net.mesh_logits(seen, net.encode(seen))
    torch.testing.assert_close(meshes[0, : len(wanted)], wanted, **CLOSE)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(StrategyError, match="width=0, layers=2"):
        NetworkConfig(width=0)
    # The description of weights may be damaged; 10 TB of weights are not made first.
    with pytest.raises(StrategyError, match="width=10000000, layers=2"):
        NetworkConfig(width=10_000_000)
    with pytest.raises(StrategyError, match="layers=65"):
        NetworkConfig(layers=65)
    assert PartitionNetwork().config == NetworkConfig()
