"""Worlds as documents: what a file may say, and what it may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.partition import GraphStore, World, load_worlds, save_worlds
from planner import plan
from planner.cluster import Cluster
from planner.errors import CaptureError, NoFeasiblePlanError, PlanFileError
from planner.request import PlanOptions, make_request

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
HAND_WRITTEN = {
    "model": TINY,
    "seq_len": 32,
    "cluster": "dgx-h100:2",
    "global_batch": 64,
}


def _write(folder: Path, data: Any) -> Path:
    path = folder / "worlds.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_what_is_saved_is_read_back_equal(tmp_path: Path) -> None:
    shared = World(
        name="taken",
        kind="occupied",
        model="llama3-8b",
        cluster=Cluster.from_preset("l40s-pcie", 2).with_occupied([1, 2, 9]).document,
        global_batch=48,
        objective="throughput_per_device",
        memory_fraction=0.6,
        seed=7,
    )
    worlds = [World(name="tiny", **HAND_WRITTEN), shared]
    save_worlds(worlds, tmp_path / "worlds.json")
    assert load_worlds(tmp_path / "worlds.json") == worlds
    assert list(shared.machines().free) == [0, 3, 4, 5, 6, 7, 8, *range(10, 16)]


@pytest.mark.parametrize(
    "data", [{"worlds": [HAND_WRITTEN]}, [HAND_WRITTEN], HAND_WRITTEN]
)
def test_one_world_a_list_or_a_file_of_them(tmp_path: Path, data: Any) -> None:
    (world,) = load_worlds(_write(tmp_path, data))
    assert world == World(name="world-0", **HAND_WRITTEN)


def test_a_cluster_may_name_its_device_types(tmp_path: Path) -> None:
    link = {"bandwidth_bytes_per_s": 1e11, "latency_s": 1e-6}
    group = {"count": 1, "devices_per_host": 2, "link": link}
    hosts = [
        {"name": "a", "device": "h100-80", **group},
        {"name": "b", "device": "v100-16", **group},
    ]
    cluster = {
        "name": "two",
        "device_types": ["h100-80", "v100-16"],
        "hosts": hosts,
        "levels": [{"name": "net", "link": link}],
    }
    (world,) = load_worlds(_write(tmp_path, {**HAND_WRITTEN, "cluster": cluster}))
    assert [t.name for t in world.machines().device_types] == ["h100-80", "v100-16"]
    cluster["device_types"] = ["h100-80", "v100-17"]
    with pytest.raises(PlanFileError, match=r"world 0 .*cluster.*v100-17.*v100-16"):
        load_worlds(_write(tmp_path, {**HAND_WRITTEN, "cluster": cluster}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch": 0}, r"world 1 \('b'\): field global_batch: .*(got 0)"),
        ({"global_batch": None}, "field global_batch"),
        ({"objective": "fast"}, r"field objective: .*'fast'"),
        ({"memory_fraction": 1.5}, "field memory_fraction"),
        ({"model": {"hidden_size": 8}}, "field model.*has a model_type"),
        ({"model": 3}, "field model"),
        ({"model": ""}, "field model"),
        ({"cluster": []}, "field cluster"),
        ({"cluster": {"name": "x"}}, r"field cluster\.fields\.device_types"),
        ({"seq_len": -1}, "field seq_len"),
        ({"speed": 1}, "field speed"),
        ({"name": ""}, "field name"),
    ],
)
def test_a_malformed_world_is_named_with_its_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    bad = {"name": "b", **HAND_WRITTEN, **change}
    path = _write(tmp_path, {"worlds": [HAND_WRITTEN, bad]})
    with pytest.raises(PlanFileError, match=message) as caught:
        load_worlds(path)
    assert "worlds.json: world 1" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"worlds": [', "not a whole JSON document"),
        ('"llama3-8b"', "worlds are a list, this is str"),
        ('{"worlds": 3}', "worlds are a list, this is int"),
        ('{"worlds": []}', "the list of worlds is empty"),
        ('{"worlds": [], "more": 1}', "field more"),
        ('{"worlds": [7]}', "world 0: a world is an object"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanFileError, match=message):
        load_worlds(_write(tmp_path, text))
    with pytest.raises(PlanFileError, match="cannot read worlds"):
        load_worlds(tmp_path / "missing.json")


def test_a_request_is_what_plan_asks() -> None:
    world = World(name="tiny", memory_fraction=0.7, **HAND_WRITTEN)
    request = world.request()
    graph, machines = world.read()
    assert request.context.graph is graph
    assert request.context.memory_fraction == 0.7
    assert np.array_equal(request.context.order, np.arange(16))
    options = PlanOptions(global_batch=64, memory_fraction=0.7)
    asked = make_request(graph, machines, options)
    assert asked.facts == request.facts
    answer = plan(TINY, machines, global_batch=64, seq_len=32, partitioner="expert")
    assert answer.strategy.global_batch == 64
    assert answer.model.parameters == sum(p.numel for p in graph.parameters)
    assert answer.model.ref is None


def test_wrong_fields_of_a_config_are_a_capture_error() -> None:
    cluster = Cluster.from_preset("dgx-h100")
    for model in ({"model_type": "lama"}, {**TINY, "hidden_size": "wide"}):
        world = World(name="x", model=model, cluster=cluster.document, global_batch=8)
        with pytest.raises(CaptureError, match=f"model_type='{model['model_type']}'"):
            world.request()


def test_a_full_cluster_is_refused() -> None:
    full = Cluster.from_preset("dgx-h100").with_occupied(range(8))
    world = World(name="x", **{**HAND_WRITTEN, "cluster": full.document})
    with pytest.raises(NoFeasiblePlanError, match="all 8 devices"):
        world.request()


def test_graphs_are_read_once_and_kept_in_a_folder(tmp_path: Path) -> None:
    store = GraphStore(tmp_path / "graphs")
    made = store.graph(TINY, seq_len=32)
    assert store.graph(dict(reversed(TINY.items())), seq_len=32) is made
    (path,) = (tmp_path / "graphs").iterdir()
    again = GraphStore(tmp_path / "graphs").graph(TINY, seq_len=32)
    assert again == made
    assert again is not made
    assert store.graph(TINY, seq_len=64).seq_len == 64
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CaptureError, match=r"graph .* is damaged .*remove the file"):
        GraphStore(tmp_path / "graphs").graph(TINY, seq_len=32)
