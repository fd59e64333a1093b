"""The judge against the definition read aloud, and against published loads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from planner.errors import StrategyError
from planner.split import SplitTask, breaches, loads_ms, max_load_ms, one_device
from tests.split.cases import document, naive_loads, task_of, training

_EXPERTS = Path(os.environ.get("MESHWRIGHT_DATA", "none")) / "dnn-partitioning"


@pytest.mark.parametrize("seed", range(30))
def test_loads_are_as_defined(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = document(rng, nodes=9, accelerators=3, cpus=2)
    task = task_of(training(rng, made) if seed % 2 else made)
    device = rng.integers(0, task.devices, len(task))
    assert loads_ms(task, device) == pytest.approx(naive_loads(task, device))


def test_an_output_is_paid_once_by_each_device() -> None:
    made = document(np.random.default_rng(0), nodes=4, accelerators=3, cpus=1)
    made["edges"] = [
        {"sourceId": "n0", "destId": f"n{i}", "cost": 10.0} for i in (1, 2, 3)
    ]
    for node in made["nodes"]:
        node.update(fpgaLatency=1.0, cpuLatency=5.0)
    task = task_of(made)
    assert loads_ms(task, np.array([0, 1, 1, 2])).tolist() == [11, 12, 11, 0]
    assert loads_ms(task, np.array([0, 1, 1, 3])).tolist() == [11, 12, 0, 5]
    assert loads_ms(task, np.array([3, 1, 1, 1])).tolist() == [0, 13, 0, 5]


def chain(**changes: object) -> SplitTask:
    """n0 -> n1 -> n2 and their backward nodes, which belong to them."""
    made = document(np.random.default_rng(0), nodes=3, accelerators=2, cpus=1)
    made["edges"] = [
        {"sourceId": f"n{i}", "destId": f"n{i + 1}", "cost": 1.0} for i in range(2)
    ]
    made = training(np.random.default_rng(1), made)
    made.update(changes)
    return task_of(made)


def test_each_breach_is_named() -> None:
    task = chain()
    assert breaches(task, np.array([0, 0, 1, 0, 0, 1])) == ()
    assert "its class" in breaches(task, np.array([0, 0, 1, 0, 1, 1]))[0]
    forward, backward = breaches(task, np.array([0, 1, 0, 0, 1, 0]))
    assert "forward nodes leaves acc0" in forward
    assert "backward nodes leaves acc0" in backward
    small = chain(maxSizePerFPGA=1.0)
    assert "it has 1" in breaches(small, one_device(small))[0]
    assert breaches(small, np.full(6, 2)) == ()
    nodes = [
        {
            "id": "x",
            "supportedOnFpga": 0,
            "cpuLatency": 1,
            "fpgaLatency": 1,
            "isBackwardNode": 0,
            "size": 1,
        }
    ]
    lone = chain(nodes=nodes, edges=[])
    assert "do not support" in breaches(lone, one_device(lone))[0]


def test_forward_and_backward_parts_are_looked_at_apart() -> None:
    made = document(np.random.default_rng(0), nodes=3, accelerators=2, cpus=1)
    for node in made["nodes"][1:]:
        node["isBackwardNode"] = 1
    made["edges"] = [
        {"sourceId": "n0", "destId": "n1", "cost": 1.0},
        {"sourceId": "n1", "destId": "n2", "cost": 1.0},
    ]
    assert breaches(task_of(made), np.array([0, 1, 0])) == ()


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (np.zeros(5, dtype=np.int64), "needs one integer for each"),
        (np.zeros(6), "needs one integer for each"),
        (np.array([0, 0, 3, 0, 0, 0]), "node 'n2' is on device 3"),
        (np.array([0, -1, 0, 0, 0, 0]), "node 'n1' is on device -1"),
    ],
)
def test_no_assignment_is_refused(device: np.ndarray, message: str) -> None:
    for judge in (loads_ms, breaches):
        with pytest.raises(StrategyError, match=message):
            judge(chain(), device)


def test_published_loads_of_one_device(
    published: dict[str, SplitTask], golden: dict[tuple[str, str], float]
) -> None:
    rows = {name: load for (name, how), load in golden.items() if how == "one_device"}
    assert len(rows) >= 10
    for name, load in rows.items():
        task = published[name]
        assert max_load_ms(task, one_device(task)) == pytest.approx(load, rel=1e-5)


def test_published_loads_of_experts(
    published: dict[str, SplitTask], golden: dict[tuple[str, str], float]
) -> None:
    judged = 0
    for (name, how), load in golden.items():
        path = _EXPERTS / "human-experts" / f"{name.rsplit('_', 1)[0]}_expert.json"
        if how != "human_expert" or not path.is_file():
            continue
        task, split = published[name], json.loads(path.read_text(encoding="utf-8"))
        lists = [*split["fpgas"], *split["cpus"]]
        device = {node: d for d, each in enumerate(lists) for node in each["nodes"]}
        assignment = np.array([device[node] for node in task.nodes])
        assert max_load_ms(task, assignment) == pytest.approx(load, rel=1e-5)
        assert breaches(task, assignment) == ()
        judged += 1
    assert judged >= 5
