"""``meshwright plan`` with several partitioners, on a clock, and side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

import planner.api
import planner.cli.plan
from planner.api import plan
from planner.errors import MeshwrightError
from planner.schema import Plan
from planner.search import get_partitioner, partitioner_names
from planner.search.families import NEAR
from tests.cli.shell import ask
from tests.plans import TINY, tiny_graph

SMALL = (
    *("--model", f"hf:{TINY}", "--seq-len", "32", "--cluster", "dgx-a100:1"),
    *("--global-batch", "64"),
)
FEW = ("--evaluation-budget", "8")


def test_several_partitioners_are_asked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--partitioner", "expert, random", *FEW, "--json")
    made = Plan.from_data(ask(capsys, "plan", *SMALL, *words).json)
    names = [one.partitioner for one in made.provenance.contenders]
    assert names == ["expert", "random"]


def test_time_reaches_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--partitioner", "expert", "--time-budget-s", "0.5", "--json")
    made = Plan.from_data(ask(capsys, "plan", *SMALL, *words).json)
    assert made.provenance.time_budget_s == 0.5


@pytest.mark.parametrize("name", ["auto", *partitioner_names()])
def test_no_time_at_all_gives_a_plan_that_fits(name: str) -> None:
    made = plan(
        tiny_graph(),
        "dgx-a100:1",
        global_batch=64,
        partitioner=name,
        time_budget_s=0,
    )
    assert all(one.total_bytes <= one.limit_bytes for one in made.prediction.memory)


def test_all_partitioners_are_laid_side_by_side(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    reads = []
    read = planner.api.read_model

    def count(*given: object, **more: object) -> object:
        if not isinstance(given[0], planner.api.ModelGraph):
            reads.append(given[0])
        return read(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(planner.api, "read_model", count)
    file = tmp_path / "best.json"
    words = ("--compare", *FEW, "--time-budget-s", "0.5", "--json", "-o", file)
    answer = ask(capsys, "plan", *SMALL, *words)
    assert answer.code == 0
    rows = answer.json["contenders"]
    assert {row["partitioner"] for row in rows} == set(partitioner_names())
    assert reads == [f"hf:{TINY}"]
    planned = [row for row in rows if row["step_time_s"] is not None]
    times = [row["step_time_s"] for row in planned]
    assert times == pytest.approx(sorted(times))
    best = Plan.load(file)
    # The simplest of those that are nearly as fast.
    assert min(times) <= best.prediction.step_time_s * (1 + 1e-9)
    assert best.prediction.step_time_s <= min(times) * NEAR
    assert best.provenance.partitioner in {row["partitioner"] for row in planned}
    for row in planned:
        over = row["step_time_s"] / min(times) - 1
        assert row["over_best"] == pytest.approx(over, abs=1e-9)
    named = {one.partitioner: one.step_time_s for one in best.provenance.contenders}
    assert named == {row["partitioner"]: row["step_time_s"] for row in planned}


def test_who_has_no_plan_is_a_row_that_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = get_partitioner

    def lacking(name: str) -> object:
        if name == "random":
            raise MeshwrightError("partitioner 'random' needs 'dice'")
        return load(name)

    monkeypatch.setattr("planner.portfolio.get_partitioner", lacking)
    words = ("--compare", "--partitioner", "random,expert")
    answer = ask(capsys, "plan", *SMALL, *words)
    assert answer.code == 0
    first, second, third = answer.out.splitlines()[:3]
    assert first.startswith("partitioner")
    assert second.split()[0] == "expert"
    assert "0.00%" in second
    assert third.split()[:2] == ["random", "none"]
    assert third.endswith("partitioner 'random' needs 'dice'")
    assert "found by   expert" in answer.out


def test_where_nothing_fits_there_is_nothing_to_compare(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--compare", "--partitioner", "expert,random", "--global-batch", "7")
    small = ("--pin", "dp_shard=8")
    answer = ask(capsys, "plan", *SMALL, *words, *small)
    assert answer.code == 2
    assert answer.error.startswith("no feasible plan")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partitioner", "lerned"], "did you mean 'learned'?"),
        (["--partitioner", "expert,lerned"], "did you mean 'learned'?"),
        (["--partitioner", "expert,"], "has an empty name"),
        (["--time-budget-s", "-1"], "time_budget_s=-1.0 is not a number of seconds"),
        (["--compare", "--partitioner", "lerned"], "did you mean 'learned'?"),
    ],
)
def test_what_is_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    answer = ask(capsys, "plan", *SMALL, *words)
    assert answer.code == 1
    assert message in answer.error
