"""Prices of stages that learn by themselves, against closed forms."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from planner import plan
from planner.capture import capture
from planner.cost import CostModel
from planner.cost.table.step import price_table
from planner.graph import ModelGraph
from planner.schema import Optimizer, Plan, Precision, Strategy
from planner.schema.methods import read_method
from planner.space import Regime, StrategyTable
from tests.cost.made import device, hosts, setting_for
from tests.models.classifiers import Classifier, classifier_plan

#: Four hosts of one device, 100 GB/s between them.
CLUSTER = hosts((4, 1, device()), between=1e11)
WIDTH, DEPTH, BATCH = 1024, 8, 4096
PRECISION = Precision(compute="float32")


def _model() -> Classifier:
    return Classifier(width=WIDTH, depth=DEPTH)


@cache
def _graph() -> ModelGraph:
    example = {"x": ((64, 64), "float32")}
    return capture(_model(), example, loss="cross_entropy", dtype="float32")


@cache
def _cost(pin: str, many: int = 4) -> Any:
    """Context and strategy of a pipeline of four, and both prices of its step."""
    made: Plan = classifier_plan(
        _model(),
        4,
        batch=BATCH,
        num_microbatches=many,
        schedule="GPipe",
        optimizer=Optimizer(),
    )
    value = read_method("learning", pin)
    inexact = pin != "backpropagation"
    strategy: Strategy = made.strategy.model_copy(
        update={
            "learning": value,
            "semantics": "approximate" if inexact else "exact",
            "device_ranges": (),
        }
    )
    regime = Regime.of(strategy)
    context = setting_for(
        _graph(), CLUSTER, precision=PRECISION, regime=regime, optimizer=Optimizer()
    )
    model = CostModel(context)
    table = price_table(context, StrategyTable.from_strategies([strategy]))
    return model, strategy, model.cost(strategy), float(table.step_time_s[0])


@pytest.mark.parametrize("many", [1, 4])
def test_parts_alone_take_as_long_as_the_slowest(many: int) -> None:
    model, strategy, cost, row_s = _cost("sil", many)
    times = model.stages(strategy).times
    slowest = many * (times.forward + times.backward).max()
    step = slowest + cost.breakdown_s["optimizer"]
    assert cost.step_time_s == pytest.approx(step)
    assert cost.link_bytes == cost.collective_bytes == {}
    assert row_s == pytest.approx(step, rel=0.1)
    plain = _cost("backpropagation", many)[2]
    assert plain.step_time_s > step
    if many > 1:
        assert plain.memory.total.max() > cost.memory.total.max()


def test_recovery_counts_by_its_share_of_steps() -> None:
    parts = {
        pin: _cost(pin)[2].breakdown_s
        for pin in ("sil", "backpropagation", "sil:steps=300,recovery_steps=100")
    }
    alone, plain, mean = parts.values()
    for name in ("compute", "pipeline_bubble", "pipeline_transfer"):
        expected = 0.75 * alone[name] + 0.25 * plain[name]
        assert mean[name] == pytest.approx(expected, abs=1e-12), name
    sent = _cost("backpropagation")[2].collective_bytes["send"]
    assert _cost("sil:steps=300,recovery_steps=100")[2].collective_bytes == {
        "send": pytest.approx(sent / 4)
    }


def test_outputs_that_go_forward_are_a_fill_of_forwards() -> None:
    model, strategy, cost, _ = _cost("sil:inputs=outputs", 4)
    times = model.stages(strategy).times
    both = times.forward + times.backward
    # No message is longer than the work behind which it is sent.
    assert (times.send < both[:-1]).all()
    start = 0.0
    for stage in range(3):
        start += times.forward[stage] + times.send[stage]
    assert cost.step_time_s >= start + both[-1]
    assert cost.collective_bytes == {"send": BATCH * WIDTH * 4}


def test_alignment_is_forwards_a_broadcast_and_local_work() -> None:
    model, strategy, cost, row_s = _cost("rec-lra:skip=1", 1)
    stages = model.stages(strategy)
    times = stages.times
    forwards = times.forward.sum() + times.send.sum()
    broadcast = 2 * BATCH * 10 * 4 / 1e11
    # With skip=1 all error weights are of ten columns: next to nothing.
    least = forwards + broadcast + times.weight.max()
    pipeline = cost.step_time_s - cost.breakdown_s["optimizer"]
    assert least < pipeline < 1.1 * least
    assert row_s == pytest.approx(cost.step_time_s, rel=0.25)
    ahead, error = BATCH * WIDTH * 4, BATCH * 10 * 4
    assert cost.collective_bytes == {"send": ahead, "broadcast": error}
    assert cost.link_bytes == {"pp": ahead + error}


def test_error_weights_of_neighbours_cost_two_more_forwards() -> None:
    """Half of the layers have error weights as large as their weights."""
    seconds = []
    for skip in (1, 2):
        model, strategy, cost, _ = _cost(f"rec-lra:skip={skip}", 1)
        seconds.append(cost.breakdown_s["compute"])
        sizes = [len(stage.modules) for stage in strategy.stages]
    assert sizes == [2, 2, 2, 2]
    layer = float(model.stages(strategy).times.forward.max()) / 2
    assert seconds[1] - seconds[0] == pytest.approx(2 * layer, rel=0.1)


@pytest.mark.parametrize("pin", ["sil", "sil:inputs=outputs", "rec-lra"])
def test_a_timeline_ends_with_the_step(pin: str) -> None:
    model, strategy, cost, _ = _cost(pin)
    found = model.timeline(strategy)
    assert np.isfinite(found.actions.end_s).all()
    assert (found.actions.end_s >= found.actions.start_s).all()
    assert found.step_time_s == pytest.approx(cost.step_time_s, rel=1e-6)


def test_evidence_of_ones_own_is_weighed_and_tells_where_it_would_break_even() -> None:
    """With four stages alone: a part by itself has no bubble."""
    pins = {"pp": 4, "num_microbatches": 4, "schedule": "GPipe", "recompute": "none"}
    steps: dict[str, float] = {}
    for eta, wins in ((0.9, True), (0.01, False)):
        made = plan(
            _graph(),
            CLUSTER,
            global_batch=BATCH,
            pin=pins,
            precision=PRECISION,
            allow_approximate=True,
            efficiency={"sil": eta},
            certify=False,
        )
        learning = made.strategy.learning
        assert (learning.kind == "synthetic_labels") == wins
        other = next(
            one
            for one in made.provenance.regimes
            if one.method == ("exact" if wins else "sil")
        )
        assert other.step_time_s is not None
        assert other.break_even is not None
        steps[learning.kind] = made.prediction.step_time_s
        pair = (made.prediction.step_time_s, other.step_time_s)
        fast, slow = sorted(pair)
        assert other.break_even == pytest.approx(fast / slow)
    assert steps["synthetic_labels"] < steps["backpropagation"]
