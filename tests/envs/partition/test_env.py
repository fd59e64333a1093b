"""One episode builds one plan: contracts, masks, rewards."""

from __future__ import annotations

import warnings
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3

import envs
from envs.partition.env import PartitionEnv
from planner.cost import CostModel
from planner.errors import (
    StrategyError,
    UnknownNameError,
)
from planner.search import get_partitioner, score
from planner.search.base import scores_of
from planner.space import StrategyTable, expand_meshes, legal
from tests.cost.made import device, hosts
from tests.envs.partition.playing import ROOM, WORLDS, env_of, play, quick_env
from tests.envs.partition.small import TINY, small_world


@pytest.fixture(scope="module")
def quick() -> PartitionEnv:
    """An environment of all small worlds; each test resets it."""
    return quick_env()


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
    env, rng = env_of(WORLDS[name], baselines=("plain",)), np.random.default_rng(0)
    for _ in range(4):
        actions, reward, info = play(env, rng)
        problem, candidate = env.problem, env.candidate
        assert candidate is not None
        strategy, cost = candidate.strategy, candidate.cost
        assert info["strategy"] == strategy
        table = StrategyTable.from_strategies([strategy])
        assert legal(table, problem.request.facts).all()
        assert cost.fits
        assert cost.fidelity == "simulated"
        free = problem.request.context.cluster.free
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
    env = env_of()
    play(env, np.random.default_rng(1))
    candidate, request = env.candidate, env.problem.request
    assert candidate is not None
    order = np.array(candidate.strategy.device_ids())
    model = CostModel(replace(request.context, order=order))
    alone = model.cost(candidate.strategy).step_time_s
    assert candidate.cost.step_time_s == pytest.approx(alone, rel=1e-12)


def test_closed_forms_take_the_best_row_of_the_mesh(quick: PartitionEnv) -> None:
    rng = np.random.default_rng(2)
    for world in WORLDS.values():
        actions, reward, info = play(quick, rng, options={"world": world})
        request = quick.problem.request
        rows = expand_meshes(
            quick.problem.choices.mesh[[actions[0]]], request.facts, request.pins
        )
        order = np.array(info["order"])
        costs = CostModel(replace(request.context, order=order)).table(rows)
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
        subset = problem.choices.subsets[problem.choices.subset[choice]]
        rows = expand_meshes(problem.choices.mesh[[choice]], request.facts)
        fits = False
        for order in problem.groups.orders(subset.sequences, subset.count):
            if len(rows):
                context = replace(request.context, order=order)
                fits |= bool(CostModel(context).table(rows).fits.any())
        assert masks[choice] == fits
    assert 0 < masks.sum() < many


def test_groups_are_masked_once_they_are_taken(quick: PartitionEnv) -> None:
    quick.reset(options={"world": WORLDS["all"]})
    whole = [
        at
        for at in np.flatnonzero(quick.action_masks()).tolist()
        if quick.problem.choices.subset[at] == 0
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
        env_of(baselines=names)
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
        env_of(baselines=("exprt",)).reset()


def test_a_baseline_may_be_priced_by_closed_forms() -> None:
    env = env_of(fidelity="analytic", baselines=("expert",))
    _, info = env.reset()
    request = env.problem.request
    found = get_partitioner("expert").search(request).candidates[0].strategy
    table = StrategyTable.from_strategies([found])
    context = replace(request.context, order=np.array(found.device_ids()))
    wanted = CostModel(context).table(table).step_time_s[0]
    assert info["baseline"] == {"name": "expert", "score": pytest.approx(wanted)}


def test_what_is_masked_ends_the_episode_with_the_baselines_plan() -> None:
    env = env_of()
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
    env = env_of(world, baselines=("plain",))
    rng, met = np.random.default_rng(0), set()
    for _ in range(40):
        _, reward, info = play(env, rng)
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
    ends = [play(env, np.random.default_rng(5), seed=2) for env in (quick, other)]
    assert ends[0] == ends[1]


def test_the_same_actions_build_the_same_plan(quick: PartitionEnv) -> None:
    ends = [play(quick, np.random.default_rng(5), seed=8) for _ in range(2)]
    assert ends[0] == ends[1]


def test_too_many_meshes_are_thinned() -> None:
    env = env_of(WORLDS["any"], max_meshes=24, fidelity="analytic")
    whole = env_of(WORLDS["any"], max_meshes=400, fidelity="analytic")
    env.reset()
    whole.reset()
    some, every = env.problem.choices, whole.problem.choices
    assert len(some) == 24 < len(every)
    # Of every subset of which anything is legal.
    fitting = every.subset[whole.problem.fits]
    assert set(some.subset.tolist()) == set(fitting.tolist())
    assert env.problem.fits.all()
    offered = set(map(tuple, np.c_[some.subset, some.mesh].tolist()))
    assert offered <= set(map(tuple, np.c_[every.subset, every.mesh].tolist()))
    _, reward, info = play(env, np.random.default_rng(0))
    assert info["built"] == "own"
    assert reward >= -2.0


def test_where_only_meshes_that_were_left_out_fit_they_are_offered() -> None:
    tight = hosts((3, 2, device(memory_bytes=1.67e9)))
    world = small_world(name="tight", cluster=tight.document)
    whole = env_of(world, fidelity="analytic", baselines=("plain",))
    whole.reset()
    fitting = int(whole.action_masks().sum())
    assert 0 < fitting < len(whole.problem.choices)
    for most in (1, 2):
        env = env_of(world, max_meshes=most, fidelity="analytic", baselines=("plain",))
        env.reset()
        assert env.action_masks()[:most].any()
