"""One episode builds one plan: contracts, masks, rewards, bad input."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3

import envs
from envs.partition.env import PartitionEnv
from envs.partition.sampler import WorldSampler
from envs.partition.world import World
from planner.cluster import Cluster
from planner.cost import CostModel
from planner.errors import (
    NoFeasiblePlanError,
    PlanFileError,
    StrategyError,
    TopologyError,
    UnknownNameError,
)
from planner.search import get_partitioner, score
from planner.search.arranging.mended import scores_of
from planner.space import StrategyTable, expand_meshes, legal
from tests.cost.made import device, hosts
from tests.envs.partition.small import TINY, small_world, uneven_machines
from tests.search.arranging.made import far_sites

ROOM = {"max_units": 16, "max_groups": 6, "max_meshes": 48}
WORLDS = {
    "all": small_world(),
    "any": small_world(name="any", devices="any", objective="throughput_per_device"),
    "occupied": small_world(
        name="occupied",
        cluster=uneven_machines().with_occupied([0, 4, 5, 8]).document,
    ),
    "sites": small_world(name="sites", cluster=far_sites(5, 2).document),
    "one device": small_world(
        name="one", cluster=hosts((1, 1, device())).document, objective="memory"
    ),
}


def _env(*worlds: World, **options: Any) -> PartitionEnv:
    return PartitionEnv(worlds or [WORLDS["all"]], **{**ROOM, **options})


@pytest.fixture(scope="module")
def quick() -> PartitionEnv:
    """All of the worlds, by closed forms; tests reset it as they like."""
    return _env(*WORLDS.values(), fidelity="analytic", baselines=("plain",))


def _play(
    env: PartitionEnv, rng: np.random.Generator, **reset: Any
) -> tuple[list[int], float, dict[str, Any]]:
    """An episode of random actions that are allowed."""
    obs, info = env.reset(**reset)
    actions: list[int] = []
    ended, reward = False, 0.0
    while not ended:
        masks = env.action_masks()
        assert masks.any()
        assert reward == 0.0
        assert env.observation_space.contains(obs)
        assert bool(obs["phase"][0]) == bool(actions)
        assert (obs["left"] > 0).any() == bool(actions)
        actions.append(int(rng.choice(np.flatnonzero(masks))))
        obs, reward, ended, truncated, info = env.step(np.int64(actions[-1]))
        assert not truncated
    assert env.observation_space.contains(obs)
    assert env.action_masks().any()
    return actions, reward, info


def test_contracts_of_gymnasium_and_stable_baselines3() -> None:
    assert envs.__all__ == []
    made = gymnasium.make("meshwright/Partition-v0", worlds=[WORLDS["all"]], **ROOM)
    check_env(made.unwrapped, skip_render_check=True)
    with warnings.catch_warnings():
        # It recommends flat observations; a graph network reads tables.
        warnings.filterwarnings("ignore", message=".*unconventional shape")
        check_env_for_sb3(made.unwrapped)


@pytest.mark.parametrize("name", WORLDS)
def test_whatever_is_allowed_builds_a_legal_plan_that_fits(name: str) -> None:
    env, rng = _env(WORLDS[name], baselines=("plain",)), np.random.default_rng(0)
    for _ in range(4):
        actions, reward, info = _play(env, rng)
        problem, candidate = env.problem, env.candidate
        assert candidate is not None
        strategy, cost = candidate.strategy, candidate.cost
        assert info["strategy"] == strategy
        table = StrategyTable.from_strategies([strategy])
        assert legal(table, problem.request.facts).all()
        assert cost.fits
        assert cost.fidelity == "simulated"
        free = problem.request.setting.cluster.free
        assert set(strategy.device_ids()) <= set(free)
        value = score(cost, strategy.mesh.num_devices, problem.request.objective)
        assert info["score"] == value
        assert info["step_time_s"] == cost.step_time_s
        if info["built"] == "own":
            wanted = np.log(problem.baseline.score / value)
            assert reward == pytest.approx(max(-2.0, wanted))
            order = problem.groups.orders(
                np.array([a - 48 for a in actions[1:]])[None, :],
                strategy.mesh.num_devices,
            )[0]
            assert strategy.device_ids() == tuple(order.tolist()) == info["order"]
            assert info["mesh"] == problem.mesh(actions[0])
            assert strategy.mesh.pp == info["mesh"]["pp"] == info["row"]["pp"]
        else:
            assert reward == -2.0


def test_prices_are_those_of_the_cost_model() -> None:
    env = _env()
    _play(env, np.random.default_rng(1))
    candidate, request = env.candidate, env.problem.request
    assert candidate is not None
    order = np.array(candidate.strategy.device_ids())
    model = CostModel(replace(request.setting, order=order))
    alone = model.cost(candidate.strategy).step_time_s
    assert candidate.cost.step_time_s == pytest.approx(alone, rel=1e-12)


def test_closed_forms_take_the_best_row_of_the_mesh(quick: PartitionEnv) -> None:
    rng = np.random.default_rng(2)
    for world in WORLDS.values():
        actions, reward, info = _play(quick, rng, options={"world": world})
        request = quick.problem.request
        rows = expand_meshes(
            quick.problem.choices.mesh[[actions[0]]], request.facts, request.pins
        )
        order = np.array(info["order"])
        costs = CostModel(replace(request.setting, order=order)).table(rows)
        best = scores_of(costs, rows, request.objective).min()
        assert info["score"] == pytest.approx(best, rel=1e-12)
        assert info["strategy"] is None
        assert quick.candidate is None
        wanted = np.log(quick.problem.baseline.score / best)
        assert reward == pytest.approx(max(-2.0, wanted))


def test_meshes_that_cannot_fit_are_masked_and_no_others(quick: PartitionEnv) -> None:
    tight = hosts((3, 2, device(memory_bytes=1.67e9)))
    world = small_world(name="tight", cluster=tight.document)
    quick.reset(options={"world": world})
    problem, request = quick.problem, quick.problem.request
    masks = quick.action_masks()
    many = len(problem.choices)
    assert not masks[many:].any()
    for choice in range(many):
        fleet = problem.choices.fleets[problem.choices.fleet[choice]]
        rows = expand_meshes(problem.choices.mesh[[choice]], request.facts)
        fits = False
        for order in problem.groups.orders(fleet.sequences, fleet.count):
            if len(rows):
                setting = replace(request.setting, order=order)
                fits |= bool(CostModel(setting).table(rows).fits.any())
        assert masks[choice] == fits
    assert 0 < masks.sum() < many


def test_groups_are_masked_once_they_are_taken(quick: PartitionEnv) -> None:
    quick.reset(options={"world": WORLDS["all"]})
    whole = [
        at
        for at in np.flatnonzero(quick.action_masks()).tolist()
        if quick.problem.choices.fleet[at] == 0
    ]
    quick.step(np.int64(whole[0]))
    for placed, group in ((4, 1), (6, 2), (9, 3)):
        assert quick.action_masks()[48 + group]
        obs, *_, ended, _, info = quick.step(np.int64(48 + group))
        assert not quick.action_masks()[48 + group]
        assert not ended
        assert info["placed"] == placed
        assert obs["left"][group] == 0
    assert info["groups"] == (1, 2, 3)
    *_, ended, _, info = quick.step(np.int64(48))
    assert ended
    # Twelve of thirteen devices are used.
    assert info["order"] == (4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 1, 2)


def test_the_baseline_is_the_best_of_those_named() -> None:
    both, expert, plain = (
        _env(baselines=names)
        for names in (("expert", "plain"), ("expert",), ("plain",))
    )
    scores = []
    for env in (both, expert, plain):
        _, info = env.reset()
        scores.append(info["baseline"]["score"])
        assert env.problem.baseline.candidate is not None
    assert scores[0] == min(scores)
    found = get_partitioner("expert").search(both.problem.request).candidates[0]
    assert scores[1] == found.cost.step_time_s
    with pytest.raises(UnknownNameError, match="partitioner 'exprt'"):
        _env(baselines=("exprt",)).reset()


def test_a_baseline_may_be_priced_by_closed_forms() -> None:
    env = _env(fidelity="analytic", baselines=("expert",))
    _, info = env.reset()
    request = env.problem.request
    found = get_partitioner("expert").search(request).candidates[0].strategy
    table = StrategyTable.from_strategies([found])
    setting = replace(request.setting, order=np.array(found.device_ids()))
    wanted = CostModel(setting).table(table).step_time_s[0]
    assert info["baseline"] == {"name": "expert", "score": pytest.approx(wanted)}


def test_what_is_masked_ends_the_episode_with_the_baselines_plan() -> None:
    env = _env()
    env.reset()
    masks = env.action_masks()
    obs, reward, ended, _, info = env.step(np.int64(np.flatnonzero(~masks)[0]))
    assert ended
    assert reward == env.worst
    assert info["built"] == "masked"
    assert env.candidate == env.problem.baseline.candidate
    assert info["score"] == info["baseline"]["score"]
    assert env.observation_space.contains(obs)
    with pytest.raises(StrategyError, match="the episode has ended; call reset"):
        env.step(np.int64(0))


def test_an_order_in_which_nothing_fits_gets_the_worst_reward() -> None:
    """The roomy device fits what any stage holds; what overflows is never built."""
    small = device("small", memory_bytes=1.77e9)
    cluster = hosts((1, 1, device()), (1, 1, small), (1, 1, device()))
    config = {**TINY, "hidden_size": 512, "intermediate_size": 2048}
    world = small_world(
        cluster=cluster.document, model=config, seq_len=256, global_batch=8
    )
    env = _env(world, baselines=("plain",))
    rng, met = np.random.default_rng(0), set()
    for _ in range(40):
        _, reward, info = _play(env, rng)
        met.add(info["built"])
        assert env.candidate is not None
        assert env.candidate.cost.fits
        if info["built"] == "overflow":
            assert reward == env.worst
            assert env.candidate == env.problem.baseline.candidate
    assert met == {"own", "overflow"}


def test_seeds_say_which_worlds_come(quick: PartitionEnv) -> None:
    def names(seed: int) -> list[str]:
        found = [quick.reset(seed=seed)[1]["world"]]
        return found + [quick.reset()[1]["world"] for _ in range(9)]

    assert names(3) == names(3)
    assert names(3) != names(4)
    assert len(set(names(3))) > 2


def test_environments_that_are_alike_share_what_is_ready(quick: PartitionEnv) -> None:
    other = quick.alike()
    for env in (quick, other):
        env.reset(options={"world": WORLDS["sites"]})
    assert other.problem is quick.problem
    assert other.observation_space == quick.observation_space
    mesh = np.flatnonzero(quick.action_masks())[0]
    quick.step(np.int64(mesh))
    assert other.action_masks()[mesh]
    ends = [_play(env, np.random.default_rng(5), seed=2) for env in (quick, other)]
    assert ends[0] == ends[1]


def test_the_same_actions_build_the_same_plan(quick: PartitionEnv) -> None:
    ends = [_play(quick, np.random.default_rng(5), seed=8) for _ in range(2)]
    assert ends[0] == ends[1]


def test_too_many_meshes_are_thinned() -> None:
    env = _env(WORLDS["any"], max_meshes=24, fidelity="analytic")
    whole = _env(WORLDS["any"], max_meshes=400, fidelity="analytic")
    env.reset()
    whole.reset()
    some, every = env.problem.choices, whole.problem.choices
    assert len(some) == 24 < len(every)
    # Of every fleet of which anything is legal.
    fitting = every.fleet[whole.problem.fits]
    assert set(some.fleet.tolist()) == set(fitting.tolist())
    assert env.problem.fits.all()
    offered = set(map(tuple, np.c_[some.fleet, some.mesh].tolist()))
    assert offered <= set(map(tuple, np.c_[every.fleet, every.mesh].tolist()))
    _, reward, info = _play(env, np.random.default_rng(0))
    assert info["built"] == "own"
    assert reward >= -2.0


def test_where_only_meshes_that_were_left_out_fit_they_are_offered() -> None:
    tight = hosts((3, 2, device(memory_bytes=1.67e9)))
    world = small_world(name="tight", cluster=tight.document)
    whole = _env(world, fidelity="analytic", baselines=("plain",))
    whole.reset()
    fitting = int(whole.action_masks().sum())
    assert 0 < fitting < len(whole.problem.choices)
    for most in (1, 2):
        env = _env(world, max_meshes=most, fidelity="analytic", baselines=("plain",))
        env.reset()
        assert env.action_masks()[:most].any()


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
    env = _env(fidelity="analytic")
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
    env = _env(small_world(cluster=mixed.document))
    _, _, info = _play(env, np.random.default_rng(0))
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
        _, _, info = _play(quick, np.random.default_rng(seed), options={"world": world})
        assert info["built"] == "own"
        units = quick.problem.request.facts.num_units
        assert info["row"]["pp"] * info["row"]["virtual_stages"] <= units
