"""Content of a report, before it is drawn."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from planner.errors import PlanFileError
from planner.report import build_report
from planner.report.data import memory_parts
from planner.report.timeline import SPAN_KINDS
from planner.schema import Plan
from planner.schema.measurement import Measurement
from tests.plans import gpt2_graph, gpt2_plan, local_plan, tiny_graph

SCHEDULES = (
    {"pp": 1},
    {"pp": 4, "schedule": "1F1B"},
    {"pp": 2, "schedule": "GPipe", "dp_shard": 4},
    {"pp": 2, "schedule": "Interleaved1F1B"},
    {"pp": 2, "schedule": "ZBVZeroBubble"},
    {"pp": 4, "schedule": "InterleavedZeroBubble"},
)


def changed(plan: Plan, part: str, **fields: object) -> Plan:
    """A plan with other fields in one of its parts."""
    data = plan.to_data()
    data[part].update(fields)
    return Plan.from_data(data)


@pytest.mark.parametrize(
    "pins", SCHEDULES, ids=lambda pins: "-".join(map(str, pins.values()))
)
def test_the_timeline_ends_when_the_plan_says(pins: dict[str, int | str]) -> None:
    plan = gpt2_plan(**pins)
    found = build_report(plan, model=gpt2_graph()).timeline
    assert found is not None
    assert found.caveat == ""
    assert math.isclose(found.step_time_s, plan.prediction.step_time_s, rel_tol=1e-9)
    assert len(found.rows) == plan.strategy.mesh.pp


@pytest.mark.parametrize("pins", [{"pp": 1}, {"pp": 2}], ids=str)
def test_processes_that_share_cores_end_when_the_plan_says(
    pins: dict[str, int],
) -> None:
    plan = local_plan(**pins)
    found = build_report(plan, model=tiny_graph()).timeline
    assert found is not None
    assert math.isclose(found.step_time_s, plan.prediction.step_time_s, rel_tol=1e-9)


@pytest.mark.parametrize(
    "pins", SCHEDULES, ids=lambda pins: "-".join(map(str, pins.values()))
)
def test_rows_have_no_gaps(pins: dict[str, int | str]) -> None:
    plan = gpt2_plan(**pins)
    found = build_report(plan, model=gpt2_graph()).timeline
    assert found is not None
    many = plan.strategy.num_microbatches * plan.strategy.virtual_stages
    for row in found.rows:
        assert row.start_s[0] == 0
        np.testing.assert_allclose(row.start_s[1:], row.end_s[:-1], rtol=1e-6)
        assert math.isclose(row.end_s[-1], found.step_time_s, rel_tol=1e-6)
        spent = row.seconds()
        assert math.isclose(sum(spent.values()), found.step_time_s, rel_tol=1e-6)
        spans = list(row.spans())
        assert sum(span.kind == "forward" for span in spans) == many
        assert spent["bubble"] >= 0
        held = plan.strategy.stages_of_rank(row.rank)
        assert {span.stage for span in spans if span.stage >= 0} == set(held)


def test_a_pipeline_has_bubbles_and_transfers() -> None:
    found = build_report(gpt2_plan(pp=4, schedule="1F1B"), model=gpt2_graph())
    assert found.timeline is not None
    last = found.timeline.rows[-1]
    assert [span.kind for span in last.spans()][:3] == ["bubble", "transfer", "forward"]
    kinds = {span.kind for row in found.timeline.rows for span in row.spans()}
    assert kinds <= set(SPAN_KINDS)
    assert {"forward", "backward", "optimizer", "transfer", "bubble"} <= kinds
    assert found.stages[0].forward_s is not None


def test_the_grid_names_every_device() -> None:
    plan = gpt2_plan("dgx-a100:2", pp=4)
    grid = build_report(plan, model=gpt2_graph()).grid
    assert len(grid) == 16
    assert grid.degrees == dict(
        zip(
            ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
            plan.strategy.mesh.degrees,
            strict=True,
        )
    )
    assert grid.host.tolist() == [device // 8 for device in range(16)]
    assert grid.rank.tolist() == list(range(16))


def test_memory_and_breakdown_are_the_plans() -> None:
    plan = gpt2_plan(pp=4)
    found = build_report(plan, model=gpt2_graph())
    assert found.devices_alike == 2
    for entry in found.memory:
        assert math.isclose(sum(memory_parts(entry).values()), entry.total_bytes)
    total = sum(part.seconds for part in found.breakdown)
    assert math.isclose(total, plan.prediction.step_time_s, rel_tol=1e-6)
    seconds = [part.seconds for part in found.breakdown]
    assert seconds == sorted(seconds, reverse=True)


def test_the_front_is_not_beaten() -> None:
    plan = gpt2_plan()
    points = build_report(plan, model=gpt2_graph()).pareto
    assert points[0].origin == "chosen"
    assert {point.devices for point in points} == {8, 4, 2, 1}
    keys = [(p.step_time_s, p.peak_memory_bytes, p.devices) for p in points]
    for point, key in zip(points, keys, strict=True):
        beaten = any(
            all(a <= b for a, b in zip(other, key, strict=True)) and other != key
            for other in keys
        )
        strictly = any(
            all(a < b * (1 - 1e-5) for a, b in zip(other[:2], key[:2], strict=True))
            and other[2] <= key[2]
            for other in keys
        )
        assert beaten if not point.on_front else not strictly
    assert any(point.on_front and point.devices == 1 for point in points)


def test_a_module_that_was_an_object_leaves_sections_out() -> None:
    plan = changed(gpt2_plan(pp=4), "model", ref=None)
    found = build_report(plan)
    assert found.timeline is None
    assert "passed to Meshwright as an object" in found.missing["timeline"]
    assert found.missing["pareto"] == found.missing["timeline"]
    assert found.pareto[0].origin == "chosen"
    assert found.memory
    assert found.stages[0].forward_s is None


def test_code_that_a_plan_names_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_plan_code.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = changed(gpt2_plan(), "model", ref="hostile_plan_code:make")
    found = build_report(plan)
    assert found.timeline is None
    assert "--model hostile_plan_code:make" in found.missing["timeline"]


def test_another_cluster_leaves_sections_out() -> None:
    plan = changed(gpt2_plan(), "cluster", ref="dgx-h100:1")
    found = build_report(plan, model=gpt2_graph())
    assert "is not the one that the plan was made for" in found.missing["timeline"]
    with pytest.raises(PlanFileError, match="not the one the plan was made for"):
        build_report(gpt2_plan(), cluster="dgx-h100:1")
    gone = changed(gpt2_plan(), "cluster", ref="gone/cluster.yaml")
    assert "cannot be read again" in build_report(gone).missing["timeline"]
    endless = changed(gpt2_plan(), "cluster", ref="/dev/zero")
    assert "is no file" in build_report(endless).missing["timeline"]


def test_foreign_constants_are_asked_for() -> None:
    plan = changed(gpt2_plan(), "provenance", calibration="mine")
    found = build_report(plan, model=gpt2_graph())
    assert "'mine'" in found.missing["timeline"]
    priced = build_report(plan, model=gpt2_graph(), calibration="shipped")
    assert priced.timeline is not None


def test_a_step_that_changed_is_told() -> None:
    plan = changed(gpt2_plan(), "prediction", step_time_s=1.0)
    found = build_report(plan, model=gpt2_graph())
    assert found.timeline is not None
    assert "the plan says 1 s" in found.timeline.caveat


def measurement(plan: Plan, **fields: object) -> Measurement:
    """A run that was a fifth slower than predicted."""
    ranks = plan.strategy.mesh.num_devices
    data: dict[str, object] = {
        "plan_label": plan.strategy.label(),
        "model_name": plan.model.name,
        "model_fingerprint": plan.model.fingerprint,
        "step_times_s": [1.0, *[1.2 * plan.prediction.step_time_s] * 3],
        "warm_up_steps": 1,
        "median_step_time_s": 1.2 * plan.prediction.step_time_s,
        "peak_memory_bytes": [10**9] * ranks,
        "collectives": [{"all_gather": {"count": 2, "bytes": 10**6}}] * ranks,
        "losses": [2.0, 1.9, 1.8, 1.7],
        "environment": {"backend": "gloo"},
    }
    return Measurement.from_data({**data, **fields})


def test_a_run_lies_beside_the_prediction() -> None:
    plan = gpt2_plan()
    assert "--measurement" in build_report(plan, model=gpt2_graph()).missing["measured"]
    found = build_report(plan, model=gpt2_graph(), measurement=measurement(plan))
    assert found.measured is not None
    assert math.isclose(found.measured.rows[0].ratio or 0, 1 / 1.2)
    assert "measured" not in found.missing
    with pytest.raises(PlanFileError, match="give a measurement of a run of this plan"):
        build_report(plan, measurement=measurement(plan, model_fingerprint="x"))
    with pytest.raises(PlanFileError, match="of 1 ranks"):
        build_report(plan, measurement=measurement(plan, peak_memory_bytes=[1]))
