"""The step as Chrome trace events."""

from __future__ import annotations

import json
import math
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import pytest

from planner.errors import PlanFileError
from planner.report import build_report, chrome_trace
from planner.report.trace import THREADS, trace_json
from tests.plans import gpt2_graph, gpt2_plan
from tests.report.test_build import SCHEDULES, changed


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Events that take time."""
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize(
    "pins", SCHEDULES, ids=lambda pins: "-".join(map(str, pins.values()))
)
def test_events_fill_the_step_and_never_overlap(pins: dict[str, int | str]) -> None:
    plan = gpt2_plan(**pins)
    report = build_report(plan, model=gpt2_graph())
    trace = json.loads(trace_json([report]))
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts", "args"} <= set(event)
        assert event["ph"] in {"X", "M"}
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= 0
            assert event["cat"] in list(THREADS.values())[event["tid"] - 1]
    step_us = 1e6 * plan.prediction.step_time_s
    processes = [list(own) for _, own in groupby(complete(trace), itemgetter("pid"))]
    assert len(processes) == plan.strategy.mesh.pp
    for own in processes:
        # What a rank does follows itself without overlap, in all threads together.
        for before, after in pairwise(own):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
        total = sum(event["dur"] for event in own)
        assert math.isclose(total, step_us, rel_tol=1e-6, abs_tol=0.01)
        ends = own[-1]["ts"] + own[-1]["dur"]
        assert math.isclose(ends, step_us, rel_tol=1e-6, abs_tol=0.01)


def test_processes_are_pp_ranks_and_events_say_what_they_are() -> None:
    plan = gpt2_plan(pp=4, schedule="1F1B")
    report = build_report(plan, model=gpt2_graph())
    trace = chrome_trace([report])
    named = {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    kind = plan.prediction.memory[0].device_type
    assert named == {rank + 1: f"pp rank {rank} × 2 ({kind})" for rank in range(4)}
    threads = [
        event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    ]
    assert threads == [*THREADS] * 4
    assert report.timeline is not None
    spans = [span for row in report.timeline.rows for span in row.spans()]
    for event, span in zip(complete(trace), spans, strict=True):
        assert event["args"].get("stage", -1) == span.stage
        assert event["args"].get("microbatch", -1) == span.microbatch
        assert event["ts"] == pytest.approx(1e6 * span.start_s, abs=1e-3)
    first = complete(trace)[0]
    assert (first["name"], first["cat"]) == ("forward 0", "forward")
    assert trace["otherData"]["strategy"] == plan.strategy.label()


def test_two_plans_are_processes_apart() -> None:
    reports = [
        build_report(plan, model=gpt2_graph())
        for plan in (gpt2_plan(pp=2), gpt2_plan())
    ]
    trace = chrome_trace(reports, ("a.json", "b.json"))
    named = [e for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert [event["pid"] for event in named] == [1, 2, 3]
    begins = [event["args"]["name"].split(":")[0] for event in named]
    assert begins == ["A a.json", "A a.json", "B b.json"]
    assert trace["otherData"]["strategy B"] == reports[1].plan.strategy.label()


def test_a_step_that_cannot_be_timed_is_refused() -> None:
    report = build_report(changed(gpt2_plan(), "model", ref=None))
    with pytest.raises(PlanFileError, match="no timeline to write as a trace"):
        chrome_trace([report])
