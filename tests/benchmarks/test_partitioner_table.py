"""Ratios, intervals, wins and goals, on answers made up to have known ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.partitioner_goals import goals
from benchmarks.partitioner_ratios import compare, log_ratio, mean_ratio
from benchmarks.partitioner_report import Report
from benchmarks.partitioner_solvers import Answer, latest_s
from benchmarks.partitioner_table import ablations, kind_tables
from benchmarks.partitioner_times import first_plans, quality_curves, without_clock
from benchmarks.partitioner_worlds import FIRST, Record
from planner.errors import PlanFileError


def _answer(score: float | None, seconds: float = 1.0, late: bool = False) -> Answer:
    return Answer(seconds=seconds, late=late, score=score, step_time_s=score)


def _record(
    place: int,
    kind: str = "mixed",
    budget_s: float | None = 1.0,
    devices: int = 64,
    **scores: float | Answer | None,
) -> Record:
    return Record(
        world=f"{kind}-{place}",
        identity=f"{place}",
        kind=kind,
        budget_s=budget_s,
        devices=devices,
        answers={
            name.replace("__", ":no-"): s if isinstance(s, Answer) else _answer(s)
            for name, s in scores.items()
        },
    )


def test_an_answer_against_none_counts_twice() -> None:
    assert log_ratio(2.0, 1.0) == pytest.approx(math.log(2))
    assert log_ratio(None, 1.0) == math.log(2)
    assert log_ratio(1.0, None) == -math.log(2)
    # No answer is no better than the worst that anybody gave.
    assert log_ratio(None, 1.0, 5.0) == math.log(5)
    assert log_ratio(1.0, None, 5.0) == -math.log(5)
    assert log_ratio(None, 1.0, 1.5) == math.log(2)
    assert math.isnan(log_ratio(None, None))


def test_intervals_of_two_worlds_end_at_them() -> None:
    # A quarter of all resamples holds the one twice, a quarter the other.
    found = mean_ratio(np.log([0.5, 2.0]))
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 0.5, 2.0))


def test_intervals_of_equal_worlds_are_points() -> None:
    found = mean_ratio(np.log([0.9] * 7))
    assert (found.value, found.low, found.high) == pytest.approx((0.9,) * 3)
    assert math.isnan(mean_ratio(np.array([])).value)


def test_intervals_of_many_worlds_are_normal() -> None:
    logs = np.random.default_rng(0).normal(-0.05, 0.2, 400)
    found = mean_ratio(logs)
    half = 1.96 * logs.std() / math.sqrt(len(logs))
    assert math.log(found.value) == pytest.approx(logs.mean())
    assert math.log(found.low) == pytest.approx(logs.mean() - half, abs=0.1 * half)
    assert math.log(found.high) == pytest.approx(logs.mean() + half, abs=0.1 * half)


def test_ties_are_closer_than_a_thousandth() -> None:
    found = compare([1.0, 1.0005, 1.002, 0.998, None, None], [1.0] * 5 + [None])
    assert (found.wins, found.ties, found.losses) == (1, 2, 2)


def test_the_best_baseline_of_each_world_and_of_all() -> None:
    # beam and anneal are best on one world each; anneal is less far off on the other.
    records = [
        _record(0, learned=0.5, auto=0.5, beam=1.0, anneal=1.1),
        _record(1, learned=1.0, auto=0.9, beam=2.0, anneal=1.0),
    ]
    (table,) = kind_tables(records)
    assert (table.kind, table.budget_s, table.worlds) == ("mixed", 1.0, 2)
    assert [row.solver for row in table.rows] == ["learned", "auto", "anneal", "beam"]
    assert table.strongest == "anneal"
    learned, auto, anneal, beam = table.rows
    assert learned.against_best.ratio.value == pytest.approx(math.sqrt(0.5 * 1.0))
    assert auto.against_best.ratio.value == pytest.approx(math.sqrt(0.5 * 0.9))
    assert anneal.against_best.ratio.value == pytest.approx(math.sqrt(1.1))
    assert beam.against_best.ratio.value == pytest.approx(math.sqrt(2.0))
    assert (learned.against_best.wins, learned.against_best.ties) == (1, 1)
    found = table.against_strongest["learned"].ratio.value
    assert found == pytest.approx(math.sqrt(0.5 / 1.1))
    shares = [row.best_share for row in table.rows]
    assert shares == [0.5, 1.0, 0.0, 0.0]


def test_late_answers_are_none() -> None:
    records = [
        _record(0, learned=1.0, beam=_answer(0.1, seconds=9.0, late=True), anneal=1.0),
        _record(1, learned=None, beam=1.0, anneal=None),
    ]
    (table,) = kind_tables(records)
    learned, anneal, beam = table.rows
    assert learned.against_best.ratio.value == pytest.approx(math.sqrt(2.0))
    assert (learned.missed, learned.late) == (1, 0)
    assert (beam.missed, beam.late, beam.seconds) == (0, 1, 5.0)
    assert (anneal.missed, anneal.best_share) == (1, 0.5)
    assert latest_s(1.0) == pytest.approx(1.7)
    assert latest_s(None) == math.inf


def test_those_who_were_asked_less_are_left_out() -> None:
    records = [_record(0, learned=1.0, beam=1.0, anneal=1.0)]
    records.append(_record(1, learned=1.0, beam=2.0))
    (table,) = kind_tables(records)
    assert [row.solver for row in table.rows] == ["learned", "beam"]
    assert kind_tables([_record(0, learned=1.0)]) == ()


def test_against_the_exhaustive_search_without_a_clock() -> None:
    records = [
        _record(
            0,
            "uniform",
            None,
            learned=_answer(1.0, 0.1),
            exhaustive=_answer(1.0, 8.0),
        ),
        _record(
            1,
            "uniform",
            None,
            learned=_answer(1.01, 0.1),
            exhaustive=_answer(1.0, 2.0),
        ),
        _record(0, "uniform", 1.0, learned=_answer(1.1), exhaustive=_answer(1.0)),
    ]
    unhurried, hurried = without_clock(records)
    assert unhurried.quality.ratio.value == pytest.approx(math.sqrt(1.01))
    assert unhurried.time.value == pytest.approx(1 / 40)
    assert (unhurried.worlds, unhurried.budget_s) == (2, None)
    assert hurried.quality.ratio.value == pytest.approx(1.1)
    assert hurried.time.value == pytest.approx(1 / 8)
    quality, time, *_ = goals(records)
    assert (quality.met, time.met) == (True, True)
    assert quality.found.startswith("1.0050 [1.0000, 1.0100], 2 worlds")


def test_parts_left_out_are_laid_beside_the_whole() -> None:
    records = [
        _record(0, learned=1.0, learned__learning=1.2, beam=1.0),
        _record(1, learned=1.0, learned__learning=1.2, beam=1.0),
        _record(2, learned=9.0, beam=1.0),
    ]
    found = ablations(records)
    assert list(found) == [("mixed", 1.0)]
    (one,) = found["mixed", 1.0].values()
    assert one.ratio.value == pytest.approx(1.2)
    assert (one.wins, one.ties, one.losses) == (0, 0, 2)
    (table,) = kind_tables(records)
    assert {row.solver for row in table.rows} == {"learned", "beam"}


def test_first_plans_are_medians() -> None:
    records = [
        Record(
            world=f"a model, run {run}",
            identity="",
            kind=FIRST,
            budget_s=0.0,
            devices=64,
            answers={
                "learned": _answer(1.0, seconds),
                "auto": _answer(1.0 if run else None, seconds),
            },
        )
        for run, seconds in enumerate((0.05, 0.09, 0.3))
    ]
    learned, auto = first_plans(records)
    assert (learned.case, learned.seconds, learned.runs) == ("a model", 0.09, 3)
    assert auto.seconds == math.inf
    assert [goal.met for goal in goals(records)] == [True, False]
    assert Report(records).data()["first_plans"][1]["seconds"] is None


def test_curves_are_over_the_best_that_anybody_found() -> None:
    records = [
        _record(0, budget_s=0.1, learned=2.0, beam=None),
        _record(0, budget_s=1.0, learned=1.0, beam=_answer(0.5, 9.0, late=True)),
        # Asked at one budget alone.
        _record(1, budget_s=1.0, learned=1.0, beam=5.0),
    ]
    curves = quality_curves(records)["mixed"]
    assert [(b, ratio.value) for b, ratio in curves["learned"]] == [
        (0.1, pytest.approx(4.0)),
        (1.0, pytest.approx(2.0)),
    ]
    assert [ratio.value for _, ratio in curves["beam"]] == pytest.approx([2.0, 2.0])
    assert quality_curves(records[2:]) == {}


@pytest.mark.parametrize(
    ("kind", "budget_s", "ratio", "met"),
    [
        ("mixed", 1.0, 0.90, True),
        ("sites", 1.0, 0.84, False),
        ("sites", 10.0, 0.99, True),
        ("uniform", 60.0, 1.01, False),
    ],
)
def test_goals_of_kinds(kind: str, budget_s: float, ratio: float, met: bool) -> None:
    records = [_record(n, kind, budget_s, learned=ratio, beam=1.0) for n in range(3)]
    goal = goals(records)[0]
    assert goal.met == met
    assert goal.what.startswith(f"{kind}, {budget_s:g} s")


def test_goals_of_the_worst_worlds() -> None:
    ratios = {"mixed": [0.5] * 190 + [1.02] * 8, "sites": [1.04, 1.2]}
    records = [
        _record(n, kind, auto=ratio, beam=1.0)
        for kind, all_of_it in ratios.items()
        for n, ratio in enumerate(all_of_it)
    ]
    worst, near = [goal for goal in goals(records) if goal.what.startswith("all")]
    assert (worst.found, worst.met) == ("1.200, 200 worlds", False)
    assert (near.found, near.met) == ("1.020, 200 worlds", True)
    (table, _) = kind_tables(records)
    row = table.row("auto")
    assert row is not None
    assert (row.against_best.worst, row.against_best.near_worst) == (1.02, 1.02)


def test_all_of_it_as_text_and_as_json() -> None:
    records = [
        _record(n, budget_s=budget, learned=1.0, auto=1.0, beam=1.0 + n)
        for n in range(2)
        for budget in (1.0, 10.0)
    ]
    report = Report(records)
    assert "Worlds: 2 mixed." in report.text()
    for title in ("goals", "against the best baseline", "mixed, 10 s, 2 worlds"):
        assert f"\n{title}\n" in report.text()
    assert "## Against the best baseline\n" in report.markdown()
    # Nothing was asked without a clock: no empty table is shown.
    assert "without a clock" not in report.text()
    data = json.loads(json.dumps(report.data(), allow_nan=False))
    # A mean of each budget and solver, and the worst worlds.
    assert len(data["goals"]) == 2 * 2 + 3 * 2
    assert [table["worlds"] for table in data["kinds"]] == [2, 2]


def test_budgets_of_processor_time_are_named() -> None:
    wall = [_record(n, learned=1.0, beam=1.0) for n in range(2)]
    timed = [replace(one, budget_s=10.0, clock="processor") for one in wall]
    assert "processor time" not in Report(wall).text()
    assert "Budgets of 10 s are processor time." in Report([*wall, *timed]).text()


def test_the_page_gets_its_results(tmp_path: Path) -> None:
    real = Path(__file__).parents[2] / "docs" / "partitioners.md"
    page = tmp_path / "partitioners.md"
    page.write_text(real.read_text(encoding="utf-8"), encoding="utf-8")
    for score in (0.9, 0.8):
        record = _record(0, learned=score, auto=1.0, beam=1.0)
        target = Report([record]).write(tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "0.800 [0.800, 0.800]" in text
    assert "0.900 [0.900, 0.900]" not in text
    assert f"(results/{target.name})" in text
    assert "### Goals" in text
    before, _, _ = real.read_text(encoding="utf-8").partition("## Results")
    assert text.startswith(before)
    page.write_text("nothing", encoding="utf-8")
    with pytest.raises(PlanFileError, match="no section of results"):
        Report([record]).write(tmp_path)
