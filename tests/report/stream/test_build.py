"""Parts of a report of job streams: totals, curves, tables, words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.errors import PlanFileError
from planner.report.stream import build_stream_report, read_streams
from planner.report.stream.data import (
    StreamData,
    blocking,
    devices_in_use,
    stream_sums,
    windows,
)
from planner.report.stream.payload import kept_jobs, shown_streams, stream_payload
from planner.report.stream.tables import (
    comparison,
    duration,
    happened,
    models_table,
    policies_table,
    streams_table,
)
from planner.schema.stream import StreamRecord
from tests.report.stream.made import made_record
from tests.schema.test_stream import GOOD


def _data(record: StreamRecord) -> StreamData:
    return StreamData(record=record, name="p")


def _without_jobs() -> StreamRecord:
    data: dict[str, Any] = {**GOOD, "plans": [], "device_sets": [], "summary": {}}
    data["jobs"] = {name: [] for name in GOOD["jobs"]}
    return StreamRecord.from_data(data)


def test_sums_are_those_of_the_rows() -> None:
    sums = stream_sums(_data(StreamRecord.from_data(GOOD)))
    assert (sums["arrived"], sums["blocked"], sums["slowed"]) == (4, 2, 1)
    assert sums["blocking_rate"] == 0.5
    # Two jobs of 10 s each, work of 40 s: speed-up 4, as fast as alone.
    assert sums["mean_jct_s"] == pytest.approx(10.0)
    assert sums["mean_speedup"] == pytest.approx(4.0)
    assert sums["mean_slowdown"] == pytest.approx(1.0)
    assert sums["mean_workers"] == 4.0
    # Two whole jobs and half of one.
    assert sums["throughput"] == pytest.approx(2.5 * 40.0 / 100.0)


def test_devices_in_use_change_with_starts_and_ends() -> None:
    data = {**GOOD, "device_sets": [[[0, 3]], [[4, 6]]]}
    data["jobs"] = {**GOOD["jobs"], "devices": [0, -1, 1, 0]}
    use = devices_in_use(_data(StreamRecord.from_data(data)))
    assert use.time_s.tolist() == [0.0, 2.0, 10.0, 12.0, 95.0, 100.0]
    assert use.value.tolist() == [4.0, 7.0, 3.0, 0.0, 4.0, 0.0]
    assert use.mean == pytest.approx((4 * 2 + 7 * 8 + 3 * 2 + 4 * 5) / 100)


def test_a_coarse_line_keeps_the_mean() -> None:
    data = _data(made_record(500))
    fine, coarse = devices_in_use(data), devices_in_use(data, most=50)
    assert len(coarse.time_s) == 50
    assert coarse.mean == fine.mean
    assert coarse.value.mean() == pytest.approx(fine.mean)
    sums = stream_sums(data)
    assert fine.mean == pytest.approx(sums["utilisation"] * 16)


def test_rates_over_time_end_at_the_whole_rate() -> None:
    data = _data(made_record(600))
    curve = blocking(data, most=100)
    assert len(curve.time_s) <= 100
    assert curve.rate[-1] == pytest.approx(data.blocking_rate)
    split = windows(data)
    assert split.arrived.sum() == len(data)
    assert len(split.arrived) == 40
    for cause, counts in zip(split.causes, split.blocked, strict=True):
        assert counts.sum() == data.count(cause)


def test_records_are_laid_out_by_stream_and_policy() -> None:
    records = [
        made_record(degree=degree, policy=f"always_{degree}", seed=seed)
        for degree in (4, 2)
        for seed in (0, 1)
    ]
    report = build_stream_report(records)
    assert report.policies == ("always_4", "always_2")
    assert [stream.name for stream in report.streams] == [
        "load 1.2, seed 0",
        "load 1.2, seed 1",
    ]
    rates = [_data(record).blocking_rate for record in records]
    assert report.totals[0].rates == tuple(rates[:2])
    assert report.totals[1].rate == pytest.approx(sum(rates[2:]) / 2)
    best = min(report.totals, key=lambda one: one.rate)
    assert f"{best.name} blocks the fewest jobs" in happened(report)
    table = policies_table(report)
    assert table.won is not None
    assert table.rows[table.won][0] == best.name
    assert len(streams_table(report).rows) == 2
    assert [row[:2] for row in models_table(report).rows] == [
        (policy, name)
        for policy in ("always_4", "always_2")
        for name in ("small", "middle", "large")
    ]


def test_streams_that_some_policies_lack_are_left_out_of_means() -> None:
    records = [made_record(seed=0), made_record(seed=1)]
    records.append(made_record(seed=1, degree=2, policy="always_2"))
    report = build_stream_report(records)
    assert [stream.name for stream in report.common] == ["load 1.2, seed 1"]
    alone = build_stream_report([records[0], records[2]])
    assert alone.totals == ()
    assert "No stream was decided by all" in comparison(alone)


def _changed(record: StreamRecord, **fields: Any) -> StreamRecord:
    return record.model_copy(update=fields)


def test_what_does_not_go_together_is_refused() -> None:
    one = made_record()
    with pytest.raises(PlanFileError, match="no records"):
        build_stream_report([])
    with pytest.raises(PlanFileError, match="is there twice"):
        build_stream_report([one, one])
    with pytest.raises(PlanFileError, match="their cluster differs; report on each"):
        build_stream_report([one, made_record(hosts=4, policy="other")])
    with pytest.raises(PlanFileError, match="their world differs"):
        build_stream_report([one, _changed(one, world="job-stream", policy="other")])
    longer = made_record(count=130, policy="other")
    with pytest.raises(PlanFileError, match="are of different jobs"):
        build_stream_report([one, longer])


def test_one_name_with_several_weights_is_told_apart() -> None:
    one = _changed(made_record(policy="learned"), weights="aa")
    report = build_stream_report([one, _changed(one, weights="bb")])
    assert report.policies == ("learned (aa)", "learned (bb)")
    assert "none blocks fewer" in happened(report)


def test_records_are_read_from_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="has no records"):
        read_streams([tmp_path])
    made_record(seed=1).save(tmp_path / "b.json")
    made_record(seed=0).save(tmp_path / "a.json")
    (tmp_path / "notes.txt").write_text("not a record")
    assert [record.seed for record in read_streams([tmp_path])] == [0, 1]
    assert read_streams([tmp_path / "b.json"])[0].seed == 1
    newer = tmp_path / "c.json"
    text = (tmp_path / "a.json").read_text()
    newer.write_text(text.replace('"schema_version": 1', '"schema_version": 9'))
    with pytest.raises(PlanFileError, match="schema_version 9 is newer than 1"):
        read_streams([tmp_path])


def test_a_stream_without_jobs_or_ends_is_told() -> None:
    empty = build_stream_report([_without_jobs()])
    assert "No job arrived" in happened(empty)
    assert math.isnan(empty.totals[0].sums["mean_jct_s"])
    stream_payload(empty)
    record = made_record(count=1)
    jobs = record.jobs.model_copy(
        update={"end_s": (None,), "outcome": ("unfinished",), "done": (0.5,)}
    )
    if record.jobs.start_s != (None,):
        running = build_stream_report([_changed(record, jobs=jobs)])
        assert "No job ended" in happened(running)


def test_of_long_streams_a_part_is_kept() -> None:
    data = _data(made_record(400))
    assert kept_jobs(data, 400).tolist() == list(range(len(data)))
    kept = kept_jobs(data, 100)
    assert len(kept) == 100
    assert (np.diff(kept) > 0).all()
    area = np.where(data.ran, (data.until_s - data.start_s) * data.held, 0.0)
    largest = np.sort(area)[-40:]
    assert np.isin(largest, area[kept]).all()
    # Blocked jobs are there, too.
    assert (~data.ran[kept]).sum() > 10
    report = build_stream_report([made_record(seed=seed) for seed in range(4)])
    assert len(shown_streams(report, most_jobs=250)) == 2
    assert len(stream_payload(report, 250)["streams"]) == 2
    assert len(shown_streams(report, most_jobs=1)) == 1


def test_the_payload_keeps_the_times() -> None:
    record = made_record(60)
    payload = stream_payload(build_stream_report([record]))
    (stream,) = payload["streams"]
    (run,) = stream["runs"]
    unit = stream["horizon"] / payload["ticks"]
    arrival = np.cumsum(run["jobs"]["arrival"]) * unit
    assert arrival == pytest.approx(record.jobs.arrival_s, abs=unit)
    for index, (start, end) in enumerate(
        zip(record.jobs.start_s, record.jobs.end_s, strict=True)
    ):
        ran = run["jobs"]["ran"][index]
        if start is None:
            assert ran == -1
            continue
        until = record.horizon_s if end is None else end
        assert ran * unit == pytest.approx(until - start, abs=unit)
        assert run["sets"][run["jobs"]["set"][index]] == [
            number
            for pair in record.device_sets[record.jobs.devices[index]]
            for number in pair
        ]


def test_times_are_told_in_the_unit_that_fits() -> None:
    assert duration(5.0) == "5 s"
    assert duration(90.0) == "1.5 min"
    assert duration(7000.0) == "1.94 h"
    assert duration(1e6) == "11.6 d"
    assert duration(math.nan) == ""
