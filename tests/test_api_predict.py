"""``predict`` as people call it: strategies by hand, from files, over memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner import predict
from planner.api import require_fit
from planner.cluster import Cluster
from planner.errors import NoFeasiblePlanError, PlanFileError, StrategyError
from planner.schema import Mesh, Strategy
from tests.cost.made import device, hosts, uniform_graph

EIGHT = hosts((2, 4, device()))


def test_predict_cuts_a_model_for_a_strategy_without_stages() -> None:
    given = {
        "mesh": {"pp": 4, "dp_shard": 2},
        "zero_stage": 2,
        "schedule": "1F1B",
        "num_microbatches": 8,
    }
    made = predict(uniform_graph(8), EIGHT, given)
    assert [len(stage.modules) for stage in made.strategy.stages] == [2, 2, 2, 2]
    assert made.workload.global_batch == 16
    assert made.provenance.partitioner == "given"
    again = predict(uniform_graph(8), EIGHT, made.strategy)
    assert again.prediction == made.prediction


def test_predict_uses_the_devices_that_are_named() -> None:
    cluster = EIGHT.with_occupied([0])
    given = {"mesh": {"dp_replicate": 2}, "device_ranges": [[6, 8]]}
    assert predict(uniform_graph(2), cluster, given).strategy.device_ids() == (6, 7)
    free = predict(uniform_graph(2), cluster, {"mesh": {"dp_replicate": 2}})
    assert free.strategy.device_ids() == (1, 2)
    taken = {"mesh": {"dp_replicate": 2}, "device_ranges": [[0, 2]]}
    with pytest.raises(StrategyError, match="device 0, which is occupied"):
        predict(uniform_graph(2), cluster, taken)


@pytest.mark.parametrize(("offload", "copies"), [(False, 0), (True, 2)])
def test_a_host_holds_the_states_of_its_devices_while_they_are_written(
    offload: bool, copies: int
) -> None:
    document = EIGHT.document
    group = document.hosts[0].model_copy(update={"memory_bytes": 1e9})
    cluster = Cluster.from_document(document.model_copy(update={"hosts": (group,)}))
    given = {
        "mesh": {"dp_replicate": 8},
        "synchronisation": {
            "kind": "local_steps",
            "outer_learning_rate": 0.7,
            "outer_momentum": 0.9,
            "offload": offload,
        },
    }
    made = predict(uniform_graph(2), cluster, given)
    (entry,) = made.prediction.memory
    held = (1 + copies) * entry.parameters_bytes + entry.optimizer_bytes
    assert made.prediction.host_memory_bytes == pytest.approx(4 * held)
    assert made.prediction.host_memory_limit_bytes == 1e9
    assert "CPU memory of the fullest host" in made.summary()


def test_predict_of_wrong_stages_names_the_unit() -> None:
    given = {"stages": [{"rank": 0, "modules": ["layers.0"]}]}
    with pytest.raises(StrategyError, match=r"missing 'layers\.1'"):
        predict(uniform_graph(2), EIGHT, given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mesh": {"dp_shard": 4}}, "zero_stage=0 with dp_shard=4"),
        ({"mesh": {"dp_replicate": 16}}, "needs 16 devices, 8 are free"),
        ({"mesh": {"tp": 3}}, "tp=3 does not divide features=512"),
        ({"mesh": {"pp": 2}, "schedule": "1F1B"}, "below the 2 stages"),
    ],
)
def test_predict_refuses_what_breaks_a_rule(given: dict[str, Any], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        predict(uniform_graph(8), EIGHT, given)


def test_predict_checks_the_global_batch() -> None:
    with pytest.raises(StrategyError, match="is not global_batch=9"):
        predict(uniform_graph(2), EIGHT, Strategy(), global_batch=9)


def test_predict_over_memory_says_by_how_much() -> None:
    cramped = hosts((1, 1, device(memory_bytes=1e9)))
    made = predict(uniform_graph(8), cramped, Strategy())
    entry = made.prediction.memory[0]
    assert entry.total_bytes > entry.limit_bytes == pytest.approx(0.9e9)
    with pytest.raises(
        NoFeasiblePlanError, match=r"GB more than its limit of 0\.90 GB"
    ):
        require_fit(made)
    require_fit(predict(uniform_graph(8), EIGHT, Strategy()))


@pytest.mark.parametrize("kind", ["json", "yaml", "plan", "object", "fields"])
def test_predict_reads_what_people_have(kind: str, tmp_path: Path) -> None:
    strategy = Strategy(mesh=Mesh(dp_replicate=2), num_microbatches=3)
    data = strategy.model_dump(mode="json", exclude_defaults=True)
    whole = predict(uniform_graph(2), EIGHT, strategy)
    source: Any = {"object": strategy, "fields": data}.get(kind)
    if source is None:
        source = tmp_path / f"strategy.{'yaml' if kind == 'yaml' else 'json'}"
        if kind == "plan":
            whole.save(source)
        else:
            source.write_text(
                yaml.safe_dump(data) if kind == "yaml" else json.dumps(data)
            )
    assert predict(uniform_graph(2), EIGHT, source).prediction == whole.prediction


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "not a whole JSON"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.json", '{"mesh": {"pp": 0}}', "mesh.pp"),
        ("a.json", '{"mash": {}}', "mash"),
        ("a.json", "[1]", "a.json"),
    ],
)
def test_predict_names_the_fault_of_a_file(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(PlanFileError) as caught:
        predict(uniform_graph(2), EIGHT, path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_predict_of_a_missing_file() -> None:
    with pytest.raises(PlanFileError, match="cannot read strategy"):
        predict(uniform_graph(2), EIGHT, "nowhere.json")


def test_both_fidelities_price_a_strategy() -> None:
    given = {"mesh": {"pp": 2}, "schedule": "1F1B", "num_microbatches": 4}
    simulated, closed = (
        predict(uniform_graph(8), EIGHT, given, fidelity=fidelity)
        for fidelity in ("simulated", "analytic")
    )
    assert simulated.prediction.fidelity == "simulated"
    assert closed.prediction.fidelity == "analytic"
    assert closed.prediction.step_time_s == pytest.approx(
        simulated.prediction.step_time_s, rel=0.01
    )


def test_ranks_that_trade_a_sequence_for_heads_divide_them() -> None:
    """GPT-2 large has 20 heads."""
    uneven = Strategy(mesh=Mesh(cp=8), context_algorithm="all_to_all")
    with pytest.raises(StrategyError, match="8 ranks do not divide the 20 heads"):
        predict("gpt2-large", "dgx-a100:1", uneven, seq_len=1024)


def test_a_second_copy_of_the_weights_lies_on_its_ranks() -> None:
    graph = uniform_graph(8)
    given: dict[str, Any] = {
        "mesh": {"dp_shard": 8},
        "zero_stage": 3,
        "num_microbatches": 2,
    }
    plain = predict(graph, EIGHT, given).prediction
    shards = {"second_copy": 4}
    made = predict(graph, EIGHT, given | {"communication": {"shards": shards}})
    copied = made.prediction
    more = copied.memory[0].parameters_bytes - plain.memory[0].parameters_bytes
    assert more == pytest.approx(graph.num_parameters * 2 / 4)
    # Hosts have four devices: all gathers but the first stay inside.
    assert copied.step_time_s < plain.step_time_s
    assert "DeepSpeed's ZeRO++, which is priced" in made.not_runnable[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"zero_stage": 2}, "zero_stage=2 over 8 ranks and pp=1"),
        ({"communication": {"shards": {"second_copy": 3}}}, "3 does not divide the 8"),
    ],
)
def test_a_second_copy_that_nothing_gathers_is_refused(
    changes: dict[str, Any], told: str
) -> None:
    given: dict[str, Any] = {
        "mesh": {"dp_shard": 8},
        "zero_stage": 3,
        "communication": {"shards": {"second_copy": 4}},
    }
    with pytest.raises(StrategyError, match=told):
        predict(uniform_graph(2), EIGHT, given | changes)
