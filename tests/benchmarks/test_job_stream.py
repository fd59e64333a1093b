"""The command that replays a trace: golden figures, its record, and bad input."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from benchmarks.job_stream import main

_DATA = Path(os.environ.get("MESHWRIGHT_DATA", "none"))
_GOLDEN = _DATA / "pacml" / "golden.csv"

pytestmark = pytest.mark.skipif(
    not _GOLDEN.is_file(), reason="MESHWRIGHT_DATA has no pacml/golden.csv"
)


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    assert main([*words, "--json"]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("law", "policy"),
    [
        ("A", "min_feasible"),
        ("B", "para_max"),
        ("C", "para_min"),
        ("D", "constant_2"),
    ],
)
def test_golden_rows(
    law: str, policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _GOLDEN.open(newline="") as stream:
        row = next(
            row
            for row in csv.DictReader(stream)
            if (row["beta"], row["seed"], row["policy"]) == (law, "2", policy)
        )
    trace = tmp_path / "trace.csv"
    text = (_DATA / "pacml" / f"arrivals_{law}_2.csv").read_text().rstrip()
    # The job that arrives as the episode ends is counted, and not decided.
    trace.write_text(f"{text}\n1000000,gnmt,1\n")
    record = tmp_path / "decisions.csv"
    words = ("--arrivals", str(trace), "--policy", policy, "--decisions", str(record))
    found = _run(capsys, *words)
    for column in list(row)[3:]:
        assert found[column] == pytest.approx(float(row[column]), rel=1e-9), column
    with record.open(newline="") as stream:
        decisions = list(csv.DictReader(stream))
    assert len(decisions) == 1000
    with trace.open(newline="") as stream:
        arrivals = list(csv.DictReader(stream))
    assert [d["model"] for d in decisions] == [a["model"] for a in arrivals[:1000]]
    for name in ("arrival_s", "beta"):
        written = [float(d[name]) for d in decisions]
        assert written == [float(a[name]) for a in arrivals[:1000]]
    for outcome in ("refused", "no_room", "late"):
        count = sum(row["outcome"] == outcome for row in decisions)
        assert count == found[outcome]
    refused = {d["degree"] for d in decisions if d["outcome"] == "refused"}
    assert refused <= {"0"}


@pytest.mark.further
def test_a_horizon_and_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--arrivals", str(_DATA / "pacml" / "arrivals_A_0.csv"))
    words += ("--horizon-s", "60000", "--policy")
    found = _run(capsys, *words, "para_max")
    # One at the horizon.
    assert found["arrived"] == 61
    draws = [
        _run(capsys, *words, policy, "--seed", seed)["mean_degree"]
        for policy in ("random", "rollout")
        for seed in ("1", "1", "2")
    ]
    assert draws[0] == draws[1] != draws[2]
    assert draws[3] == draws[4]
    told = _run(capsys, *words, "rollout", "--law", "A")
    assert told["blocked"] < found["blocked"]


def test_a_trace_without_completed_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,model,beta\n0,vgg16,0.1\n")
    found = _run(capsys, "--arrivals", str(trace), "--policy", "constant_2")
    assert found["mean_jct_s"] is None
    assert (found["blocked"], found["late"]) == (1, 1)
    assert main(["--arrivals", str(trace), "--policy", "constant_2"]) == 0
    assert "blocking_rate            1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "options", "words"),
    [
        ("0,resnet9,0.5", (), "'resnet9'; did you mean 'resnet18'"),
        ("0,gnmt,1.5", (), "beta=1.5"),
        ("0,gnmt,nan", (), "beta=nan"),
        ("-1,gnmt,0.5", (), "at -1.0 s"),
        ("0,gnmt,x", (), "'x'"),
        ("7,gnmt,0.5", ("--horizon-s", "7"), "no arrival before the horizon of 7 s"),
        ("0,gnmt,0.5", ("--horizon-s", "-1"), "horizon_s=-1.0"),
        ("0,gnmt,0.5", ("--policy", "learnt"), "did you mean 'learned'"),
        ("0,gnmt,0.5", ("--policy", "greedy"), "known: constant_K, learned"),
        ("0,gnmt,0.5", ("--policy", "constant_3"), "degree 3 has no block"),
        ("0,gnmt,0.5", ("--policy", "rollout", "--law", "E"), "unknown law 'E'"),
        ("0,gnmt,0.5", ("--profiles", "nowhere"), "no profile resnet18.txt"),
        ("0,gnmt,0.5", ("--decisions", "no/where.csv"), "no/where.csv"),
    ],
)
def test_bad_input_is_named(
    line: str,
    options: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.csv").write_text(f"arrival_s,model,beta\n{line}\n")
    arguments = ["--arrivals", "trace.csv", "--policy", "para_max", *options]
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert not captured.out
