"""Pins hold, and all partitioners agree on the legal strategies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner import plan
from planner.cost import CostModel
from planner.errors import NoFeasiblePlanError
from planner.portfolio import AUTO, run_partitioners
from planner.schema import PINNABLE, Plan
from planner.schema.methods import method_names, slots
from planner.schema.schedules import schedule_names
from planner.search import Request, get_partitioner, partitioner_names
from planner.search.expert import ExpertPartitioner, ladder
from planner.search.violations import nearest_violations
from planner.space import (
    RECOMPUTE_NAMES,
    Regime,
    StrategyTable,
    enumerate_strategies,
    normalize_pins,
    read_pins,
)
from tests.cost.made import device, hosts, request_for, uniform_graph
from tests.marked import cases

#: 6 units, 20 samples on 8 devices: some of everything divides, and some does not.
GRAPH = uniform_graph(6)
EIGHT = hosts((2, 4, device()))
BATCH = 20

VALUES: dict[str, list[Any]] = {
    "pp": [1, 2, 3, 4],
    "dp_replicate": [1, 2, 4, 5],
    "dp_shard": [1, 2, 5, 8],
    "cp": [1, 2],
    "tp": [1, 2, 3, 4],
    "ep": [1, 2],
    "zero_stage": [0, 1, 2, 3],
    "schedule": list(schedule_names()),
    "virtual_stages": [1, 2, 3],
    "microbatch_size": [1, 2, 3, 5],
    "num_microbatches": [1, 2, 4, 5, 10],
    "recompute": list(RECOMPUTE_NAMES),
    "sequence_parallel": [False, True],
    **{slot: list(method_names(slot)) for slot in slots()},
    "boundary": ["direct", "scattered"],
    "replicas": ["library", "ring", "direct"],
    "buckets": ["filled", "needed"],
    "loss_chunks": [1, 4],
    "compile": [False, True],
    "offload": ["none", "optimizer", "parameters+activations"],
    "semantics": ["exact", "approximate"],
}
#: What people pin most; the others are drawn less often.
COMMON = ("pp", "dp_shard", "tp", "schedule", "recompute", "num_microbatches")


def drawn_pins(count: int, seed: int) -> list[dict[str, Any]]:
    """Small sets of pins, of which about half leave something legal."""
    rng = np.random.default_rng(seed)
    weights = np.array([3.0 if knob in COMMON else 1.0 for knob in VALUES])
    found = []
    for _ in range(count):
        knobs = rng.choice(
            list(VALUES),
            size=int(rng.integers(1, 4)),
            replace=False,
            p=weights / weights.sum(),
        )
        drawn = {
            str(k): VALUES[str(k)][int(rng.integers(len(VALUES[str(k)])))]
            for k in knobs
        }
        if drawn.get("schedule") == "Interleaved1F1B":
            # With one stage a rank it has another name, and the pins are refused.
            drawn |= {"virtual_stages": 2} if "virtual_stages" in drawn else {}
        found.append(drawn)
    return found


def value_of(made: Plan, knob: str) -> set[Any]:
    strategy = made.strategy
    if knob in {"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"}:
        return {getattr(strategy.mesh, knob)}
    if knob == "recompute":
        return {stage.recompute for stage in strategy.stages}
    if knob == "sequence_parallel":
        return {strategy.sharding.sequence_parallel}
    if knob == "boundary":
        return {strategy.communication.boundary}
    if knob == "replicas":
        return {strategy.communication.replicas.algorithm}
    if knob == "buckets":
        return {strategy.communication.buckets}
    value = getattr(strategy, knob)
    return {str(value) if knob in slots() else value}


def any_legal(request: Request) -> bool:
    """By trying every number of devices."""
    return any(
        True
        for count in range(request.facts.num_devices, 0, -1)
        for _ in enumerate_strategies(
            request.facts, num_devices=count, pins=request.pins
        )
    )


def test_every_knob_is_drawn() -> None:
    assert set(VALUES) == set(PINNABLE)


@pytest.mark.parametrize("target", cases(["meshwright", "any"], further=["any"]))
def test_partitioners_agree_and_pins_hold(target: str) -> None:
    names = (*partitioner_names(), "auto")
    answered = 0
    for pins in drawn_pins(18, seed=1 if target == "any" else 2):
        request = request_for(
            GRAPH,
            EIGHT,
            BATCH,
            pins=normalize_pins(pins),
            target=target,
            regime=Regime.from_pins(pins),
        )
        exists = any_legal(request)
        answered += exists
        for name in names:
            options: dict[str, Any] = {"global_batch": BATCH, "pin": pins}
            options |= {"partitioner": name, "target": target, "evaluation_budget": 2}
            if not exists:
                with pytest.raises(NoFeasiblePlanError, match="no legal strategy for"):
                    plan(GRAPH, EIGHT, **options)
                continue
            made = plan(GRAPH, EIGHT, **options)
            assert made.provenance.pinned == read_pins(pins)
            for knob, value in read_pins(pins).items():
                assert value_of(made, knob) == {value}, (name, pins)
            assert made.provenance.evaluations["simulated"] <= 2 * (
                len(AUTO) if name == "auto" else 1
            )
    assert 4 < answered < 16


@pytest.mark.parametrize("recompute", RECOMPUTE_NAMES)
@pytest.mark.parametrize("schedule", schedule_names())
def test_expert_takes_any_schedule(schedule: str, recompute: str) -> None:
    """Found wanting once: a pinned GPipe was no legal strategy to it."""
    pins = {"pp": 2, "schedule": schedule, "recompute": recompute}
    made = plan(
        GRAPH, EIGHT, global_batch=16, partitioner="expert", pin=pins, target="any"
    )
    assert made.strategy.schedule == schedule
    assert value_of(made, "recompute") == {recompute}


def with_room_for(share: float, pins: dict[str, Any], **changes: Any) -> Request:
    """Devices whose memory suffices for a share of the legal strategies."""
    kept = normalize_pins(pins)
    roomy = request_for(uniform_graph(12), EIGHT, 16, pins=kept, **changes)
    model = CostModel(roomy.context)
    tables = enumerate_strategies(roomy.facts, pins=kept)
    memory = np.concatenate([model.table(table).memory_bytes for table in tables])
    limit = float(np.quantile(memory, share)) * (1 + 1e-6)
    cluster = hosts((2, 4, device(memory_bytes=limit)))
    changes["memory_fraction"] = 1.0
    return request_for(uniform_graph(12), cluster, 16, pins=kept, **changes)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("pins", [{}, {"pp": 2}, {"dp_replicate": 4}], ids=str)
def test_expert_finds_something_that_fits_if_there_is_something(
    share: float, pins: dict[str, int]
) -> None:
    request = with_room_for(share, pins)
    expert, exhaustive = (
        get_partitioner(name).search(request) for name in ("expert", "exhaustive")
    )
    assert exhaustive.candidates or share == 0.0
    assert bool(expert.candidates) == bool(exhaustive.candidates)
    assert (expert.nearest is None) == bool(expert.candidates)


def test_expert_leaves_its_rules_where_they_lead_nowhere() -> None:
    # Without ZeRO, a pipeline or more recomputation, only tp over both hosts is left.
    pins = {"pp": 1, "zero_stage": 0, "recompute": "selective"}
    request = with_room_for(0.0, pins)
    table = ladder(request, 8)
    assert table is not None
    assert set(table.tp.tolist()) == {1, 2, 4}
    found = get_partitioner("expert").search(request).candidates
    assert {c.strategy.mesh.tp for c in found} == {8}


def test_the_rules_in_auto_leave_the_whole_space_to_others() -> None:
    # Without ZeRO, a pipeline or more recomputation, only tp over both hosts is left.
    pins = {"pp": 1, "zero_stage": 0, "recompute": "selective"}
    request = with_room_for(0.0, pins)
    assert ExpertPartitioner(widen=False).search(request).candidates == ()
    for limited in (request, replace(request, time_budget_s=0.25)):
        answers = {one.partitioner: one for one in run_partitioners(limited, "auto")}
        assert answers["expert"].candidates == ()
        others = [name for name in answers if name != "expert"]
        assert any(answers[name].candidates for name in others)


def test_on_a_clock_auto_has_a_late_plan_rather_than_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if those that are asked after the rules had found nothing in their time.
    monkeypatch.setattr("planner.portfolio.AUTO", ("expert",))
    pins = {"pp": 1, "zero_stage": 0, "recompute": "selective"}
    request = with_room_for(0.0, pins, time_budget_s=0.1)
    (answer,) = run_partitioners(request, "auto")
    assert {c.strategy.mesh.tp for c in answer.candidates} == {8}


def test_the_rules_of_thumb_come_first() -> None:
    request = request_for(uniform_graph(12), EIGHT, 64, evaluation_budget=1)
    found = get_partitioner("expert").search(request)
    assert [c.strategy.label() for c in found.candidates] == ["dp_replicate8 mb8x1"]


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"pp": 16}, "pp=16 needs 16 devices, 8 are free"),
        ({"pp": 4, "tp": 4}, "pp=4 x tp=4 = 16 needs 16 devices, 8 are free"),
        ({"dp_shard": 8}, "dp_shard=8 must divide global_batch=20"),
        (
            {"dp_shard": 2, "microbatch_size": 4},
            "dp_shard=2 x microbatch_size=4 = 8 must divide global_batch=20",
        ),
        ({"pp": 7}, "pp=7 x virtual_stages=1 is more stages than the model's 6 units"),
        ({"tp": 3}, "tp=3 does not divide features=512; use 1, 2, 4, "),
        ({"ep": 2}, "ep=2, but the model has no experts; use ep=1"),
        ({"pp": 1, "schedule": "1F1B"}, "schedule 1F1B needs pp > 1"),
        ({"cp": 2}, "attention is neither causal nor full throughout"),
        (
            {"schedule": "DualPipeV", "recompute": "full"},
            "recompute=full with DualPipeV; a split backward recomputes many times",
        ),
        ({"dp_shard": 1, "zero_stage": 3}, "zero_stage=3 with dp_shard=1"),
    ],
    ids=str,
)
def test_nearest_violations(pins: dict[str, Any], words: str) -> None:
    request = request_for(GRAPH, EIGHT, BATCH, pins=normalize_pins(pins))
    assert not any_legal(request)
    assert words in nearest_violations(request)


def test_rows_of_the_ladder_keep_the_pins() -> None:
    for pins in drawn_pins(60, seed=5):
        codes = normalize_pins(pins)
        request = request_for(GRAPH, EIGHT, BATCH, pins=codes)
        table = ladder(request, 8)
        assert table is None or isinstance(table, StrategyTable)
        for knob, code in codes.items() if table is not None else ():
            assert set(getattr(table, knob).tolist()) == {code}
