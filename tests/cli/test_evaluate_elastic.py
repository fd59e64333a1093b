"""meshwright evaluate elastic, and the report of what it records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.schema.elastic import ElasticRecord
from tests.cli.shell import ask
from tests.envs.elastic.small import write_traces


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = write_traces(tmp_path_factory.mktemp("traces"))
    rates = folder / "throughputs_A100"
    found = ["evaluate", "elastic", "--trace", str(folder / "one.csv.gz")]
    return [*found, "--throughputs", str(rates), "--cluster", "dgx-a100-40:1"]


def test_a_trace_is_played_recorded_and_reported(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text = tmp_path / "runs", tmp_path / "report.md"
    words = [*words, "--policies", "edf", "edf+admission", "--loads", "0.5", "1"]
    words += ["--jobs", "10:40", "--slot-s", "0", "--failure-s", "2e4"]
    kept = ask(capsys, *words, "--record", str(folder), "--json")
    assert kept.code == 0, kept.err
    assert f"4 records in {folder}" in kept.err
    found = json.loads(kept.out)
    assert [(each["policy"], each["load"]) for each in found] == [
        (policy, load) for policy in ("edf", "edf+admission") for load in (0.5, 1.0)
    ]
    # What is not recorded comes to the same.
    plain = ask(capsys, *words, "--json")
    assert json.loads(plain.out) == found
    for each in found:
        name = f"one-load{each['load']:g}-0-{each['policy']}.json"
        record = ElasticRecord.load(folder / name)
        assert len(record.jobs) == each["jobs"] == 40
        for figure in ("blocked", "late", "declined", "utilisation", "failures"):
            assert record.summary[figure] == each[figure]
    assert sum(each["failures"] for each in found) > 0
    assert ask(capsys, "report", str(folder), "--md", str(text)).code == 0
    told = text.read_text()
    for each in found:
        row = (
            f"| {each['policy']}, load {each['load']:g} | 40 | {each['blocked']:.1%} |"
        )
        assert row in told
    table = ask(capsys, *words).out
    assert f"{found[-1]['blocked']:.4f}" in table


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--policies", "edff"], "did you mean 'edf'"),
        (["--loads", "3"], "load=3.0 by time; give a share"),
        (["--jobs", "50:20"], "give a window inside the trace"),
        (["--jobs", "all"], "jobs 'all'; write FIRST:COUNT"),
        (["--failure-s", "0"], "mean_s=0.0 of failures; give a positive time"),
        (["--cluster", "dgx-h100:1"], "device type with throughputs"),
        (["--trace-format", "elastic"], "did you mean 'elasticflow'"),
    ],
)
def test_wrong_values_are_refused(
    words: list[str],
    more: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran = ask(capsys, *words, *more)
    assert ran.code == 1
    assert told in " ".join(ran.err.split())
