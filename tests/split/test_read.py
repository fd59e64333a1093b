"""Files in the dnn-partitioning format, and what is wrong with some."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.errors import PlanFileError
from planner.split import load_tasks, parse_task, read_task
from tests.split.cases import Document, document


def made(**limits: float) -> Document:
    return document(np.random.default_rng(3), **limits)


def test_a_task_has_what_its_file_says(tmp_path: Path) -> None:
    wanted = made(memory=77.0, accelerators=3, cpus=2)
    wanted["nodes"][1]["colorClass"] = wanted["nodes"][4]["colorClass"] = 9
    folder = tmp_path / "Graphs"
    folder.mkdir()
    (folder / "net.json").write_text(json.dumps(wanted), encoding="utf-8")
    task = read_task(folder / "net.json")
    assert task.name == "net_Graphs"
    assert task.nodes == tuple(node["id"] for node in wanted["nodes"])
    assert (task.accelerators, task.cpus, task.memory_bytes) == (3, 2, 77.0)
    assert task.device_names == ("acc0", "acc1", "acc2", "cpu0", "cpu1")
    assert task.colour[1] == task.colour[4]
    assert len(set(task.colour.tolist())) == 5
    at = {node: i for i, node in enumerate(task.nodes)}
    for edge in wanted["edges"]:
        assert task.transfer_ms[at[edge["sourceId"]]] == edge["cost"]
    place = np.argsort(task.topological)
    assert (place[task.edge_source] < place[task.edge_target]).all()


def test_ids_may_be_integers_and_edges_may_stand_twice() -> None:
    wanted = made()
    for node in wanted["nodes"]:
        node["id"] = 1000 + int(node["id"][1:])
    for edge in wanted["edges"]:
        for key in ("sourceId", "destId"):
            edge[key] = 1000 + int(edge[key][1:])
    task = parse_task({**wanted, "edges": wanted["edges"] * 2}, "twice")
    assert task.nodes[0] == 1000
    assert len(task.edge_source) == len(wanted["edges"])


def _set(key: str, value: Any) -> Callable[[Document], None]:
    return lambda made: made["nodes"][2].update({key: value})


def _drop(key: str) -> Callable[[Document], None]:
    return lambda made: made["nodes"][2].pop(key)


def _edge(source: str, target: str, cost: float) -> Callable[[Document], None]:
    edge = {"sourceId": source, "destId": target, "cost": cost}
    return lambda made: made["edges"].append(edge)


def _cycle(made: Document) -> None:
    made["edges"] = [
        {"sourceId": "n0", "destId": "n1", "cost": 1},
        {"sourceId": "n1", "destId": "n0", "cost": 1},
    ]


def _backward_first(made: Document) -> None:
    made["edges"] = [{"sourceId": "n0", "destId": "n1", "cost": 1}]
    made["nodes"][0]["isBackwardNode"] = 1


def _unsupported(made: Document) -> None:
    made["maxCPUs"] = 0
    made["nodes"][2]["supportedOnFpga"] = 0


def _too_large(made: Document) -> None:
    made.update(maxCPUs=0, maxSizePerFPGA=20.0)
    for node in made["nodes"][:3]:
        node.update(size=10.0, colorClass=5)


_WRONG: dict[str, tuple[Callable[[Document], Any], str]] = {
    "no size": (_drop("size"), r"node 'n2' has no field 'size'"),
    "negative": (_set("cpuLatency", -1), r"'n2': cpuLatency=-1; must be finite"),
    "endless": (_set("fpgaLatency", math.inf), r"fpgaLatency=inf; must be finite"),
    "no number": (_set("size", "big"), r"size='big' is not a number"),
    "no flag": (_set("isBackwardNode", "yes"), r"isBackwardNode='yes'; must be"),
    "no id": (_drop("id"), r"nodes\[2\] has no field 'id'"),
    "odd id": (_set("id", [1]), r"id=\[1\]; ids are integers or strings"),
    "same id": (_set("id", "n1"), r"'n1' stands at nodes\[1\] and nodes\[2\]"),
    "unknown": (_edge("n0", "n77", 1), r"names node 'n77', which is not in nodes"),
    "free lunch": (_edge("n0", "n1", -2), r"cost=-2; must be finite and not below 0"),
    "cycle": (_cycle, r"node 'n0' lies on or behind a cycle"),
    "backward": (_backward_first, r"'n0' -> 'n1' leads from a backward node"),
    "nowhere": (_unsupported, r"'n2' is not supported on accelerators and maxCPUs=0"),
    "too large": (_too_large, r"class of node 'n0' needs 30 bytes"),
    "devices": (lambda d: d.update(maxFPGAs=0, maxCPUs=0), r"leave no device"),
    "half": (lambda d: d.update(maxFPGAs=1.5), r"maxFPGAs=1.5 must be a whole number"),
    "no nodes": (lambda d: d.update(nodes=[]), r"nodes is empty"),
    "no list": (lambda d: d.update(edges={}), r"edges must be a list of objects"),
}


@pytest.mark.parametrize("case", _WRONG)
def test_what_is_wrong_is_named(case: str) -> None:
    change, message = _WRONG[case]
    wrong = made()
    change(wrong)
    with pytest.raises(PlanFileError, match=message):
        parse_task(wrong, "wrong")


def test_an_output_has_one_price() -> None:
    wrong = made()
    first = wrong["edges"][0]
    wrong["edges"].append({**first, "cost": first["cost"] + 1})
    with pytest.raises(PlanFileError, match="an output has one price"):
        parse_task(wrong, "wrong")


def test_a_folder_is_sorted_into_tasks_and_others(tmp_path: Path) -> None:
    def put(where: str, what: object) -> None:
        path = tmp_path / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(what), encoding="utf-8")

    put("throughput/A/net.json", made())
    put("throughput/B/net.json", made())
    put("latency-inputs/A/net.json", made())
    put("experts/net.json", {"fpgas": [], "cpus": [], "maxLoad": -1})
    put("other/list.json", [1, 2])
    put("other/piper.json", {"maxDevices": 3, "nodes": []})
    found = load_tasks(tmp_path)
    assert set(found.tasks) == {"net_A", "net_B"}
    whys = {path.parent.name: why for path, why in found.skipped.items()}
    assert "expert" in whys["experts"]
    assert "latency" in whys["A"]
    assert len(found.skipped) == 4


def test_folders_without_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="holds no throughput task"):
        load_tasks(tmp_path)
    with pytest.raises(PlanFileError, match="is no folder"):
        load_tasks(tmp_path / "gone")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(PlanFileError, match="cannot be read as JSON"):
        load_tasks(tmp_path)


def test_an_instance_has_one_file(tmp_path: Path) -> None:
    for parent in ("a/G", "b/G"):
        (tmp_path / parent).mkdir(parents=True)
        path = tmp_path / parent / "net.json"
        path.write_text(json.dumps(made()), encoding="utf-8")
    with pytest.raises(PlanFileError, match="are both instance 'net_G'"):
        load_tasks(tmp_path)
