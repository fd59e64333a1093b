"""The command ``meshwright admit``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.schema.admission import AdmissionDecision
from tests.cli.shell import ask
from tests.plans import TINY

FOLDER = Path(__file__).parents[2] / "examples" / "admission"
STATE = ("--cluster-state", FOLDER / "state.json")
TABLE = ("--throughputs", FOLDER / "throughputs.csv")


def test_a_decision_is_told_and_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "decision.json"
    answer = ask(capsys, "admit", FOLDER / "job.yaml", *STATE, *TABLE, "-o", out)
    assert answer.code == 0, answer.err
    made = AdmissionDecision.load(out)
    assert made.admitted
    assert made.promise is not None
    assert made.promise.deadline_s == 30000
    assert "promised: ends by 30000 s" in answer.out
    assert "sweep" in answer.out


def test_declined_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = tmp_path / "job.yaml"
    text = (FOLDER / "job.yaml").read_text()
    job.write_text(text.replace("30000", "5000"))
    answer = ask(capsys, "admit", job, *STATE, *TABLE, "--json")
    assert answer.code == 2
    assert answer.json["proven"] is True
    assert "finetune is declined" in answer.err


def test_throughputs_of_plans(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = {
        "name": "tiny",
        "model": f"hf:{TINY}",
        "batch": 4,
        "iterations": 10,
        "submitted_s": 0,
        "deadline_s": 1e6,
    }
    hosts = [{"name": f"h{at}", "device": "cpu", "devices": 1} for at in range(2)]
    (tmp_path / "job.json").write_text(json.dumps(job))
    (tmp_path / "state.json").write_text(json.dumps({"now_s": 0, "hosts": hosts}))
    words = ("admit", tmp_path / "job.json", "--cluster-state", tmp_path / "state.json")
    plans = ("--plan-on", "cpu=local", "--plans", tmp_path / "plans")
    more = ("--partitioner", "expert", "--seq-len", "16", "--json")
    answer = ask(capsys, *words, *plans, *more)
    assert answer.code == 0, answer.err
    made = AdmissionDecision.from_data(answer.json)
    assert made.origin == "plans"
    (segment,) = made.schedule[0].segments
    assert segment.plan is not None
    assert Path(segment.plan).is_file()
    mixed = ask(capsys, *words, *plans, *TABLE)
    assert "are two sources of throughputs; a decision takes one" in mixed.error


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("deadline_s: 30000", "deadline_s: 500", "deadline_s=500 is not after"),
        ("deadline_s: 30000", "deadline_s: 1e300", "deadline_s: must be at most 1"),
        ("deadline_s: 30000", "deadline_s: .nan", "is no finite number"),
        ("iterations: 40000", "iterations: -1", "field iterations: must be above 0"),
        ("model: llama3-8b", "model: llama4", "did you mean 'llama3-8b'?"),
        ("name: finetune", "name: Fine_Tune", "field name: "),
        ("min_degree: 4", "min_degree: 32", "give a larger cluster"),
        ("batch: 64\n", "", "field batch: is missing"),
    ],
)
def test_wrong_jobs_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, old: str, new: str, said: str
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text((FOLDER / "job.yaml").read_text().replace(old, new))
    answer = ask(capsys, "admit", job, *STATE, *TABLE)
    assert answer.code == 1
    assert said in answer.error


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("iterations_per_s,", "rate,", "has no column iterations_per_s, only model"),
        ("0.5,", "-0.5,", "line 5: field iterations_per_s: must be above 0"),
        ("a100", "a10", "device type with throughputs 'a100'; did you mean 'a10'?"),
    ],
)
def test_wrong_tables_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, old: str, new: str, said: str
) -> None:
    table = tmp_path / "table.csv"
    table.write_text((FOLDER / "throughputs.csv").read_text().replace(old, new, 99))
    words = ("admit", FOLDER / "job.yaml", *STATE, "--throughputs", table)
    answer = ask(capsys, *words)
    assert answer.code == 1
    assert said in answer.error


def test_a_table_that_is_no_csv_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = tmp_path / "table.csv"
    table.write_text("a" * 200_000)
    words = ("admit", FOLDER / "job.yaml", *STATE, "--throughputs", table)
    answer = ask(capsys, *words)
    assert answer.code == 1
    assert "field larger than field limit (131072); give a CSV file" in answer.error
