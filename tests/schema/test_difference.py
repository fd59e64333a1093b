"""Where two plans differ, in words."""

from __future__ import annotations

import re

from planner.schema import Plan
from planner.units import format_seconds
from tests.plans import gpt2_plan


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
    before, after = (p.prediction.step_time_s for p in (ours, theirs))
    assert (
        f"prediction.step_time_s: {format_seconds(before)} -> {format_seconds(after)} "
        f"({100 * (after / before - 1):+.1f}%)"
    ) in found
    assert not any(line.startswith(("model.", "timing_s")) for line in found)
    turned = theirs.diff(ours)
    assert len(turned) == len(found)
    assert "strategy.mesh.pp: 2 -> 1" in turned


def test_lists_of_unequal_length_are_told_as_a_whole() -> None:
    ours, theirs = gpt2_plan(dp_shard=8), gpt2_plan(pp=2, schedule="1F1B")
    found = ours.diff(theirs)
    assert "strategy.stages: 1 entry -> 2 entries" in found
    assert "prediction.memory: 1 entry -> 2 entries" in found
    assert not any("stages[" in line or "memory[" in line for line in found)


def test_runners_up_are_named_by_the_first() -> None:
    ours, theirs = gpt2_plan(), gpt2_plan(tp=2)
    lines = [line for line in ours.diff(theirs) if "alternatives" in line]
    first, second = (p.provenance.alternatives for p in (ours, theirs))
    assert min(len(first), len(second)) > 1
    assert lines == [
        f"provenance.alternatives: {first[0].label} and {len(first) - 1} more -> "
        f"{second[0].label} and {len(second) - 1} more"
    ]


def test_long_lists_are_told_by_their_ends() -> None:
    ours, theirs = (
        gpt2_plan(pp=2, schedule="1F1B", recompute=kind) for kind in ("none", "full")
    )
    stages = ours.strategy.stages
    names = max((stage.modules for stage in stages), key=len)
    at = [stage.modules for stage in stages].index(names)
    shorter = stages[at].model_copy(update={"modules": names[:-1]})
    changed = (*stages[:at], shorter, *stages[at + 1 :])
    strategy = ours.strategy.model_copy(update={"stages": changed})
    (line,) = ours.diff(ours.model_copy(update={"strategy": strategy}))
    assert line == (
        f"strategy.stages[{at}].modules: {names[0]} to {names[-1]}, {len(names)} "
        f"entries -> {names[0]} to {names[-2]}, {len(names) - 1} entries"
    )
    assert any("recompute: none -> full" in line for line in ours.diff(theirs))


def test_numbers_have_units_and_small_changes_show() -> None:
    plan = gpt2_plan(dp_shard=8)
    changed = plan.prediction.model_copy(
        update={
            "step_time_s": plan.prediction.step_time_s * 1.00001,
            "link_bytes": {"dp": 3e9},
            "samples_per_s": 5000.0,
        }
    )
    found = plan.diff(plan.model_copy(update={"prediction": changed}))
    by_path = dict(line.split(": ", 1) for line in found)
    assert by_path["prediction.step_time_s"].endswith(" (+0.001%)")
    assert re.search(r" [kMG]?B -> 3 GB ", by_path["prediction.link_bytes.dp"])
    assert "-> 5,000/s (" in by_path["prediction.samples_per_s"]
