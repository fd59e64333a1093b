"""Steps and job streams as Chrome trace events, which ui.perfetto.dev opens.

Of a step a process is a pp rank, whose devices do the same at the same time; its
threads are what it computes, what it sends and waits to receive, and when it has
nothing to do. Of a job stream a process is a host under a policy, its threads are
devices, an event is a job on one of them.

Source: Trace Event Format (Google), JSON object format with events of phases X and M;
times are in microseconds, Perfetto keeps them in whole nanoseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from planner.errors import PlanFileError
from planner.report.data import ReportData
from planner.report.stream.build import StreamReport
from planner.report.stream.data import StreamData
from planner.report.timeline import Span, StageFacts, TimelineRow
from planner.schema.stream import OUTCOMES

__all__ = ["MOST_EVENTS", "THREADS", "chrome_trace", "stream_trace", "trace_json"]

#: Events of a stream's trace; more of them open slowly.
MOST_EVENTS = 500_000

#: Threads of each process in order, and what they hold.
THREADS = {
    "compute": (
        "forward",
        "backward",
        "backward input",
        "backward weight",
        "optimizer",
    ),
    "communication": ("transfer", "communication"),
    "bubble": ("bubble",),
}
_THREAD_OF = {
    kind: tid for tid, kinds in enumerate(THREADS.values(), start=1) for kind in kinds
}


def chrome_trace(
    reports: Sequence[ReportData], names: Sequence[str] = ()
) -> dict[str, Any]:
    """Processes, threads and complete events of the steps of one plan or two.

    Args:
        reports: One or two; both steps begin at 0.
        names: Names of two plans, for people: their files.

    Raises:
        PlanFileError: If a plan's step cannot be timed; says what would let it be.
    """
    called = [""]
    if len(reports) > 1:
        called = [f"{letter} {n}: " for letter, n in zip("AB", names, strict=True)]
    events: list[dict[str, Any]] = []
    pid = 0
    for report, name in zip(reports, called, strict=True):
        if report.timeline is None:
            raise PlanFileError(
                f"there is no timeline to write as a trace: "
                f"{report.missing['timeline']}"
            )
        for row in report.timeline.rows:
            # Perfetto takes process 0 for the idle one.
            pid += 1
            events += _names(row, pid, name)
            events += _spans(row, pid, report.stages)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            f"{key} {letter}".strip(): text
            for letter, report in zip("AB" if called[0] else " ", reports, strict=True)
            for key, text in _about(report).items()
        },
        "traceEvents": events,
    }


def trace_json(reports: Sequence[ReportData], names: Sequence[str] = ()) -> str:
    """The same as a file, an event a line.

    Raises:
        PlanFileError: If a plan's step cannot be timed.
    """
    return _text(chrome_trace(reports, names))


def _text(trace: dict[str, Any]) -> str:
    events = ",\n".join(json.dumps(event) for event in trace.pop("traceEvents"))
    return f'{json.dumps(trace)[:-1]}, "traceEvents": [\n{events}\n]}}\n'


def _about(report: ReportData) -> dict[str, str]:
    plan = report.plan
    told = {
        "model": plan.model.name,
        "cluster": plan.cluster.name,
        "strategy": plan.strategy.label(),
        "written by": f"Meshwright {plan.provenance.meshwright_version}",
    }
    if report.timeline is not None and report.timeline.caveat:
        told["caveat"] = report.timeline.caveat
    return told


def _names(row: TimelineRow, pid: int, before: str) -> list[dict[str, Any]]:
    many = f" × {row.devices:,}" if row.devices > 1 else ""
    label = f"{before}pp rank {row.rank}{many} ({row.device_type})"
    events = [
        _called("process_name", pid, 0, name=label),
        _called("process_sort_index", pid, 0, sort_index=pid),
    ]
    for tid, thread in enumerate(THREADS, start=1):
        events.append(_called("thread_name", pid, tid, name=thread))
        events.append(_called("thread_sort_index", pid, tid, sort_index=tid))
    return events


def _called(kind: str, pid: int, tid: int, **arguments: object) -> dict[str, Any]:
    """Event that names or sorts a process or a thread."""
    return {
        "ph": "M",
        "name": kind,
        "pid": pid,
        "tid": tid,
        "ts": 0,
        "args": arguments,
    }


def _spans(
    row: TimelineRow, pid: int, stages: Sequence[StageFacts]
) -> list[dict[str, Any]]:
    """Each begins no earlier than the one before ends, also after rounding."""
    events = []
    now_ns = 0
    for span in row.spans():
        start_ns = max(round(span.start_s * 1e9), now_ns)
        now_ns = max(round(span.end_s * 1e9), start_ns)
        events.append(
            {
                "ph": "X",
                "name": _title(span),
                "cat": span.kind,
                "pid": pid,
                "tid": _THREAD_OF[span.kind],
                "ts": start_ns / 1e3,
                "dur": (now_ns - start_ns) / 1e3,
                "args": _arguments(span, stages),
            }
        )
    return events


def _title(span: Span) -> str:
    if span.microbatch >= 0:
        return f"{span.kind} {span.microbatch}"
    return span.kind


def _arguments(span: Span, stages: Sequence[StageFacts]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if span.stage >= 0:
        told["stage"] = span.stage
    if span.microbatch >= 0:
        told["microbatch"] = span.microbatch
    if span.stage < 0 or span.kind not in {"forward", "backward"}:
        return told
    facts = stages[span.stage]
    talk_s = (
        facts.forward_communication_s
        if span.kind == "forward"
        else facts.backward_communication_s
    )
    if talk_s:
        told["exposed_communication_us"] = round(talk_s * 1e6, 3)
    if span.kind == "backward" and facts.recompute_s:
        told["recompute_us"] = round(facts.recompute_s * 1e6, 3)
    return told


def stream_trace(report: StreamReport) -> str:
    """The one stream of a report, of all its policies, as a file.

    Args:
        report: Report of one stream.

    Raises:
        PlanFileError: If there are several, or too many bars.
    """
    if len(report.streams) > 1:
        raise PlanFileError(
            f"a trace is of one stream, not of {len(report.streams)}; name the records "
            f"of one"
        )
    runs = report.streams[0].runs
    bars = sum(int(run.held[run.ran].sum()) for run in runs)
    if bars > MOST_EVENTS:
        raise PlanFileError(
            f"a trace of {bars:,} bars, one a job and device, is too large to open; "
            f"record a shorter stream (at most {MOST_EVENTS:,}), or write --out"
        )
    return _text(
        {
            "displayTimeUnit": "ms",
            "otherData": {
                "stream": report.streams[0].name,
                "cluster": report.first.cluster.name,
                "written by": f"Meshwright {report.version}",
            },
            "traceEvents": (event for run in runs for event in _jobs(run, runs)),
        }
    )


def _jobs(run: StreamData, runs: tuple[StreamData, ...]) -> Iterator[dict[str, Any]]:
    hosts = len(run.host_size)
    # Perfetto takes process 0 for the idle one.
    first = 1 + runs.index(run) * hosts
    before = f"{run.name}: " if len(runs) > 1 else ""
    for host in range(hosts):
        yield _called("process_name", first + host, 0, name=f"{before}host {host}")
    for device, host in enumerate(run.host_of_device.tolist()):
        yield _called("thread_name", first + host, device + 1, name=f"device {device}")
    jobs = run.record.jobs
    for job in range(len(run)):
        if not run.ran[job]:
            continue
        outcome = OUTCOMES[run.outcome[job]]
        start_ns = round(run.start_s[job] * 1e9)
        end_ns = round(run.until_s[job] * 1e9)
        for a, b in run.record.device_sets[jobs.devices[job]]:
            for device in range(a, b + 1):
                yield {
                    "ph": "X",
                    "name": run.record.models[jobs.model[job]].name,
                    "cat": outcome,
                    "pid": first + int(run.host_of_device[device]),
                    "tid": device + 1,
                    "ts": start_ns / 1e3,
                    "dur": max(end_ns - start_ns, 0) / 1e3,
                    "args": {
                        "job": job,
                        "outcome": outcome,
                        "plan": run.record.plans[jobs.plan[job]].label,
                    },
                }
