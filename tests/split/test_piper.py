"""Pipelines of layers with options: against every pipeline, and published optima."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.errors import PlanFileError
from planner.split import GIB, PiperTask, parse_piper, read_piper, solve_piper
from planner.split.piper import pipelines
from planner.split.piper.solve import exact

_DATA = Path(os.environ.get("MESHWRIGHT_DATA", "none")) / "piper"

Document = dict[str, Any]


def layers(rng: np.random.Generator, nodes: int, **limits: float) -> Document:
    """A graph of layers, some of which know tensor parallelism of degree 2."""
    edges = [
        (i, j)
        for i, j in itertools.combinations(range(nodes), 2)
        if j == i + 1 or rng.random() < 0.2
    ]
    made = []
    for i in range(nodes):
        before, after = ([e for e in edges if e[k] == i] for k in (1, 0))
        options = {}
        for degree in (1, 2) if rng.random() < 0.8 else (1,):
            time, once = float(rng.uniform(1, 4) / degree), float(rng.uniform(1, 3))
            options[str(degree)] = [
                {
                    "id": name,
                    "timePerSample": time * slower,
                    "parameterSize": float(rng.uniform(0, 3)),
                    "memoryUsageA": 4.0 * lighter / degree,
                    "memoryUsageB": once / degree,
                    "syncTimeFw": {str(u): float(rng.uniform(0, 1)) for u, _ in before},
                    "syncTimeBw": {str(v): float(rng.uniform(0, 1)) for _, v in after},
                }
                for name, slower, lighter in (("vanilla", 1, 1), ("again", 1.3, 0.2))
            ]
        made.append({"id": i, "TMPCs": options})
    return {
        "maxDevices": int(limits.get("devices", 4)),
        "maxMemoryPerDevice": limits.get("memory", 30.0),
        "bandwidth": 5.0,
        "mbsInBatch": 4,
        "nodes": made,
        "edges": [
            {"sourceId": u, "destId": v, "communicationCost": float(rng.uniform(0, 4))}
            for u, v in edges
        ],
    }


def stage_time(
    made: Document, inside: list[int], t: int, d: int, in_flight: int
) -> float:
    """The paper's section 3.2, with every choice of options."""
    best = math.inf
    nodes = [made["nodes"][v] for v in inside]
    if any(str(t) not in node["TMPCs"] for node in nodes):
        return best
    for options in itertools.product(*(node["TMPCs"][str(t)] for node in nodes)):
        chosen = dict(zip(inside, options, strict=True))
        held = sum(
            o["memoryUsageA"] * in_flight + o["memoryUsageB"] for o in chosen.values()
        )
        if held > made["maxMemoryPerDevice"]:
            continue
        moved = 0.0
        for edge in made["edges"]:
            u, v, cost = edge["sourceId"], edge["destId"], edge["communicationCost"]
            if v in chosen and u not in chosen:
                moved += 2 * (cost + chosen[v]["syncTimeFw"][str(u)])
            if u in chosen and v not in chosen:
                moved += 2 * (cost + chosen[u]["syncTimeBw"][str(v)])
        sync = sum(4 * (d - 1) * o["parameterSize"] / d for o in chosen.values())
        moving = (moved / d + sync / made["mbsInBatch"]) / made["bandwidth"]
        best = min(best, moving + sum(o["timePerSample"] for o in options) / d)
    return best


def cuts(nodes: int) -> Iterator[list[list[int]]]:
    """Chains 0 to n - 1 are in one order only: all ways to cut them."""
    for count in range(nodes):
        for at in itertools.combinations(range(1, nodes), count):
            ends = [0, *at, nodes]
            yield [list(range(a, b)) for a, b in itertools.pairwise(ends)]


