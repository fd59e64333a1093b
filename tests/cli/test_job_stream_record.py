"""meshwright evaluate job-stream --record, and the same on any cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.schema.stream import StreamRecord
from tests.cli.shell import ask
from tests.cli.test_job_stream import PROFILES


@PROFILES
def test_streams_of_the_benchmark_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = ["evaluate", "job-stream", "--laws", "A", "C", "--seeds", "600:2"]
    words += ["--horizon-s", "5e4", "--record", str(folder)]
    ran = ask(capsys, *words, "--policy", "constant_4", "--json")
    assert ran.code == 0, ran.err
    assert f"4 records in {folder}" in ran.err
    names = [f"{law}-{seed}-constant_4.json" for law in "AC" for seed in (600, 601)]
    assert sorted(path.name for path in folder.iterdir()) == names
    rates = json.loads(ran.out)["C"]["blocking_rates"]
    second = StreamRecord.load(folder / "C-601-constant_4.json")
    assert (second.law, second.seed, second.policy) == ("C", 601, "constant_4")
    assert second.summary["blocking_rate"] == rates[1]
    # Nothing in a record depends on the clock, so that the same run changes nothing.
    assert ask(capsys, *words, "--policy", "constant_4").code == 0
    # Another policy meets the same streams.
    assert ask(capsys, *words, "--policy", "para_min").code == 0
    other = StreamRecord.load(folder / "C-601-para_min.json")
    assert other.jobs.arrival_s == second.jobs.arrival_s
    assert other.jobs.beta == second.jobs.beta
    words[words.index("5e4")] = "4e4"
    again = ask(capsys, *words, "--policy", "constant_4")
    assert "exists with other content" in again.error
    assert ask(capsys, *words, "--policy", "constant_4", "--force").code == 0
    assert StreamRecord.load(folder / "C-601-constant_4.json").horizon_s == 4e4


def test_streams_on_any_cluster_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = ["evaluate", "job-stream-world", "--cluster", "dgx-a100:2"]
    words += ["--models", "bert-large", "vit-h", "--loads", "1.5", "--seeds", "3:1"]
    words += ["--intervals", "60", "--waiting", "2", "--record", str(folder)]
    ran = ask(capsys, *words, "--policy", "min_feasible", "--json")
    assert ran.code == 0, ran.err
    record = StreamRecord.load(folder / "load1.5-3-min_feasible.json")
    assert (record.offered_load, record.seed, record.law) == (1.5, 3, None)
    (rate,) = json.loads(ran.out)["1.5"]["blocking_rates"]
    assert record.summary["blocking_rate"] == rate
    learned = ask(capsys, *words, "--policy", "learned")
    assert learned.code == 0, learned.err
    (path,) = folder.glob("load1.5-3-learned-*.json")
    assert StreamRecord.load(path).weights == path.stem.split("-")[-1]


def test_a_place_that_is_no_folder_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for world in ("job-stream", "job-stream-world"):
        ran = ask(capsys, "evaluate", world, "--record", file, "--policy", "para_min")
        assert "is not a folder" in ran.error
