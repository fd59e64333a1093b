"""Worlds without room, settings and uses of an environment that make no sense."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from envs.partition.env import PartitionEnv
from envs.partition.sampler import WorldSampler
from envs.partition.world import World
from planner.cluster import Cluster
from planner.errors import (
    NoFeasiblePlanError,
    PlanFileError,
    StrategyError,
    TopologyError,
    UnknownNameError,
)
from tests.cost.made import device, hosts
from tests.envs.partition.playing import ROOM, WORLDS, env_of, play, quick_env
from tests.envs.partition.small import TINY, small_world


@pytest.fixture(scope="module")
def quick() -> PartitionEnv:
    """An environment of all small worlds; each test resets it."""
    return quick_env()


def test_a_sampler_passes_over_what_there_is_no_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    big = small_world(name="big", cluster="dgx-h100:8")
    full = small_world(
        name="full",
        cluster=hosts((1, 2, device(memory_bytes=1e6))).document,
    )
    drawn = [big, full, WORLDS["one device"]]
    monkeypatch.setattr(WorldSampler, "world", lambda _, index: drawn[index % 3])
    sampler = WorldSampler(kinds=("uniform",), split="train")
    env = PartitionEnv(sampler, **ROOM, fidelity="analytic")
    for seed in range(3):
        assert env.reset(seed=seed)[1]["world"] == "one"
    drawn[2] = big
    env = PartitionEnv(sampler, **ROOM, fidelity="analytic")
    with pytest.raises(StrategyError, match="of 100 worlds drawn none can be taken"):
        env.reset(seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_meshes": 0}, "max_meshes=0 of an environment is at least 1"),
        ({"fidelity": "exact"}, "fidelity 'exact'"),
        ({"worst": 0.0}, "worst=0.0 of the rewards is below 0"),
        ({"pool": 0}, "pool=0 of worlds is at least 1"),
        ({"worlds": []}, "worlds is empty; give at least one world"),
    ],
)
def test_settings_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises((StrategyError, UnknownNameError), match=re.escape(message)):
        PartitionEnv(**{"worlds": [WORLDS["all"]], **options})


def test_use_in_the_wrong_order_and_out_of_range() -> None:
    env = env_of(fidelity="analytic")
    assert env.action_masks().sum() == 1
    with pytest.raises(StrategyError, match="no episode has begun; call reset"):
        env.step(np.int64(0))
    env.reset()
    with pytest.raises(StrategyError, match="action=54 is not from 0 to 53"):
        env.step(np.int64(54))
    with pytest.raises(StrategyError, match=r"'seeds'. is unknown; there is 'world'"):
        env.reset(options={"seeds": 1})
    roomy = small_world(cluster="dgx-h100:8")
    wanted = "8 groups do not fit max_groups=6 of the environment; make it with"
    with pytest.raises(StrategyError, match=wanted):
        env.reset(options={"world": roomy})


def test_devices_with_hardly_any_memory_are_left_out_or_named() -> None:
    crumbs = device("crumbs", memory_bytes=1.0)
    mixed = hosts((1, 2, device()), (2, 2, crumbs))
    env = env_of(small_world(cluster=mixed.document))
    _, _, info = play(env, np.random.default_rng(0))
    assert set(info["order"]) <= {0, 1}
    world = small_world(cluster=hosts((2, 2, crumbs)).document)
    with pytest.raises(NoFeasiblePlanError, match=r"none of .* fits in memory"):
        env.reset(options={"world": world})


def test_clusters_that_cannot_be_described() -> None:
    rate, wait = np.full((3, 3), 1e10), np.full((3, 3), 1e-5)
    rate[2, :2] = rate[:2, 2] = 0.0
    with pytest.raises(TopologyError, match="missing link from device 0 to device 2"):
        Cluster.from_matrices(rate, wait, device())
    data = small_world().to_data()
    data["cluster"]["device_types"][0]["memory_bytes"] = 0
    with pytest.raises(PlanFileError, match="memory_bytes"):
        World.from_data(data)


def test_a_model_of_one_block_and_more_devices_than_it_divides(
    quick: PartitionEnv,
) -> None:
    config = {**TINY, "num_hidden_layers": 1}
    world = small_world(model=config, global_batch=2, devices="any")
    for seed in range(3):
        _, _, info = play(quick, np.random.default_rng(seed), options={"world": world})
        assert info["built"] == "own"
        units = quick.problem.request.facts.num_units
        assert info["row"]["pp"] * info["row"]["virtual_stages"] <= units