def fastest(made: Document) -> float:
    """Over all pipelines."""
    best = math.inf
    degrees = [
        (t, d)
        for t in (1, 2)
        for d in range(1, made["maxDevices"] + 1)
        if made["mbsInBatch"] % d == 0 and t * d <= made["maxDevices"]
    ]
    for stages in cuts(len(made["nodes"])):
        for choice in itertools.product(degrees, repeat=len(stages)):
            if sum(t * d for t, d in choice) > made["maxDevices"]:
                continue
            if sum(d for _, d in choice) > made["mbsInBatch"]:
                continue
            times = [
                stage_time(made, inside, t, d, -(-sum(x for _, x in choice[i:]) // d))
                for i, (inside, (t, d)) in enumerate(zip(stages, choice, strict=True))
            ]
            best = min(best, max(times))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_no_pipeline_is_faster(seed: int) -> None:
    rng = np.random.default_rng(seed)
    memory, devices = float(rng.choice([12, 16, 25, 1000])), int(rng.integers(3, 8))
    made = layers(rng, 4, memory=memory, devices=devices)
    made["mbsInBatch"] = int(rng.choice([2, 4, 6, 12]))
    plan = solve_piper(parse_piper(made, "made"))
    wanted = fastest(made)
    assert plan.exact
    # Options are chosen as in the paper: as a rule, but not always, the best ones.
    assert plan.time_per_sample >= wanted * (1 - 1e-9)
    if made["maxMemoryPerDevice"] == 1000:
        assert plan.time_per_sample == pytest.approx(wanted)
    assert math.isinf(plan.time_per_sample) == math.isinf(wanted)
    assert plan.time_per_sample <= wanted * 1.05


def test_there_is_room_for_all_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of ways that are too small at first change nothing."""
    tasks = [
        parse_piper(
            layers(np.random.default_rng(seed), 7, memory=20, devices=12), "made"
        )
        for seed in range(8)
    ]
    roomy = [exact(task) for task in tasks]
    monkeypatch.setattr(pipelines, "_FEW_WAYS", 1)
    assert [exact(task) for task in tasks] == roomy


def test_layers_without_time_take_what_they_move() -> None:
    made = layers(np.random.default_rng(0), 5, memory=6)
    for node in made["nodes"]:
        for options in node["TMPCs"].values():
            for option in options:
                option["timePerSample"] = 0.0
    plan = solve_piper(parse_piper(made, "made"), "exact")
    assert 0 < plan.time_per_sample < math.inf
    for edge in made["edges"]:
        edge["communicationCost"] = 0.0
    alone = solve_piper(parse_piper({**made, "maxMemoryPerDevice": 1e9}, "made"))
    assert alone.time_per_sample == 0


@pytest.mark.parametrize("nodes", [1, 70, 130])
def test_layers_of_any_number_share_the_devices(nodes: int) -> None:
    """Chains of equal layers without weights or transfers are split evenly."""
    option = {
        "id": "vanilla",
        "timePerSample": 2.0,
        "parameterSize": 0.0,
        "memoryUsageA": 0.0,
        "memoryUsageB": 1.0,
    }
    made = {
        "maxDevices": 1 if nodes == 1 else nodes // 10,
        "maxMemoryPerDevice": 10.0,
        "bandwidth": 1.0,
        "mbsInBatch": nodes,
        "nodes": [
            {
                "id": v,
                "TMPCs": {
                    "1": [
                        {
                            **option,
                            "syncTimeFw": {str(v - 1): 0.0},
                            "syncTimeBw": {str(v + 1): 0.0},
                        }
                    ]
                },
            }
            for v in range(nodes)
        ],
        "edges": [
            {"sourceId": v, "destId": v + 1, "communicationCost": 0.0}
            for v in range(nodes - 1)
        ],
    }
    plan = solve_piper(parse_piper(made, "chain"), "exact")
    assert plan.time_per_sample == pytest.approx(2.0 * min(nodes, 10))
    apart = parse_piper({**made, "edges": [], "mbsInBatch": 1}, "apart")
    assert solve_piper(apart.on(devices=1, memory_bytes=nodes), "auto").exact is (
        nodes == 1
    )


def test_a_plan_says_what_it_takes() -> None:
    made = layers(np.random.default_rng(4), 4, memory=25)
    plan = solve_piper(parse_piper(made, "made"))
    degrees = [stage.data_parallel for stage in plan.stages]
    times = []
    for i, stage in enumerate(plan.stages):
        narrowed = {
            **made,
            "nodes": [
                {
                    **node,
                    "TMPCs": {
                        t: [o for o in options if o["id"] == stage.options[node["id"]]]
                        for t, options in node["TMPCs"].items()
                    },
                }
                if node["id"] in stage.nodes
                else node
                for node in made["nodes"]
            ],
        }
        in_flight = -(-sum(degrees[i:]) // degrees[i])
        inside = [int(node) for node in stage.nodes]
        times.append(
            stage_time(
                narrowed, inside, stage.tensor_parallel, stage.data_parallel, in_flight
            )
        )
    assert max(times) == pytest.approx(plan.time_per_sample)
    assert sorted(v for s in plan.stages for v in s.nodes) == [0, 1, 2, 3]


def test_what_does_not_fit_has_no_stages() -> None:
    made = layers(np.random.default_rng(0), 4, memory=0.5)
    plan = solve_piper(parse_piper(made, "made"))
    assert plan.stages == ()
    assert math.isinf(plan.time_per_sample)


def test_wide_graphs_are_planned_along_some_orders() -> None:
    made = layers(np.random.default_rng(1), 8)
    task = parse_piper(made, "made")
    every, along = solve_piper(task, "exact"), exact(task, most_suffixes=3)
    assert every.exact
    assert not along.exact
    assert along.time_per_sample >= every.time_per_sample


def _change(path: tuple[Any, ...], value: Any) -> Document:
    made = layers(np.random.default_rng(0), 3)
    at: Any = made
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return made


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("nodes", 1, "TMPCs"), None, "node 1 has no field 'TMPCs'"),
        (("nodes", 1, "TMPCs"), {}, "node 1: TMPCs is empty"),
        (("nodes", 1, "TMPCs"), {"two": []}, "TMPCs has key 'two'"),
        (("nodes", 2, "id"), 1, "an id stands twice"),
        (("edges", 0, "destId"), 77, "names node 77, which is not in nodes"),
        (("edges", 0, "communicationCost"), -1.0, "communicationCost=-1.0; must be"),
        (("bandwidth",), 0.0, "bandwidth=0.0; must be above 0"),
        (("maxDevices",), None, "made has no field 'maxDevices'"),
        (("nodes",), [], "nodes is empty"),
        (("nodes", 1, "TMPCs", "1", 0, "id"), "again", "has an option id twice"),
        (
            ("nodes", 1, "TMPCs", "1", 0, "timePerSample"),
            math.nan,
            "degree 1, option 0: timePerSample=nan; must be finite",
        ),
        (
            ("nodes", 1, "TMPCs", "1", 0, "syncTimeFw"),
            {},
            "syncTimeFw has no field '0'",
        ),
    ],
)
def test_what_is_wrong_is_named(
    path: tuple[Any, ...], value: Any, message: str
) -> None:
    with pytest.raises(PlanFileError, match=message):
        parse_piper(_change(path, value), "made")


def test_cycles_and_broken_files_are_refused(tmp_path: Path) -> None:
    made = layers(np.random.default_rng(0), 3)
    for edge in made["edges"]:
        edge["sourceId"], edge["destId"] = edge["destId"], edge["sourceId"]
    made["edges"].append({"sourceId": 0, "destId": 2, "communicationCost": 1.0})
    with pytest.raises(PlanFileError, match="on or behind a cycle"):
        parse_piper(made, "made")
    path = tmp_path / "net.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(PlanFileError, match="cannot be read as JSON"):
        read_piper(path)


def _rows() -> list[dict[str, Any]]:
    path = _DATA / "GOLDEN_piper_optima.json"
    if not path.is_file():
        pytest.skip("MESHWRIGHT_DATA has no piper/GOLDEN_piper_optima.json")
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def test_published_optima() -> None:
    tasks: dict[str, PiperTask] = {}
    for row in _rows():
        name = row["instance"]
        if name not in tasks:
            tasks[name] = read_piper(_DATA / "inputs" / f"{name}.json")
        task = tasks[name].on(
            devices=row["k"],
            memory_bytes=row["memGB"] * GIB,
            bandwidth=row["bandwidthGB"] * GIB,
            microbatches=row["mbsInBatch"],
        )
        plan = solve_piper(task)
        wanted = math.inf if row["piperTPS"] < 0 else row["piperTPS"]
        assert plan.time_per_sample == pytest.approx(wanted, rel=1e-9)
        used = sum(s.data_parallel * s.tensor_parallel for s in plan.stages)
        assert used <= row["k"]
