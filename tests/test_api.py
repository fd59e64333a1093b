"""``plan`` as people call it."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import planner
from planner import Cluster, ModelGraph, Plan, plan
from planner.capture import read_profile
from planner.errors import (
    CaptureError,
    ClusterError,
    NoFeasiblePlanError,
    StrategyError,
    UnknownNameError,
)
from planner.schema import Optimizer, Precision
from planner.schema.schedules import schedule_spec
from tests.cost.made import device, hosts, real_graph, uniform_graph

EIGHT = hosts((2, 4, device()))


def small(**options: Any) -> Plan:
    return plan(uniform_graph(8), EIGHT, **{"global_batch": 16, **options})


def test_a_plan_holds_together(tmp_path: Path) -> None:
    made = small()
    prediction = made.prediction
    assert made.strategy.global_batch == 16
    assert made.strategy.mesh.num_devices == 8
    assert made.not_runnable == ()
    assert sum(prediction.breakdown_s.values()) == pytest.approx(prediction.step_time_s)
    assert prediction.samples_per_s == pytest.approx(16 / prediction.step_time_s)
    assert prediction.tokens_per_s == pytest.approx(1024 * prediction.samples_per_s)
    assert 0 < (prediction.model_flops_utilization or 0) <= 1
    assert {entry.rank for entry in prediction.memory} == set(
        range(made.strategy.mesh.pp)
    )
    assert made.provenance.alternatives
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").canonical_bytes() == made.canonical_bytes()


def test_the_same_request_gives_the_same_bytes() -> None:
    assert small(seed=3).canonical_bytes() == small(seed=3).canonical_bytes()


def test_no_other_partitioner_did_better() -> None:
    step = small().prediction.step_time_s
    for name in ("expert", "random", "exhaustive"):
        assert step <= small(partitioner=name).prediction.step_time_s * (1 + 1e-9)
    both = small(partitioner=["random", "expert"])
    assert both.provenance.partitioner in {"random", "expert"}


def test_pins_are_kept_and_written_down() -> None:
    made = small(pin={"tp": 2, "schedule": "1F1B"})
    assert made.strategy.mesh.tp == 2
    assert made.strategy.schedule == "1F1B"
    assert made.strategy.mesh.pp > 1
    assert made.strategy.sharding.patterns
    assert made.provenance.pinned == {"tp": 2, "schedule": "1F1B"}


def test_alternatives_are_told_apart_from_the_chosen_one() -> None:
    fast, lean = small(), small(objective="memory")
    assert lean.prediction.peak_memory_bytes <= fast.prediction.peak_memory_bytes
    assert all(
        any(word in a.reason for word in ("slower", "as fast", "times as long"))
        for a in fast.provenance.alternatives
    )
    for other in lean.provenance.alternatives:
        faster = other.step_time_s < lean.prediction.step_time_s
        assert ("faster" in other.reason) == faster


def test_pins_are_written_down_as_one_type_whatever_they_came_as() -> None:
    made = small(pin={"tp": "2", "sequence_parallel": "false", "zero_stage": "0"})
    assert made.provenance.pinned == {
        "tp": 2,
        "sequence_parallel": False,
        "zero_stage": 0,
    }
    assert type(made.provenance.pinned["tp"]) is int
    typed = small(pin={"tp": 2, "sequence_parallel": False, "zero_stage": 0})
    assert made.canonical_bytes() == typed.canonical_bytes()


def test_blocks_are_compiled_only_if_that_is_asked_for() -> None:
    assert not small().strategy.compile
    made = small(pin={"compile": "true", "pp": 2})
    assert made.strategy.compile
    assert not schedule_spec(made.strategy.schedule).splits_backward
    assert made.not_runnable == ()
    assert made.provenance.pinned == {"compile": True, "pp": 2}
    assert "blocks compiled" in made.summary()
    pins = {"compile": True, "pp": 2, "schedule": "ZBVZeroBubble"}
    with pytest.raises(NoFeasiblePlanError, match="compile=True with ZBVZeroBubble"):
        small(pin=pins)


def test_modules_are_read_and_planned() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
    made = plan(model, EIGHT, global_batch=8, example_inputs=torch.zeros(2, 16))
    assert made.workload.seq_len is None
    assert made.prediction.tokens_per_s is None


def test_a_cluster_may_be_named() -> None:
    made = plan(uniform_graph(4), "dgx-h100:2", global_batch=16)
    assert made.cluster.ref == "dgx-h100:2"
    with pytest.raises(UnknownNameError, match="did you mean 'dgx-h100'"):
        plan(uniform_graph(4), "dgx-h10", global_batch=16)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"global_batch": 0}, StrategyError, "global_batch=0 is below 1"),
        ({"objective": "speed"}, UnknownNameError, "objective"),
        ({"target": "picotron"}, UnknownNameError, "target"),
        ({"devices": "some"}, UnknownNameError, "devices"),
        ({"partitioner": "exhastive"}, UnknownNameError, "'exhaustive'"),
        ({"recipe": "magic"}, UnknownNameError, "recipe"),
        ({"memory_fraction": 0.0}, StrategyError, "memory_fraction=0.0"),
        ({"risk": 0.3}, StrategyError, "risk=0.3"),
        ({"risk": 1.0}, StrategyError, "risk=1.0"),
        ({"risk": "high"}, StrategyError, "risk='high'"),
        ({"memory_fraction": 1.5}, StrategyError, "memory_fraction=1.5"),
        ({"evaluation_budget": 0}, StrategyError, "evaluation_budget=0"),
        ({"seed": -1}, StrategyError, "seed=-1 is below 0"),
        ({"pin": {"tb": 2}}, UnknownNameError, "did you mean 'tp'"),
        ({"pin": {"tp": 8.0}}, StrategyError, "pin tp=8.0 is not a whole number"),
        ({"pin": {"schedule": 1}}, StrategyError, "pin schedule=1 is not a name"),
    ],
)
def test_bad_input_is_named_in_one_line(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        small(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cluster_without_free_devices_is_no_crash() -> None:
    with pytest.raises(NoFeasiblePlanError, match="all 8 devices of made are occupied"):
        plan(uniform_graph(4), EIGHT.with_occupied(range(8)), global_batch=8)


def refused(**options: Any) -> NoFeasiblePlanError:
    with pytest.raises(NoFeasiblePlanError) as caught:
        plan(**options)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return caught.value


def test_what_does_not_fit_says_what_lacks_and_the_remedies_do_fit() -> None:
    graph = real_graph("llama3-8b")
    options: dict[str, Any] = {"model": graph, "cluster": "dgx-h100", "global_batch": 8}
    error = refused(**options, pin={"recompute": "none", "dp_replicate": 8})
    lack = re.search(r"\((\d+) bytes\) more than", error.reasons[0])
    assert lack
    assert int(lack[1]) > 1e9
    assert "h100" in error.reasons[0]
    assert any("dp_replicate=8" in remedy for remedy in error.remedies)
    for remedy in error.remedies:
        plan(**applied(options, remedy, {"recompute": "none", "dp_replicate": 8}))


def applied(
    options: dict[str, Any], remedy: str, pins: dict[str, Any]
) -> dict[str, Any]:
    """The request with a remedy of the error message carried out."""
    changed = {**options, "pin": dict(pins)}
    if remedy.startswith("no pins"):
        changed["pin"] = {}
        remedy = remedy.removeprefix("no pins and ")
    if knob := re.match(r"(\w+)=(\S+) instead of \1=", remedy):
        changed["pin"][knob[1]] = knob[2]
    elif batch := re.match(r"global_batch=(\d+)", remedy):
        changed["global_batch"] = int(batch[1])
    elif share := re.match(r"memory_fraction=([\d.]+)", remedy):
        changed["memory_fraction"] = float(share[1])
    elif remedy.startswith("optimizer states"):
        changed |= {"optimizer": Optimizer(state_dtype="bfloat16"), "target": "any"}
    elif remedy.startswith("weights, reductions"):
        changed["optimizer"] = Optimizer(state_dtype="bfloat16")
        changed["precision"] = Precision(parameter="bfloat16", reduce="bfloat16")
    elif length := re.match(r"seq_len=(\d+)", remedy):
        graph = options["model"]
        parts = graph.seq_len // int(length[1])
        changed["model"] = replace(
            graph, batch=graph.batch * parts, seq_len=int(length[1])
        )
    elif remedy == 'target="any"':
        changed["target"] = "any"
    elif remedy == "partitioner=auto":
        changed["partitioner"] = "auto"
    elif cluster := re.match(r"(\S+) \(\d+ devices\)", remedy):
        changed["cluster"] = cluster[1]
    elif remedy != "no pins":
        pytest.fail(f"a remedy that nobody can carry out: {remedy}")
    return changed


def test_more_machines_are_offered_and_suffice() -> None:
    options: dict[str, Any] = {
        "model": real_graph("llama3-8b"),
        "cluster": "rtx4090-pc",
        "global_batch": 8,
    }
    error = refused(**options)
    larger = [r for r in error.remedies if r.startswith("rtx4090-pc:")]
    assert larger
    for remedy in error.remedies:
        plan(**applied(options, remedy, {}))


def test_a_batch_that_no_mesh_divides() -> None:
    pins = {"dp_replicate": 8}
    options: dict[str, Any] = {
        "model": uniform_graph(4),
        "cluster": EIGHT,
        "global_batch": 7,
    }
    error = refused(**options, pin=pins)
    assert "dp_replicate=8 must divide global_batch=7" in error.reasons[0]
    assert error.remedies == (
        "dp_replicate=7 instead of dp_replicate=8",
        "global_batch=8",
    )
    for remedy in error.remedies:
        plan(**applied(options, remedy, pins))


@pytest.mark.parametrize(
    "pins",
    [
        {"tp": 3},
        {"pp": 1, "schedule": "1F1B"},
        {"schedule": "DualPipeV", "recompute": "full"},
        {"pp": 16},
        {"cp": 2},
        {"pp": 3, "tp": 3},
        {"microbatch_size": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("partitioner", ["auto", "expert", "random"])
def test_remedies_of_impossible_pins_can_be_carried_out(
    pins: dict[str, Any], partitioner: str
) -> None:
    options: dict[str, Any] = {
        "model": uniform_graph(8),
        "cluster": "dgx-a100",
        "global_batch": 16,
        "partitioner": partitioner,
    }
    error = refused(**options, pin=pins)
    assert "no legal strategy for global_batch=16 on 8 devices with " in str(error)
    assert error.remedies
    for remedy in error.remedies:
        plan(**applied(options, remedy, pins))


def test_dtypes_that_the_optimizer_cannot_have_are_the_reason() -> None:
    options: dict[str, Any] = {
        "model": uniform_graph(8),
        "cluster": EIGHT,
        "global_batch": 16,
        "optimizer": Optimizer(state_dtype="bfloat16"),
    }
    error = refused(**options)
    assert "state_dtype=bfloat16 with parameter=float32" in error.reasons[0]
    assert error.remedies == ('target="any"',)
    plan(**applied(options, error.remedies[0], {}))


def test_a_partitioner_that_looks_at_little_sends_to_one_that_looks_at_all() -> None:
    options: dict[str, Any] = {
        "model": real_graph("llama3-8b"),
        "cluster": "dgx-a100-40:2",
        "global_batch": 64,
        "partitioner": "random",
        "evaluation_budget": 1,
        "seed": 1,
    }
    error = refused(**options)
    assert error.remedies == ("partitioner=auto",)
    plan(**applied(options, "partitioner=auto", {}))


def test_a_cluster_from_a_file_offers_no_more_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    hosts((1, 2, device(memory_bytes=2e9))).document.save(path)
    error = refused(model=real_graph("llama3-8b"), cluster=str(path), global_batch=8)
    assert error.remedies == ()


@pytest.mark.parametrize("pipeline", [1, 2])
def test_profiles_are_planned_by_their_times(tmp_path: Path, pipeline: int) -> None:
    lines = [
        f"node{i} -- Linear({i}) -- forward_compute_time={i}.0, "
        f"backward_compute_time={2 * i}.0, activation_size=1000.0, "
        f"parameter_size=4000.000"
        for i in range(1, 5)
    ] + [f"\tnode{i} -- node{i + 1}" for i in range(1, 4)]
    path = tmp_path / "graph.txt"
    path.write_text("\n".join(lines))
    pins = {"pp": 2, "schedule": "1F1B"} if pipeline == 2 else {"pp": 1}
    made = plan(read_profile(path), hosts((1, 2, device())), global_batch=4, pin=pins)
    # 30 ms a sample in all; cut in two, nodes 1 to 3 take 18 ms of them.
    if pipeline == 1:
        assert made.prediction.breakdown_s["compute"] == pytest.approx(2 * 0.030)
    else:
        assert made.prediction.breakdown_s["compute"] == pytest.approx(4 * 0.018)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_garbage_collector_is_left_as_it_was(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    def fail(*_: object, **__: object) -> None:
        counts.append(gc.get_freeze_count())
        raise CaptureError("unreadable")

    monkeypatch.setattr("planner.api.read_model", fail)
    # As the tests have it.
    held = gc.get_freeze_count() > 0
    (gc.freeze if frozen else gc.unfreeze)()
    try:
        before = gc.get_freeze_count()
        with pytest.raises(CaptureError, match="unreadable"):
            small()
        # Frozen objects of other tests may end meanwhile; none may come.
        assert gc.get_freeze_count() <= before
        assert (gc.get_freeze_count() > 0) == frozen
        assert counts[0] > 0
    finally:
        (gc.freeze if held else gc.unfreeze)()


def test_names_resolve_lazily() -> None:
    assert planner.plan is plan
    assert planner.Cluster is Cluster
    assert planner.ModelGraph is ModelGraph
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        planner.plam  # noqa: B018


def test_cluster_errors_come_through() -> None:
    with pytest.raises(ClusterError):
        plan(uniform_graph(2), "dgx-h100:0", global_batch=8)
