"""Small clusters, jobs and throughputs that the tests of admission share."""

from __future__ import annotations

from typing import Any

from planner.schema.admission import (
    ClusterState,
    JobRequest,
    ResizePrice,
    StateHost,
    StateJob,
    ThroughputRow,
    Throughputs,
)

#: Iterations per second on 1, 2 and 4 devices.
RATES = {1: 1.0, 2: 2.0, 4: 3.0}


def table(device: str = "gpu", spread: float | None = None) -> Throughputs:
    """Throughputs of one model, the same share of them where it is spread."""
    rows = tuple(
        ThroughputRow(
            model="net",
            batch=8,
            device=device,
            degree=degree,
            iterations_per_s=rate,
            spread_iterations_per_s=spread and rate * spread,
        )
        for degree, rate in RATES.items()
    )
    return Throughputs(origin="table", name="small", rows=rows)


def request(name: str, iterations: float, deadline_s: float | None, **more: Any):
    """A job that is submitted at 0."""
    return JobRequest(
        **{
            "name": name,
            "model": "net",
            "batch": 8,
            "iterations": iterations,
            "submitted_s": 0.0,
            "deadline_s": deadline_s,
            **more,
        }
    )


def running(name: str, left: float, deadline_s: float | None, **devices: int):
    """A job that runs, and is promised its deadline if it has one."""
    return StateJob(
        request=request(name, left, deadline_s),
        iterations_left=left,
        devices=devices,
        started=True,
        promised=deadline_s is not None,
    )


def state(*jobs: StateJob, hosts: int = 1, **more: Any) -> ClusterState:
    """Hosts of 4 devices; a start costs 10 s, a change 20 device-seconds more."""
    return ClusterState(
        **{
            "now_s": 0.0,
            "hosts": tuple(
                StateHost(name=f"h{at}", device="gpu", devices=4) for at in range(hosts)
            ),
            "jobs": jobs,
            "price": ResizePrice(
                restart_s=10.0, checkpoint_bytes=20.0, bytes_per_s=1.0
            ),
            "throughputs": table(),
            **more,
        }
    )
