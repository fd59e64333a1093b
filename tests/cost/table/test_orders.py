"""Many orders of devices at once cost what each costs alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cluster import Cluster
from planner.cost import CostModel, PricingContext
from planner.cost.table.levels import group_levels, level_tables
from planner.schema.cluster import Link
from planner.space import StrategyTable, enumerate_strategies
from tests.cost.made import device, hosts, real_graph, request_for

WAN = Link(bandwidth_bytes_per_s=2e9, latency_s=5e-5)


def matrix() -> Cluster:
    rng = np.random.default_rng(4)
    bandwidth = rng.uniform(1e8, 1e10, (12, 12))
    latency = rng.uniform(1e-5, 1e-2, (12, 12))
    kinds = [device("slow", memory_bytes=24e9)] * 5 + [device("fast")] * 7
    owners = [0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 4, 5]
    return Cluster.from_matrices(
        bandwidth, latency, device=kinds, hosts=owners, name="matrix"
    )


def clusters() -> dict[str, Cluster]:
    slow = device("slow", peak_flops_per_s={"bfloat16": 2e13, "float32": 1e13})
    return {
        "mixed": Cluster.mixed(
            Cluster.parse("dgx-h100:2"), Cluster.parse("dgx-a100:2"), level=WAN
        ),
        "uneven": hosts((2, 4, device()), (3, 2, slow), (2, 1, device("other"))),
        "cables": Cluster.parse("mi300x:3"),
        "shared interfaces": Cluster.parse("a40-pcie:3"),
        "matrix": matrix(),
        "cores": hosts((2, 3, device(backend="gloo")), (1, 6, slow), slots=2.0),
        "taken": Cluster.parse("dgx-a100:4").with_occupied([1, 2, 9, 17, 30]),
    }


NAMES = tuple(clusters())


def orders_of(
    setting: PricingContext, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Whole devices shuffled, or hosts only; the setting's own order first."""
    ids = [setting.order]
    owners = np.asarray(setting.cluster.host_of_device)[setting.order]
    for number in range(1, count):
        if number % 2:
            ids.append(rng.permutation(setting.order))
            continue
        shuffled = rng.permutation(np.unique(owners))
        ids.append(np.concatenate([setting.order[owners == h] for h in shuffled]))
    return np.stack(ids)


@pytest.mark.parametrize("name", NAMES)
def test_a_table_under_many_orders_is_each_row_under_its_own(name: str) -> None:
    rng = np.random.default_rng(1)
    request = request_for(real_graph("llama3-8b"), clusters()[name], global_batch=240)
    setting = request.context
    number = len(setting.order)
    facts = replace(request, target="any").facts
    table = StrategyTable.concatenate(
        list(enumerate_strategies(facts, num_devices=number, pins={}))
    )
    assert len(table)
    ids = orders_of(setting, 7, rng)
    rows = rng.integers(len(table), size=140)
    order = rng.integers(len(ids), size=140)
    found = CostModel(setting).table_in_orders(table[rows], ids, order)
    for place, one in enumerate(ids):
        mine = order == place
        alone = CostModel(replace(setting, order=one)).table(table[rows[mine]])
        for column in ("step_time_s", "memory_bytes", "excess_bytes", "parts_s"):
            np.testing.assert_allclose(
                getattr(found, column)[mine],
                getattr(alone, column),
                rtol=1e-12,
                atol=1e-12,
            )


@pytest.mark.parametrize("name", NAMES)
def test_levels_of_groups_are_those_of_the_cluster(name: str) -> None:
    rng = np.random.default_rng(2)
    cluster = clusters()[name]
    net = level_tables(cluster.topology)
    free = np.asarray(cluster.free)
    # Whole hosts in order, as most searches have them, and any devices.
    turned = free[np.argsort(-np.asarray(cluster.host_of_device)[free], kind="stable")]
    ids = np.stack([free, turned, *(rng.permutation(free) for _ in range(4))])
    axes = [
        (order, degree, stride)
        for order in range(len(ids))
        for degree in (1, 2, 3, 4, 6, len(free))
        for stride in (1, 2, 4)
        if degree * stride <= len(free)
    ]
    which, degree, stride = np.array(axes).T
    members, bandwidth, latency = group_levels(net, ids, which, degree, stride)
    for row, (order, each, step) in enumerate(axes):
        levels = cluster.axis_levels(each, step, ids[order].tolist())
        used = len(levels)
        assert members[row, :used].tolist() == [lv.members for lv in levels]
        assert (members[row, used:] == 1).all()
        rates = [level.bandwidth_bytes_per_s for level in levels]
        assert bandwidth[row, :used].tolist() == rates
        assert latency[row, :used].tolist() == [level.latency_s for level in levels]


def test_other_devices_of_the_cluster_may_be_left_out() -> None:
    request = request_for(real_graph("llama3-8b"), clusters()["mixed"], global_batch=64)
    setting = request.context
    fast, slow = setting.order[:16], setting.order[16:]
    table = StrategyTable.concatenate(
        list(enumerate_strategies(request.facts, num_devices=16, pins={}))
    )
    table = table[np.arange(len(table)) % 7 == 0]
    count = len(table)
    doubled = StrategyTable.concatenate([table, table])
    ids, order = np.stack([fast, slow]), np.repeat([0, 1], count)
    costs = CostModel(setting).table_in_orders(doubled, ids, order)
    assert (costs.step_time_s[:count] < costs.step_time_s[count:]).all()


@pytest.mark.parametrize("name", NAMES)
def test_orders_of_unlike_lengths_cost_what_each_costs_alone(name: str) -> None:
    rng = np.random.default_rng(3)
    request = request_for(real_graph("llama3-8b"), clusters()[name], global_batch=240)
    setting = request.context
    facts = replace(request, target="any").facts
    lengths = [4, 6, 1, len(setting.order), 4]
    ids = np.full((len(lengths), max(lengths)), -1)
    tables, order = [], []
    for place, length in enumerate(lengths):
        ids[place, :length] = rng.permutation(setting.order)[:length]
        table = StrategyTable.concatenate(
            list(enumerate_strategies(facts, num_devices=length, pins={}))
        )
        tables.append(table[rng.integers(len(table), size=40)])
        order += [place] * 40
    shuffled = rng.permutation(len(order))
    joined = StrategyTable.concatenate(tables)[shuffled]
    which = np.array(order)[shuffled]
    found = CostModel(setting).table_in_orders(joined, ids, which)
    for place, length in enumerate(lengths):
        mine = which == place
        alone = CostModel(replace(setting, order=ids[place, :length]))
        costs = alone.table(joined[mine])
        for column in ("step_time_s", "memory_bytes", "excess_bytes", "parts_s"):
            np.testing.assert_allclose(
                getattr(found, column)[mine],
                getattr(costs, column),
                rtol=1e-12,
                atol=1e-12,
            )
