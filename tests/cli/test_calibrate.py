"""``meshwright calibrate``: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.measurements.store import load_calibration
from planner.schema import Plan
from tests.cli.shell import ask
from tests.plans import TINY

HEADER = (
    "point_id,model,layers,hidden,heads,seq,gpu,n_gpus,tp,pp,microbatch,global_batch,"
    "metric,value"
)
SHAPE = "mine,4,512,8,512,A100-80GB,8"
RUNS = (
    f"a,{SHAPE},1,1,8,64,iter_time_s,0.1",
    f"b,{SHAPE},2,1,8,64,iter_time_s,0.1",
    f"c,{SHAPE},1,1,8,64,peak_mem_gb,9",
    f"d,{SHAPE},1,,8,64,iter_time_s,0.1",
)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join((HEADER, *RUNS)) + "\n")
    return path


def test_a_table_of_runs_and_a_file_of_constants(
    capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mine.json"
    answer = ask(capsys, "calibrate", runs, "-o", out, "--start", "none")
    assert answer.code == 0, answer.err
    assert answer.err == f"wrote {out}\n"
    lines = [line.split() for line in answer.out.splitlines() if line]
    assert lines[0] == ["run", "measured", "before", "after", "device", "framework"]
    assert [line[0] for line in lines[1:3]] == ["a", "b"]
    assert all(line[-2:] == ["a100-80", "torch"] for line in lines[1:3])
    assert "mean absolute error of 2 runs" in answer.out
    reasons = answer.out[answer.out.index("not used") :].splitlines()
    assert reasons[1].startswith("c")
    assert "peak_mem_gb" in reasons[1]
    assert "pp is not given" in reasons[2]
    made = load_calibration(out)
    assert made.name.startswith("runs ")
    assert made.devices.keys() == {"a100-80"}
    origin = json.loads(out.read_text())["origin"]
    assert list(origin["rows"].values()) == [["a", "b"]]


def test_rows_that_contradict_themselves_are_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = tmp_path / "runs.csv"
    rows = (f"{HEADER},vp", f"{RUNS[0]},", f"{RUNS[1]},4")
    runs.write_text("\n".join(rows) + "\n")
    words = ("calibrate", runs, "-o", tmp_path / "mine.json", "--start", "none")
    text = "vp=4, but pp=1 has no pipeline; correct vp or pp"
    printed = [line.split(maxsplit=1) for line in ask(capsys, *words).out.splitlines()]
    assert ["b", text] in [[word.strip() for word in line] for line in printed]
    told = ask(capsys, *words, "--json").json
    assert [row["contradictions"] for row in told["rows"]] == [[], [text]]


def test_as_json_and_on_top_of_a_file(
    capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    told = ask(capsys, "calibrate", runs, "-o", first, "--start", "none", "--json").json
    assert [row["point_id"] for row in told["rows"]] == ["a", "b"]
    assert [row["point_id"] for row in told["unusable"]] == ["c", "d"]
    assert told["error_after"] < told["error_before"]
    for row in told["rows"]:
        assert row["before"] == pytest.approx(row["before_s"] / row["measured_s"] - 1)
    made = load_calibration(first)
    for moved in told["moved"]:
        of = made.devices.get(moved["of"]) or made.recipes[moved["of"]]
        assert getattr(of, moved["name"]) == pytest.approx(moved["after"], rel=1e-5)
    again = ask(
        capsys, "calibrate", runs, "-o", second, "--start", first, "--json"
    ).json
    assert again["error_before"] == pytest.approx(told["error_after"], rel=1e-3)
    assert made.name in again["calibration"]


def test_the_file_prices_plans(
    capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mine.json"
    ask(capsys, "calibrate", runs, "-o", out, "--start", "none")
    words = ("--model", f"hf:{TINY}", "--seq-len", "32", "--cluster", "dgx-a100:1")
    plan_words = ("plan", *words, "--global-batch", "64", "--json", "--calibration")
    fitted = Plan.from_data(ask(capsys, *plan_words, out).json)
    plain = Plan.from_data(ask(capsys, *plan_words, "none").json)
    assert fitted.provenance.calibration == load_calibration(out).name
    assert plain.provenance.calibration is None
    assert fitted.prediction.step_time_s != plain.prediction.step_time_s
    strategy = tmp_path / "strategy.json"
    strategy.write_text(fitted.strategy.to_json())
    priced = Plan.from_data(
        ask(
            capsys,
            *("predict", "--strategy", strategy, *words, "--json"),
            *("--calibration", out),
        ).json
    )
    assert priced.prediction.step_time_s == pytest.approx(fitted.prediction.step_time_s)
    assert priced.provenance.calibration == fitted.provenance.calibration


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no column"),
        (f"{HEADER}\n", "none of 0 rows"),
        (f"{HEADER}\n{RUNS[2]}\n", "none of 1 rows"),
        (f"{HEADER}\n{RUNS[0].replace(',8,64,', ',eight,64,')}\n", "'eight'"),
    ],
)
def test_what_cannot_be_fitted_to_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, words: str
) -> None:
    path, out = tmp_path / "runs.csv", tmp_path / "mine.json"
    path.write_text(content)
    answer = ask(capsys, "calibrate", path, "-o", out, "--start", "none")
    assert answer.code == 1
    assert words in answer.error
    assert not out.exists()


def test_files_that_are_not_there(
    capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path
) -> None:
    gone, out = tmp_path / "gone", tmp_path / "mine.json"
    assert "gone" in ask(capsys, "calibrate", gone, "-o", out).error
    assert "gone" in ask(capsys, "calibrate", runs, "-o", gone / "x").error
    refused = ask(capsys, "calibrate", runs, "-o", out, "--start", gone)
    assert "calibrate" in refused.error
    plan_words = ("plan", "--model", f"hf:{TINY}", "--cluster", "dgx-a100:1")
    refused = ask(capsys, *plan_words, "--global-batch", "8", "--calibration", gone)
    assert "gone: No such file" in refused.error
