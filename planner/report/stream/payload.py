"""Data that the page's script draws: curves, bars and jobs, fit for a phone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.report.stream.build import Stream, StreamReport
from planner.report.stream.data import StreamData, blocking, devices_in_use, windows
from planner.schema.stream import OUTCOMES

__all__ = ["MOST_JOBS", "kept_jobs", "shown_streams", "stream_payload"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Jobs of all records of a page; of more, some streams, then some jobs are left out.
MOST_JOBS = 60_000
#: Times are whole numbers of this share of a stream: a pixel at the deepest zoom.
_TICKS = 10_000_000
_GOLDEN = (5**0.5 - 1) / 2


def shown_streams(
    report: StreamReport, most_jobs: int = MOST_JOBS
) -> tuple[Stream, ...]:
    """Streams that are drawn: as many as fit whole, at least one.

    Args:
        report: Report of all streams.
        most_jobs: Largest number of jobs of all records.
    """
    shown: list[Stream] = []
    total = 0
    for stream in report.streams:
        total += sum(len(run) for run in stream.runs)
        if shown and total > most_jobs:
            break
        shown.append(stream)
    return tuple(shown)


def kept_jobs(data: StreamData, most: int) -> Index:
    """Rows of the jobs that are drawn and listed, ascending.

    Of more than ``most``, those that held most device-seconds for one half of the
    room, and evenly chosen ones of the others for the other half.

    Args:
        data: One record.
        most: Jobs.
    """
    count = len(data)
    if count <= most:
        return np.arange(count)
    area = np.where(data.ran, (data.until_s - data.start_s) * data.held, 0.0)
    # Of equal ones any, not the first: steps of the golden ratio spread evenly.
    spread = np.arange(count) * _GOLDEN % 1.0
    large = np.lexsort((spread, -np.nan_to_num(area)))[: most // 2]
    others = np.setdiff1d(np.arange(count), large)
    room = most - len(large)
    even = others[np.linspace(0, len(others) - 1, room).astype(np.int64)]
    return np.union1d(large, even)


def stream_payload(report: StreamReport, most_jobs: int = MOST_JOBS) -> dict[str, Any]:
    """Data of the page, for JSON.

    Args:
        report: Report of all streams.
        most_jobs: Largest number of jobs of all records.
    """
    shown = shown_streams(report, most_jobs)
    runs = sum(len(stream.runs) for stream in shown)
    cluster = report.first.cluster
    return {
        "ticks": _TICKS,
        "outcomes": list(OUTCOMES),
        "hosts": [list(pair) for pair in cluster.hosts],
        "occupied": [list(pair) for pair in cluster.occupied],
        "usable": cluster.num_usable,
        "policies": list(report.policies),
        "streams": [
            {
                "name": stream.name,
                "horizon": stream.runs[0].record.horizon_s,
                "runs": [
                    _run(run, report.policies.index(run.name), most_jobs // runs)
                    for run in stream.runs
                ],
            }
            for stream in shown
        ],
    }


def _ticks(times: Array, horizon_s: float) -> Index:
    """Times as whole numbers, -1 where there is none."""
    found = np.rint(np.nan_to_num(times, nan=-1.0) * (_TICKS / horizon_s))
    return np.where(np.isnan(times), -1, found).astype(np.int64)


def _gaps(ticks: Index) -> list[int]:
    """Each number less the one before it: shorter to write."""
    gaps: list[int] = np.diff(ticks, prepend=0).tolist()
    return gaps


def _digits(values: Array) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]


def _run(data: StreamData, policy: int, most: int) -> dict[str, Any]:
    record, horizon_s = data.record, data.record.horizon_s
    curve, use, split = blocking(data), devices_in_use(data), windows(data)
    return {
        "policy": policy,
        "name": data.name,
        "models": [model.name for model in record.models],
        "plans": [plan.label for plan in record.plans],
        "sets": [
            [number for run in runs for number in run] for runs in record.device_sets
        ],
        "rate": {
            "time": _gaps(_ticks(curve.time_s, horizon_s)),
            "value": _digits(curve.rate),
        },
        "use": {
            "time": _gaps(_ticks(use.time_s, horizon_s)),
            "value": _digits(use.value),
            "mean": use.mean,
        },
        "windows": {
            "arrived": split.arrived.tolist(),
            "causes": [OUTCOMES.index(cause) for cause in split.causes],
            "blocked": split.blocked.tolist(),
        },
        "all": len(data),
        "jobs": _jobs(data, kept_jobs(data, most)),
    }


def _jobs(data: StreamData, kept: Index) -> dict[str, Any]:
    record, horizon_s = data.record, data.record.horizon_s
    arrival = _ticks(data.arrival_s[kept], horizon_s)

    def column(values: Sequence[Any]) -> list[Any]:
        picked: list[Any] = np.asarray(values)[kept].tolist()
        return picked

    def after(times: Array, begin: Array) -> list[int]:
        ticks: list[int] = _ticks((times - begin)[kept], horizon_s).tolist()
        return ticks

    return {
        "number": _gaps(kept),
        "arrival": _gaps(arrival),
        "model": column(record.jobs.model),
        "allowed": after(data.due_s, data.arrival_s),
        "waited": after(data.decided_s, data.arrival_s),
        "ran": after(np.where(data.ran, data.until_s, np.nan), data.start_s),
        "asked": column(record.jobs.asked),
        "plan": column(record.jobs.plan),
        "set": column(record.jobs.devices),
        "outcome": data.outcome[kept].tolist(),
    }
