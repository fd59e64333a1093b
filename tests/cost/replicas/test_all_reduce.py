"""Exposed gathers and reductions by hand, and the update of the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cluster import AxisLevel
from planner.cost.recipes import Recipe
from planner.cost.replicas.all_reduce import (
    ReplicaRows,
    ReplicaTraffic,
    replica_traffic,
)
from planner.cost.traffic.collectives import Groups, replica_groups
from planner.schema import Precision
from planner.schema.strategy_parts import ShardTraffic
from planner.simulate.bucket_order import next_forward_wait_s
from tests.cost.made import device, hosts, setting_for, uniform_graph

#: 1e9 scalars: 2 GB gathered, 4 GB reduced; 4 ways at 100 GB/s take 3/4 of S/B.
GATHER, SCATTER = 0.75 * 2e9 / 1e11, 0.75 * 4e9 / 1e11
HIDDEN = Recipe(name="all", overlap=1.0)
NEVER = Recipe(name="none", overlap=0.0)


def groups(members: int) -> Groups:
    level = AxisLevel(
        members=members, bandwidth_bytes_per_s=1e11, latency_s=0.0, name="x"
    )
    return Groups.from_levels([[level] if members > 1 else []])


def traffic(
    zero: int,
    many: int = 1,
    pp: int = 1,
    replicas: int = 1,
    recipe: Recipe = NEVER,
    on_gpu: bool = True,
    first: float = 0.0,
    shards: ShardTraffic | None = None,
    **changes: Any,
) -> ReplicaTraffic:
    rows: dict[str, Any] = {
        "scalars": np.array([1e9]),
        "trained": np.array([1e9]),
        "units": np.array([10.0]),
        "zero_stage": np.array([zero]),
        "pp": np.array([pp]),
        "num_microbatches": np.array([many]),
        "virtual_stages": np.array([1]),
        "forward_s": np.array([0.01]),
        "backward_s": np.array([0.02]),
        "whole": np.array([zero == 0 and pp == 1 and replicas > 1]),
    }
    shared = replica_groups(
        groups(4 if zero else 1),
        groups(replicas),
        recipe,
        on_gpu=on_gpu,
        near=None if shards is None else groups(shards.second_copy),
    )
    return replica_traffic(
        ReplicaRows(**{**rows, **changes}),
        shared,
        Precision(),
        recipe,
        on_gpu=on_gpu,
        first=first,
        shards=shards,
    )


@pytest.mark.parametrize(
    ("zero", "many", "gathers", "scatters"),
    [(0, 3, 0, 0), (1, 3, 1, 1), (2, 3, 1, 3), (3, 3, 6, 3), (3, 1, 2, 1)],
)
def test_rounds_without_a_pipeline(
    zero: int, many: int, gathers: int, scatters: int
) -> None:
    found = traffic(zero, many)
    assert found.gathered_bytes == gathers * 2e9
    assert found.scattered_bytes == scatters * 4e9
    assert found.sent_bytes == pytest.approx(0.75 * (gathers * 2e9 + scatters * 4e9))
    assert found.exposed_s == pytest.approx(gathers * GATHER + scatters * SCATTER)


def test_all_gathers_but_the_first_are_from_a_second_copy() -> None:
    # Two microbatches: of 2 GB 3/4 travel in the first forward, then 1/2 three times.
    second = ShardTraffic(second_copy=2)
    found = traffic(3, many=2, shards=second)
    near = 0.5 * 2e9 / 1e11
    assert found.exposed_s == pytest.approx(GATHER + 3 * near + 2 * SCATTER)
    assert found.gathered_bytes == 4 * 2e9
    sent = 0.75 * 2e9 + 3 * 0.5 * 2e9 + 2 * 0.75 * 4e9
    assert found.sent_bytes == pytest.approx(sent)
    # 20 and 10 ms of gathers and reductions under 10 ms of forward, 20 of backward.
    hidden = traffic(3, many=2, recipe=HIDDEN, shards=second)
    first, later = GATHER - 0.01, max(near - 0.01, 0)
    behind = near + SCATTER - 0.02
    assert hidden.exposed_s == pytest.approx(first + later + 2 * behind)


def test_fewer_bits_are_fewer_bytes_between_shards_alone() -> None:
    fewer = ShardTraffic(second_copy=4, weight_bits=8, gradient_bits=4)
    found = traffic(3, replicas=2, shards=fewer)
    assert found.gathered_bytes == 2 * 1e9
    assert found.scattered_bytes == 0.5e9
    # Replicas still sum what they hold in float32.
    assert found.reduced_bytes == traffic(3, replicas=2).reduced_bytes
    whole = traffic(3, replicas=2).exposed_s
    saved = 2 * GATHER / 2 + SCATTER * 7 / 8
    assert found.exposed_s == pytest.approx(whole - saved)


@pytest.mark.parametrize(("zero", "gathers"), [(1, 1), (2, 1), (3, 9)])
def test_a_pipeline_gathers_once_and_under_zero_3_every_microbatch(
    zero: int, gathers: int
) -> None:
    found = traffic(zero, many=8, pp=4)
    assert found.gathered_bytes == gathers * 2e9
    assert found.scattered_bytes == 4e9
    assert found.exposed_s == pytest.approx(gathers * GATHER + SCATTER)


def test_backward_hides_its_gathers_and_reductions_together() -> None:
    # 15 ms + 30 ms of traffic under 20 ms of backward, 15 ms under 10 ms of forward.
    found = traffic(3, recipe=HIDDEN)
    assert found.exposed_s == pytest.approx(GATHER - 0.01 + GATHER + SCATTER - 0.02)
    ample = traffic(3, recipe=HIDDEN, backward_s=np.array([1.0]))
    assert ample.exposed_s == pytest.approx(GATHER - 0.01)


def test_what_hides_costs_compute() -> None:
    costly = replace(HIDDEN, overlap_cost=0.5)
    # 10 of the 15 ms of the gather hide, and 20 of the 45 ms behind it.
    free, found = traffic(3, recipe=HIDDEN), traffic(3, recipe=costly)
    assert found.exposed_s == pytest.approx(free.exposed_s + 0.5 * (0.01 + 0.02))


def test_the_next_forward_hides_what_backward_leaves() -> None:
    # 2 x 3/4 of 4 GB at 100 GB/s: 60 ms of sums, of which 20 hide under backward and
    # 9 under the forwards of all units but the tenth.
    waits = traffic(0, replicas=4, recipe=HIDDEN)
    found = traffic(0, replicas=4, recipe=HIDDEN, first=0.1)
    assert waits.exposed_s == pytest.approx(0.06 - 0.02)
    assert found.exposed_s == pytest.approx(0.06 - 0.02 - 0.009)
    assert found.reduced_bytes == waits.reduced_bytes
    # All but the 15 ms of the first unit's quarter hide under a long forward, and
    # nothing is left to hide under it where backward hides all.
    ample = traffic(0, replicas=4, recipe=HIDDEN, first=0.25, forward_s=np.array([1.0]))
    assert ample.exposed_s == pytest.approx(0.015)
    hidden = traffic(
        0, replicas=4, recipe=HIDDEN, first=0.25, backward_s=np.array([1.0])
    )
    assert hidden.exposed_s == 0.0
    # A process on a CPU has nothing to hide it under.
    alone = traffic(0, replicas=4, recipe=HIDDEN, first=0.1, on_gpu=False)
    assert alone.exposed_s == pytest.approx(
        traffic(0, replicas=4, recipe=HIDDEN, on_gpu=False).exposed_s
    )


def test_what_hides_under_the_next_forward_costs_compute() -> None:
    costly = replace(HIDDEN, overlap_cost=0.5)
    free = traffic(0, replicas=4, recipe=HIDDEN, first=0.1)
    found = traffic(0, replicas=4, recipe=costly, first=0.1)
    assert found.exposed_s == pytest.approx(free.exposed_s + 0.5 * 0.029)


@pytest.mark.parametrize(("forward_s", "backward_s"), [(0.01, 0.02), (0.03, 0.03)])
def test_the_next_forward_hides_what_the_buckets_one_by_one_let_it(
    forward_s: float, backward_s: float
) -> None:
    count, sums = 100, 0.06
    found = traffic(
        0,
        replicas=4,
        recipe=HIDDEN,
        first=1 / count,
        units=np.array([float(count)]),
        forward_s=np.array([forward_s]),
        backward_s=np.array([backward_s]),
    )
    filled = [(index + 1) * backward_s / count for index in range(count)]
    wanted = [(count - 1 - index) * forward_s / count for index in range(count)]
    one_by_one = next_forward_wait_s(filled, [sums / count] * count, wanted)
    # A bucket and its unit are the grain of the one, and nothing to the other.
    assert found.exposed_s == pytest.approx(one_by_one, abs=2 * sums / count)


@pytest.mark.parametrize(("chunks", "room"), [(1, 1.0), (2, 2.5), (4, 3.25)])
def test_interleaved_chunks_hide_under_the_others(chunks: int, room: float) -> None:
    recipe = replace(HIDDEN, pipeline_overlap=True)
    found = traffic(
        1, many=8, pp=4, recipe=recipe, virtual_stages=np.array([chunks])
    ).exposed_s
    forward, backward = 0.01 * room, 0.02 * room
    exposed = max(GATHER - forward, 0) + max(SCATTER - backward, 0)
    assert found == pytest.approx(exposed)


def test_a_pipeline_that_hides_reductions_has_one_a_step() -> None:
    recipe = replace(HIDDEN, pipeline_overlap=True)
    one, two = (traffic(z, many=8, pp=4, recipe=recipe).exposed_s for z in (1, 2))
    assert one == two


def test_zero_1_may_reduce_whole_gradients_on_every_rank() -> None:
    whole = replace(NEVER, reduces_whole=True)
    found = traffic(1, many=3, recipe=whole)
    assert found.scattered_bytes == 2 * 4e9
    assert found.exposed_s == pytest.approx(GATHER + 2 * SCATTER)
    for zero in (0, 2, 3):
        plain, same = (traffic(zero, recipe=recipe) for recipe in (NEVER, whole))
        assert same.exposed_s == plain.exposed_s
        assert same.scattered_bytes == plain.scattered_bytes


def test_replicas_reduce_their_shard() -> None:
    plain = traffic(0, many=5, replicas=2)
    assert plain.reduced_bytes == 4e9
    assert plain.exposed_s == pytest.approx(2 * 0.5 * 4e9 / 1e11)
    hybrid = traffic(2, replicas=2)
    assert hybrid.reduced_bytes == 1e9
    assert hybrid.exposed_s == pytest.approx(GATHER + SCATTER + 1e9 / 1e11)


@pytest.mark.parametrize(("ep", "few"), [(2, 2), (4, 1)])
def test_ranks_with_other_experts_share_no_copies(ep: int, few: int) -> None:
    # Of 1e9 scalars 6e8 are experts, of which 4 / ep ranks hold copies.
    experts = {name: np.array([6e8]) for name in ("experts", "trained_experts")}
    found = traffic(2, replicas=2, ep=np.array([ep]), **experts)
    sharded = 4e8 + 6e8 * (few > 1)
    assert found.gathered_bytes == 2 * sharded
    assert found.scattered_bytes == 4 * sharded
    mirrored = 4 * (4e8 / 4 + 6e8 / few)
    assert found.reduced_bytes == mirrored
    away = 0.75 * 4e8 + 0.5 * 6e8 * (few > 1)
    assert found.sent_bytes == pytest.approx((2 + 4) * away + mirrored)


def test_experts_over_tp_ranks_have_as_many_more_copies() -> None:
    experts = {name: np.array([6e8]) for name in ("experts", "trained_experts")}
    two, four = (
        traffic(2, replicas=2, ep=np.array([ep]), tp=np.array([tp]), **experts)
        for ep, tp in ((2, 1), (4, 2))
    )
    assert four == two


def test_cpu_processes_hide_nothing_and_pay_for_each_call() -> None:
    recipe = Recipe(name="cpu", overlap=1.0, collective_overhead_s=1e-3)
    found = traffic(2, recipe=recipe, on_gpu=False)
    assert found.exposed_s == pytest.approx(GATHER + SCATTER + 2 * 10 * 1e-3)


def test_processes_on_shared_cores_crowd_each_other() -> None:
    graph = uniform_graph(4)
    own = setting_for(graph, hosts((1, 4, device(backend="gloo")), slots=4.0))
    assert own.core_contention(1) == (1.0, 1.0)
    shared = setting_for(graph, hosts((1, 4, device(backend="gloo")), slots=2.0))
    # All four compute at once without a pipeline, one at a time with four stages.
    assert shared.core_contention(1) == (2.0, 2.0)
    assert shared.core_contention(2) == (1.0, 2.0)
    assert shared.core_contention(4) == (1.0, 2.0)
    assert setting_for(graph, hosts((1, 4, device()))).core_contention(1) == (1.0, 1.0)


def test_a_rank_is_as_fast_and_as_roomy_as_its_weakest_device() -> None:
    small = device("small", memory_bytes=10e9)
    slow = device("slow", peak_flops_per_s={"bfloat16": 1e13})
    cluster = hosts((1, 2, device()), (1, 1, small), (1, 1, slow))
    setting = setting_for(uniform_graph(4), cluster, memory_fraction=0.5)
    names = [cluster.device_types[k].name for k in setting.types_of_ranks(2)]
    assert names == ["gpu", "slow"]
    assert setting.limits_of_ranks(2).tolist() == [40e9, 5e9]
    assert setting.slowest_device.name == "slow"
    assert setting.total_peak_flops_per_s() == pytest.approx(3e14 + 1e13)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_frozen_parameters_are_gathered_but_never_reduced(zero: int) -> None:
    whole = traffic(zero, replicas=2)
    found = traffic(zero, replicas=2, trained=np.array([1e7]))
    assert found.gathered_bytes == whole.gathered_bytes
    assert found.scattered_bytes == pytest.approx(whole.scattered_bytes / 100)
    assert found.reduced_bytes == pytest.approx(whole.reduced_bytes / 100)
    assert found.exposed_s < whole.exposed_s
