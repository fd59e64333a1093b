"""The table of the job stream: seeds, intervals, pairs, and all of it, small."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import job_stream_work
from benchmarks.job_stream import main
from benchmarks.job_stream_replay import ReplayResult, replay_law, scaled_law
from benchmarks.job_stream_report import Report, make_report
from benchmarks.job_stream_table import (
    Row,
    check_seeds,
    compare,
    estimate,
    gains,
    rows_of,
    tasks_of,
)
from benchmarks.job_stream_work import CHOSEN_ON, Task, Work
from envs.ramp.arrivals import LAWS
from envs.ramp.jobs import MODELS
from planner.errors import StrategyError, UnknownNameError

_PROFILES = Path(os.environ.get("MESHWRIGHT_DATA", "none")) / "pipedream"
_needs_profiles = pytest.mark.skipif(
    not _PROFILES.is_dir(), reason="MESHWRIGHT_DATA has no pipedream folder"
)
_SHORT_S = 3e4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0:12", "overlap 0 to 2"),
        ("2:2", "the published traces"),
        ("4990:12", "overlap 5000 to 5999, which are validation"),
        ("5999:2", "validation"),
        ("9000", "FIRST:COUNT"),
        ("9000:1", "at least 2"),
        ("-4:8", "FIRST:COUNT"),
        ("9000:x", "FIRST:COUNT"),
    ],
)
def test_seeds_of_training_and_validation_are_refused(text: str, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        check_seeds(text)


def test_seeds_between_the_reserved_ones_are_taken() -> None:
    assert check_seeds("3:4997") == range(3, 5000)
    assert check_seeds("6000:2") == range(6000, 6002)
    assert set(CHOSEN_ON) <= set(range(5000, 6000))


def test_intervals_are_students() -> None:
    # Quantiles from a printed table: 12.7062 for one degree of freedom, 2.2010 for 11.
    two = estimate([0.1, 0.3])
    assert (two.mean, two.half) == pytest.approx((0.2, 12.7062 * 0.1), rel=1e-5)
    many = estimate([float(value) for value in range(12)])
    assert many.half == pytest.approx(2.2010 * np.sqrt(13 / 12), rel=1e-4)
    assert estimate([0.5] * 3).half == 0.0


@_needs_profiles
def test_all_policies_meet_the_trace_that_the_law_draws() -> None:
    drawn = LAWS["B"].draw(MODELS, _SHORT_S, 9000)
    decided = [(a.time_s, a.model, a.beta) for a in drawn if a.time_s < _SHORT_S]
    for policy in ("random", "rollout"):
        found = replay_law(policy, "B", 9000, horizon_s=_SHORT_S)
        assert [(d.arrival_s, d.model, d.beta) for d in found.decisions] == decided


@_needs_profiles
def test_load_brings_jobs_closer_together() -> None:
    assert scaled_law("A", 1.25).interval_s == 800.0
    found = replay_law("constant_4", "A", 9000, load=2.0, horizon_s=_SHORT_S)
    assert [d.arrival_s for d in found.decisions] == [500.0 * n for n in range(60)]
    with pytest.raises(StrategyError, match="load=nan"):
        scaled_law("A", math.nan)
    with pytest.raises(UnknownNameError, match="unknown law 'E'"):
        scaled_law("E")


@_needs_profiles
def test_differences_are_paired() -> None:
    work, seeds = Work(1e5, 1), range(9000, 9004)
    best = work.best("A")
    rows = [
        Row(label="best constant", policy=best),
        Row(label="8", policy="constant_8"),
    ]
    work.run(tasks_of(rows, "A", seeds), "")
    itself, other = compare(work, rows, "A", seeds)
    assert (itself.against_best.mean, itself.against_best.half) == (0.0, 0.0)
    assert itself.relative == 0.0
    rates = {
        row.label: [
            replay_law(row.policy, "A", seed, horizon_s=1e5).summary["blocking_rate"]
            for seed in seeds
        ]
        for row in rows
    }
    differences = np.subtract(rates["8"], rates["best constant"])
    assert other.blocking == estimate(rates["8"])
    assert other.against_best == estimate(differences.tolist())
    assert other.relative == pytest.approx(
        differences.mean() / np.mean(rates["best constant"])
    )
    assert gains([itself, other]) == {"best constant": 0.0, "8": other.relative}


@_needs_profiles
def test_decisions_are_counted_by_beta() -> None:
    work = Work(_SHORT_S, 1)
    task = Task(policy="min_feasible", law="A", seed=9000)
    work.run([task], "")
    decisions = replay_law("min_feasible", "A", 9000, horizon_s=_SHORT_S).decisions
    chosen = work[task].chosen
    assert chosen.sum() == len(decisions) == 30
    # Betas above 0.5 up to 1 need a degree of 2, but 1.00 may do with 1.
    above = [d for d in decisions if d.beta > 0.5]
    assert chosen[4:].sum() == len(above)
    assert chosen[4:, 2].sum() == sum(d.degree == 2 for d in above)


@_needs_profiles
def test_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept.jsonl"
    tasks = [Task(policy="para_max", law="A", seed=seed) for seed in (9000, 9001, 9002)]
    first = Work(_SHORT_S, 1, kept)
    first.run(tasks, "")
    text = kept.read_text()
    # Killed in the middle of the last line.
    kept.write_text(text[:-20])
    replayed: list[int] = []

    def counted(policy: str, law: str, seed: int, **options: Any) -> ReplayResult:
        replayed.append(seed)
        return replay_law(policy, law, seed, **options)

    monkeypatch.setattr(job_stream_work, "replay_law", counted)
    again = Work(_SHORT_S, 1, kept)
    again.run(tasks, "")
    assert replayed == [9002]
    for task in tasks:
        assert again[task].summary == first[task].summary
        np.testing.assert_array_equal(again[task].chosen, first[task].chosen)
    assert len(kept.read_text().splitlines()) == 3
    # Another horizon is another run.
    Work(2e4, 1, kept).run(tasks[:1], "")
    assert replayed == [9002, 9000]
    kept.write_text("{}\n")
    with pytest.raises(StrategyError, match=r"kept\.jsonl, line 1 is no episode"):
        Work(_SHORT_S, 1, kept)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("table")
    seeds = range(9000, 9002)
    return make_report(seeds, _SHORT_S, (0.5, 1.0), seeds, out, 1), out


@_needs_profiles
@pytest.mark.further
def test_every_law_has_every_policy(report: tuple[Report, Path]) -> None:
    made, out = report
    labels = [row.label for row in rows_of("constant_4")]
    assert [(one.law, one.row.label) for one in made.compared] == [
        (law, label) for law in LAWS for label in labels
    ]
    text = made.text()
    for label in labels:
        assert text.count(f"\n{label}") >= len(LAWS), label
    [results] = (out / "results").iterdir()
    assert results.name.startswith("job_stream_")
    written = results.read_text()
    for one in made.compared:
        assert f"{one.blocking.mean:.4f} ± {one.blocking.half:.4f}" in written
    for link in ("blocking_against_load", "degree_against_beta"):
        assert (out / "figures" / f"job_stream_{link}.svg").stat().st_size > 10_000
        assert f"(../figures/job_stream_{link}.svg)" in written


@_needs_profiles
def test_more_load_blocks_more(report: tuple[Report, Path]) -> None:
    made, _ = report
    for label in ("para_max", "min_feasible", "rollout"):
        light, own = (
            sum(one.blocking.mean for one in at if one.row.label == label)
            for at in made.loads.values()
        )
        assert light < own


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--seeds", "5000:12"), "validation"),
        (("--policy", "para_max"), "give --arrivals"),
        (("--arrivals", "trace.csv"), "--arrivals needs a --policy; known: para_max"),
        (("--processes", "0"), "processes=0"),
        (("--horizon-s", "nan"), "horizon_s=nan"),
    ],
)
def test_bad_input_is_named(
    words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    captured = capsys.readouterr()
    assert error in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


@_needs_profiles
@pytest.mark.slow
def test_processes_find_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for processes in ("1", "2"):
        words = ("--quick", "--json", "--horizon-s", "2e4", "--seeds", "9000:2")
        words += ("--processes", processes, "--out", str(tmp_path / processes))
        assert main(words) == 0
        rows = json.loads(capsys.readouterr().out)
        found.append([{**row, "ms_per_decision": None} for row in rows])
    assert found[0] == found[1]
