"""Job streams as Chrome trace events, which ui.perfetto.dev opens.

A process is a host under a policy, its threads are devices, an event is a job on one of
them. Source: Trace Event Format (Google), as :mod:`planner.report.trace`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from planner.errors import PlanFileError
from planner.report.stream.build import StreamReport
from planner.report.stream.data import StreamData
from planner.schema.stream import OUTCOMES

__all__ = ["MOST_EVENTS", "stream_trace"]

#: More of them open slowly.
MOST_EVENTS = 500_000


def stream_trace(report: StreamReport) -> str:
    """The one stream of a report, of all its policies, as a file.

    Args:
        report: Of one stream.

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
    lines = ",\n".join(
        json.dumps(event) for run in runs for event in _events(run, runs)
    )
    about = {
        "stream": report.streams[0].name,
        "cluster": report.first.cluster.name,
        "written by": f"Meshwright {report.version}",
    }
    head = json.dumps({"displayTimeUnit": "ms", "otherData": about})
    return f'{head[:-1]}, "traceEvents": [\n{lines}\n]}}\n'


def _events(run: StreamData, runs: tuple[StreamData, ...]) -> Iterator[dict[str, Any]]:
    hosts = len(run.host_size)
    # Perfetto takes process 0 for the idle one.
    first = 1 + runs.index(run) * hosts
    before = f"{run.name}: " if len(runs) > 1 else ""
    for host in range(hosts):
        yield _name("process_name", first + host, 0, f"{before}host {host}")
    for device, host in enumerate(run.host_of_device.tolist()):
        yield _name("thread_name", first + host, device + 1, f"device {device}")
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


def _name(kind: str, pid: int, tid: int, text: str) -> dict[str, Any]:
    return {
        "ph": "M",
        "name": kind,
        "pid": pid,
        "tid": tid,
        "ts": 0,
        "args": {"name": text},
    }
