"""Records of elastic streams that make no sense are refused."""

from __future__ import annotations

import json

import pytest

from planner.errors import PlanFileError
from planner.schema.elastic import ElasticRecord
from tests.envs.elastic.small import recorded


def _changed(path: str, value: object) -> str:
    """The record as JSON, with another value at a path."""
    data = recorded().record("by hand").to_data()
    *names, last = [int(n) if n.isdigit() else n for n in path.split(".")]
    place = data
    for name in names:
        place = place[name]
    place[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("schema_version", 2, "schema_version 2 is newer"),
        ("world", "job-stream", "field world: must be 'elastic-stream'"),
        ("jobs.name.1", "job0", "2 jobs are called job0; give each a name"),
        ("jobs.name", ["a"], "jobs.model has 4 rows, jobs.name 1"),
        ("jobs.model.2", 1, "jobs.model has index 1, and there are 1"),
        ("jobs.submit_s.2", 9.0, "job job2 is submitted before the one above it"),
        ("jobs.told_s.0", None, "job job0 must have an answer and its time"),
        (
            "jobs.end_s.1",
            41.0,
            "is ended at 41 s; give times from then to the end of 40 s",
        ),
        ("jobs.end_s.1", None, "job job1 is met, but its answer is promised"),
        ("jobs.outcome.2", "late", "job job2 is late, but its answer is declined"),
        ("jobs.deadline_s.0", 20.0, "its deadline 20 s, and it ends at 40 s"),
        ("jobs.iterations.0", 0, "field jobs.iterations.0: must be above 0"),
        ("pieces.job.0", 7, "pieces.job has index 7"),
        ("pieces.kind.0", 1, "pieces.kind has index 1"),
        (
            "pieces.end_s.0",
            31.0,
            "job job0 holds devices from 30 to 40 s; give times from",
        ),
        ("pieces.start_s.1", 9.0, "job job1 holds devices from 9 to 30 s"),
        ("pieces.end_s.1", 31.0, "jobs hold 5 gpu at 30 s, where 4 are alive"),
        ("degrees", [2, 1, 4], "degrees (2, 1, 4); give each once, ascending"),
        ("models.0.rates", [[1.0]], "model net/64 has rates of [1] degrees"),
        ("devices", [[5.0, [4]], [0.0, [4]]], "devices must have ascending times"),
        ("devices", [[0.0, [3]]], "jobs hold 4 gpu at 10 s, where 3 are alive"),
        ("summary.late", 1, "summary.late is 1, and the jobs' rows come to 0"),
    ],
)
def test_wrong_records_are_refused(path: str, value: object, told: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        ElasticRecord.from_json(_changed(path, value), where="run.json")
    assert str(caught.value).startswith("run.json: ")
    assert told in str(caught.value)
