"""What moves as one."""

from __future__ import annotations

import numpy as np
import pytest

from planner.errors import NoFeasiblePlanError, StrategyError
from planner.split import group, order_by_priority
from tests.split.cases import Document, document, task_of, training


def plain(nodes: int, edges: list[tuple[int, int]]) -> Document:
    made = document(np.random.default_rng(0), nodes=nodes)
    made["edges"] = [
        {"sourceId": f"n{u}", "destId": f"n{v}", "cost": 1.0 + u} for u, v in edges
    ]
    return made


def test_classes_on_a_cycle_are_one_group() -> None:
    made = plain(4, [(0, 1), (1, 2), (2, 3)])
    made["nodes"][0]["colorClass"] = made["nodes"][2]["colorClass"] = 1
    groups = group(task_of(made))
    assert groups.member_of.tolist() == [0, 0, 0, 1]
    assert groups.flow_ms.tolist() == [3.0]


def test_a_node_without_time_goes_with_its_only_neighbour() -> None:
    made = plain(4, [(0, 2), (1, 0), (2, 3)])
    for at in (0, 1):
        made["nodes"][at].update(fpgaLatency=0.0, cpuLatency=0.0)
    groups = group(task_of(made))
    assert groups.member_of.tolist() == [0, 0, 0, 1]
    made["nodes"][1]["cpuLatency"] = 1.0
    assert len(group(task_of(made))) == 4


def test_nodes_without_time_do_not_fill_a_memory() -> None:
    made = plain(4, [(0, 1), (2, 1), (3, 1)])
    for node in made["nodes"]:
        node.update(fpgaLatency=0.0, cpuLatency=0.0, size=10.0)
    made["nodes"][1].update(fpgaLatency=1.0)
    for memory, groups in ((40.0, 1), (39.0, 4), (160.0, 1)):
        made["maxSizePerFPGA"] = memory
        assert len(group(task_of(made))) == groups
    made.update(maxSizePerFPGA=200.0)
    made["nodes"][0]["size"] = 180.0
    assert group(task_of(made)).member_of.tolist() == [0, 1, 2, 1]


def test_backward_nodes_without_forward_ones_take_the_mirrored_place() -> None:
    made = training(np.random.default_rng(0), plain(3, [(0, 1), (1, 2)]))
    made["nodes"] = [node for node in made["nodes"] if node["id"] != "n1"]
    made["edges"] = [
        e for e in made["edges"] if "n1" not in (e["sourceId"], e["destId"])
    ]
    groups = group(task_of(made))
    order = groups.member_of[[0, 3, 1]]  # n0, bn1, n2
    assert len(groups) == 3
    assert groups.checked(order).tolist() == order.tolist()
    with pytest.raises(StrategyError, match="list producers first"):
        groups.checked(order[::-1])


def test_outputs_with_the_same_users_are_one_flow() -> None:
    made = plain(4, [(0, 2), (1, 2), (0, 3), (1, 3)])
    made["nodes"][0]["colorClass"] = made["nodes"][1]["colorClass"] = 1
    groups = group(task_of(made))
    assert groups.flow_ms.tolist() == [3.0]
    assert groups.flow_to.tolist() == [1, 2]


def test_orders_are_looked_over() -> None:
    groups = group(task_of(plain(3, [(0, 1), (1, 2)])))
    with pytest.raises(StrategyError, match="needs each of its 3 groups once"):
        groups.checked(np.array([0, 1, 1]))


def test_priority_decides_among_groups_that_may_come_next() -> None:
    groups = group(task_of(plain(4, [(0, 1), (0, 2), (0, 3)])))
    order = order_by_priority(groups, np.array([0.0, 1.0, 3.0, 2.0]))
    assert order.tolist() == [0, 2, 3, 1]


def test_a_group_that_no_device_holds_is_named() -> None:
    made = plain(4, [(0, 1), (1, 2), (2, 3)])
    made.update(maxCPUs=0, maxSizePerFPGA=2.5)
    for node in made["nodes"]:
        node["size"] = 1.0
    made["nodes"][0]["colorClass"] = made["nodes"][2]["colorClass"] = 1
    with pytest.raises(NoFeasiblePlanError, match="group of node 'n0' needs 3 bytes"):
        group(task_of(made))
