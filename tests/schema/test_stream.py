"""Records of job streams: what cannot be is refused, with the place."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from planner.errors import PlanFileError
from planner.schema.stream import StreamRecord

GOOD: dict[str, Any] = {
    "schema_version": 1,
    "world": "job-stream-world",
    "cluster": {"name": "two", "hosts": [[2, 4]], "occupied": [[7, 7]]},
    "horizon_s": 100.0,
    "interval_s": 10.0,
    "blocked": ["refused", "no_room", "late"],
    "models": [{"name": "m", "sequential_s": 40.0}],
    "plans": [{"model": 0, "label": "dp4", "degree": 4, "alone_s": 10.0}],
    "device_sets": [[[0, 3]]],
    "jobs": {
        "arrival_s": [0.0, 1.0, 2.0, 95.0],
        "model": [0, 0, 0, 0],
        "beta": [1.0, 0.5, 0.2, 1.0],
        "size": [1.0, 1.0, 1.0, 1.0],
        "asked": [4, 0, 4, 4],
        "decided_s": [0.0, 1.0, 2.0, 95.0],
        "start_s": [0.0, None, 2.0, 95.0],
        "end_s": [10.0, None, 12.0, None],
        "plan": [0, -1, 0, 0],
        "devices": [0, -1, 0, 0],
        "done": [1.0, 0.0, 1.0, 0.5],
        "outcome": ["met", "refused", "late", "unfinished"],
    },
    "summary": {"arrived": 4, "blocked": 2, "mean_jct_s": "NaN"},
}


def _set(*place: str | int, value: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for key in place[:-1]:
            data = data[key]
        data[place[-1]] = value

    return change


def test_a_record_counts() -> None:
    record = StreamRecord.from_data(GOOD)
    assert record.counts() == {
        "met": 1,
        "late": 1,
        "refused": 1,
        "no_room": 0,
        "unfinished": 1,
        "undecided": 0,
    }
    assert (record.cluster.num_devices, record.cluster.num_usable) == (8, 7)
    assert len(record.jobs) == 4
    again = StreamRecord.from_json(record.to_json())
    assert again.to_json() == record.to_json()
    # A line a field and a column: large records are still small files.
    assert len(record.to_json().splitlines()) == 15 + 12 + 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("schema_version", value=2), "newer than 1"),
        (_set("jobs", "beta", value=[1.0]), "jobs.beta has 1 rows, jobs.arrival_s 4"),
        (_set("jobs", "model", 2, value=1), "jobs.model has index 1"),
        (_set("jobs", "plan", 0, value=3), "jobs.plan has index 3"),
        (_set("jobs", "devices", 0, value=1), "jobs.devices has index 1"),
        (_set("plans", 0, "model", value=1), "plans.model has index 1"),
        (_set("device_sets", 0, value=[[0, 8]]), "device_sets has devices 0 to 8"),
        (_set("device_sets", 0, value=[[2, 3], [0, 1]]), "devices 0 to 1"),
        (_set("cluster", "occupied", value=[[8, 8]]), "cluster.occupied has devices 8"),
        (_set("jobs", "arrival_s", 2, value=0.5), "job 2 arrives before"),
        (_set("jobs", "start_s", 0, value=None), "job 0 must have a start"),
        (_set("jobs", "end_s", 0, value=None), "job 0 is met and has no end"),
        (_set("jobs", "end_s", 3, value=99.0), "job 3 is unfinished and has an end"),
        (_set("jobs", "end_s", 0, value=101.0), "up to the horizon of 100 s"),
        (_set("jobs", "end_s", 2, value=1.5), "job 2 must arrive, be decided, start"),
        (_set("jobs", "decided_s", 1, value=None), "job 1 is refused and has no dec"),
        (_set("jobs", "outcome", 1, value="met"), "job 1 is met and never started"),
        (_set("jobs", "outcome", 1, value="lost"), "field jobs.outcome.1"),
        (_set("jobs", "outcome", 0, value="no_room"), "job 0 is no_room and started"),
        (_set("summary", "late", value=0), "summary.late is 0, and the jobs' rows"),
        (_set("summary", "blocked", value=3), "summary.blocked is 3"),
        (_set("summary", "arrived", value=5), "summary.arrived is 5"),
        (_set("jobs", "end_s", 0, value=float("inf")), "finite number"),
        (_set("horizon_s", value=0), "must be above 0"),
        (_set("more", value=1), "is not known"),
    ],
)
def test_what_cannot_be_is_refused(change: Callable[[Any], None], message: str) -> None:
    data = copy.deepcopy(GOOD)
    change(data)
    with pytest.raises(PlanFileError) as caught:
        StreamRecord.from_json(json.dumps(data), where="run.json")
    told = str(caught.value)
    assert told.startswith("run.json: ")
    assert message in told
    assert "\n" not in told
    assert len(told) < 300
