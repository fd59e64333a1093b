"""What a plan says of itself, held against its own numbers."""

from __future__ import annotations

import re

import pytest

from planner.schema import Plan, Stage
from planner.units import format_bytes, format_seconds
from tests.plans import gpt2_plan


def _lines(text: str) -> dict[str, str]:
    return {line[:11].strip(): line[11:] for line in text.splitlines()}


def test_a_summary_has_the_numbers_of_the_plan() -> None:
    plan = gpt2_plan()
    said = _lines(plan.summary())
    assert list(said) == [
        "model",
        "cluster",
        "mesh",
        "schedule",
        "recompute",
        "step",
        "memory",
        "found by",
    ]
    assert said["model"] == "gpt2, 124M parameters"
    assert said["cluster"] == "dgx-a100, 8 of 8 devices used"
    assert said["step"].startswith(format_seconds(plan.prediction.step_time_s) + " (")
    assert said["memory"].startswith(format_bytes(plan.prediction.peak_memory_bytes))
    assert f"{64 * 128 / plan.prediction.step_time_s:,.0f} tokens/s" in said["step"]
    assert plan.provenance.partitioner in said["found by"]


def test_one_is_not_plural() -> None:
    plan = gpt2_plan(dp_shard=8, num_microbatches=1)
    assert _lines(plan.summary())["schedule"] == "1 microbatch of 8 a step"
    plan = gpt2_plan(dp_shard=8, num_microbatches=2)
    assert _lines(plan.summary())["schedule"] == "2 microbatches of 4 a step"


def test_a_pipeline_says_its_stages() -> None:
    plan = gpt2_plan(pp=2, schedule="1F1B")
    sizes = sorted(len(stage.modules) for stage in plan.strategy.stages)
    said = _lines(plan.summary())
    assert re.match(
        rf"1F1B, 2 stages of {sizes[0]}( to {sizes[1]})? units, ", said["schedule"]
    )
    assert "pp 2" in said["mesh"]


def test_stages_that_recompute_unlike_are_counted() -> None:
    plan = gpt2_plan(pp=2, schedule="1F1B")
    kinds = ("none", "full")
    stages = tuple(
        Stage(rank=stage.rank, modules=stage.modules, recompute=kind)
        for stage, kind in zip(plan.strategy.stages, kinds, strict=True)
    )
    strategy = plan.strategy.model_copy(update={"stages": stages})
    mixed = plan.model_copy(update={"strategy": strategy})
    assert "recompute  none on 1 stages, full on 1 stages" in mixed.summary()


def test_a_plan_without_stages_can_be_described() -> None:
    plan = gpt2_plan(pp=2, schedule="1F1B")
    strategy = plan.strategy.model_copy(update={"stages": ()})
    said = plan.model_copy(update={"strategy": strategy}).summary()
    assert "1F1B, 2 stages, " in said
    assert "recompute  none" in said


def test_what_cannot_be_run_is_said() -> None:
    plan = gpt2_plan().model_copy(update={"not_runnable": ("cp=2 is not run yet",)})
    assert plan.summary().endswith("cannot run here: cp=2 is not run yet")


def test_an_explanation_accounts_for_all_the_time() -> None:
    plan = gpt2_plan(pp=2, schedule="1F1B")
    text = plan.explain()
    assert text.startswith(plan.summary())
    assert f"bound by: {plan.provenance.bound_by}" in text
    shares = [float(share) for share in re.findall(r"^ +([\d.]+)%  ", text, re.M)]
    assert len(shares) > 1
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
    assert shares == sorted(shares, reverse=True)


def test_an_explanation_names_runners_up_and_memory() -> None:
    plan = gpt2_plan()
    text = plan.explain()
    assert plan.provenance.alternatives
    for other in plan.provenance.alternatives:
        assert f"{other.label}: {other.reason}" in text
    for entry in plan.prediction.memory:
        assert f"rank {entry.rank}: {format_bytes(entry.total_bytes)} = " in text


def test_assumptions_are_shown() -> None:
    plan = gpt2_plan()
    guessed = plan.provenance.model_copy(update={"assumptions": ("x > 0 is true",)})
    text = plan.model_copy(update={"provenance": guessed}).explain()
    assert text.endswith("assumed while reading the model:\n  x > 0 is true")


def test_equal_plans_have_no_difference() -> None:
    plan = gpt2_plan()
    later = plan.model_copy(update={"timing_s": {"search": 99.0}})
    assert plan.diff(later) == ()
    assert plan.diff(Plan.from_json(plan.to_json())) == ()


def test_a_difference_names_field_and_both_values() -> None:
    ours, theirs = gpt2_plan(dp_shard=8), gpt2_plan(pp=2, schedule="1F1B")
    found = ours.diff(theirs)
    assert "strategy.mesh.pp: 1 -> 2" in found
    assert "strategy.schedule: GPipe -> 1F1B" in found
    assert "provenance.pinned.dp_shard: 8 -> (absent)" in found
    assert any(line.startswith("prediction.step_time_s: ") for line in found)
    assert not any(line.startswith(("model.", "timing_s")) for line in found)
    turned = theirs.diff(ours)
    assert len(turned) == len(found)
    assert "strategy.mesh.pp: 2 -> 1" in turned
