"""Partitioners on worlds: what is printed, what is null, and going on after a kill."""

from __future__ import annotations

import json
import signal
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from benchmarks import partitioner_solvers
from benchmarks.partitioner_solvers import attempt, baselines, latest_s, solver_names
from benchmarks.partitioner_study import Study, first_worlds, run_study
from benchmarks.partitioner_worlds import FIRST, Arena, Kept, identity
from benchmarks.partitioners import main
from envs.partition import GraphStore, World
from planner.errors import NoFeasiblePlanError, PlanFileError, StrategyError
from planner.search import Candidate, Request, SearchResult, base
from planner.search.expert import ExpertPartitioner

TINY = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "vocab_size": 256,
}
WORLD: dict[str, Any] = {
    "name": "tiny",
    "model": TINY,
    "seq_len": 32,
    "cluster": "dgx-h100:1",
    "global_batch": 64,
}

_STUBS = ("nothing", "broken", "slow", "refusing", "lying")


class Stub:
    """A partitioner that counts how often it is asked."""

    name = "stub"
    asked: list[str] = []  # noqa: RUF012 shared on purpose

    def search(self, request: Request) -> SearchResult:
        Stub.asked.append(self.name)
        return self.answer(request, ExpertPartitioner().search(request))

    def answer(self, request: Request, found: SearchResult) -> SearchResult:
        return found


class Nothing(Stub):
    name = "nothing"

    def answer(self, request: Request, found: SearchResult) -> SearchResult:
        return SearchResult(
            partitioner="nothing",
            candidates=(),
            nearest=None,
            evaluations={},
            seconds=0.0,
        )


class Broken(Stub):
    name = "broken"

    def answer(self, request: Request, found: SearchResult) -> SearchResult:
        raise ValueError("a defect")


class Refusing(Stub):
    name = "refusing"

    def answer(self, request: Request, found: SearchResult) -> SearchResult:
        raise NoFeasiblePlanError(["no room"])


class Slow(Stub):
    name = "slow"

    def answer(self, request: Request, found: SearchResult) -> SearchResult:
        time.sleep(latest_s(request.time_budget_s))
        return found


class Endless(Stub):
    name = "endless"

    def search(self, request: Request) -> SearchResult:
        while True:
            time.sleep(0.01)


class Lying(Stub):
    """Answers with the price of a step on half of the batch."""

    name = "lying"

    def answer(self, request: Request, found: SearchResult) -> SearchResult:
        best = found.candidates[0]
        half = best.strategy.model_copy(
            update={"microbatch_size": best.strategy.microbatch_size // 2}
        )
        return SearchResult(
            partitioner="lying",
            candidates=(Candidate(strategy=half, cost=best.cost),),
            nearest=None,
            evaluations=found.evaluations,
            seconds=0.0,
        )


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stubs and the expert are all that is registered."""
    kinds = (Nothing, Broken, Slow, Refusing, Endless, Lying, Stub)
    points = {kind.name: f"{__name__}:{kind.__name__}" for kind in kinds}
    points["expert"] = "planner.search.expert:ExpertPartitioner"

    def found(group: str) -> list[EntryPoint]:
        return [EntryPoint(name, value, group) for name, value in points.items()]

    monkeypatch.setattr(base, "entry_points", found)
    monkeypatch.setattr(Stub, "asked", [])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("graphs"))


def _file(folder: Path, *worlds: dict[str, Any]) -> str:
    path = folder / "worlds.json"
    path.write_text(json.dumps({"worlds": worlds}), encoding="utf-8")
    return str(path)


def _printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("stubs")
@pytest.mark.further
def test_an_answer_a_solver_or_null(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("expert", *_STUBS)
    words = ("--worlds", _file(tmp_path, WORLD), "--budget-s", "1", "--cache", cache)
    (entry,) = _printed(capsys, *words, "--solvers", *names)["worlds"]
    assert (entry["name"], entry["kind"], entry["budget_s"]) == ("tiny", "custom", 1.0)
    for field in ("step_time_s", "score", "seconds", "strategy", "late", "why"):
        assert tuple(entry[field]) == names
    assert entry["step_time_s"]["expert"] > 0
    assert entry["score"]["expert"] == entry["step_time_s"]["expert"]
    assert entry["strategy"]["expert"].startswith("dp_")
    for name in ("nothing", "broken", "refusing", "lying"):
        assert entry["step_time_s"][name] is None
        assert entry["score"][name] is None
        assert entry["strategy"][name] is None
        assert entry["seconds"][name] > 0
    assert entry["why"] | {"refusing": "", "lying": ""} == {
        "expert": None,
        "slow": None,
        "nothing": "found nothing that fits",
        "broken": "failed: ValueError: a defect",
        "refusing": "",
        "lying": "",
    }
    assert "no room" in entry["why"]["refusing"]
    assert entry["why"]["lying"].startswith("not legal: ")
    assert entry["late"] == {name: name == "slow" for name in names}
    assert entry["step_time_s"]["slow"] == entry["step_time_s"]["expert"]


@pytest.mark.usefixtures("stubs")
def test_a_search_without_end_is_stopped(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitioner_solvers, "_PATIENCE_S", 0.05)
    arena, world = Arena(Kept(), GraphStore(cache)), World(**WORLD)
    before = signal.getsignal(signal.SIGALRM)
    ticking = signal.getitimer(signal.ITIMER_REAL)[0] > 0
    found = attempt("endless", lambda: arena._request(world, 0.01))
    assert found.why == "did not end, and was stopped"
    assert found.score is None
    assert signal.getsignal(signal.SIGALRM) is before
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == ticking


@pytest.mark.usefixtures("stubs")
def test_the_objective_is_what_is_scored(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world = {**WORLD, "objective": "throughput_per_device"}
    words = ("--worlds", _file(tmp_path, world), "--cache", cache)
    (entry,) = _printed(capsys, *words, "--solvers", "expert")["worlds"]
    used = entry["score"]["expert"] / entry["step_time_s"]["expert"]
    assert used == pytest.approx(round(used))
    assert 1 <= round(used) <= 8


@pytest.mark.usefixtures("stubs")
def test_a_world_that_cannot_be_asked_is_null_for_all(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {**WORLD, "name": "odd", "cluster": "nowhere:4"}
    words = ("--worlds", _file(tmp_path, odd, WORLD), "--cache", cache)
    first, second = _printed(capsys, *words, "--solvers", "expert")["worlds"]
    assert first["step_time_s"] == {"expert": None}
    assert "nowhere" in first["why"]["expert"]
    assert second["step_time_s"]["expert"] > 0


@pytest.mark.usefixtures("stubs")
def test_a_killed_run_goes_on(tmp_path: Path, cache: str) -> None:
    kept, store = tmp_path / "kept.jsonl", GraphStore(cache)
    worlds = [World(**{**WORLD, "name": f"tiny-{n}"}) for n in range(3)]
    arena = Arena(Kept(kept), store)
    for world in worlds:
        arena.ask(world, 1.0, ["stub"], 0)
    before = arena.kept.records
    lines = kept.read_text(encoding="utf-8")
    # Killed in the middle of the last line.
    kept.write_text(lines[:-20], encoding="utf-8")
    again = Arena(Kept(kept), store)
    assert again.kept.records == before[:2]
    Stub.asked.clear()
    for world in worlds:
        again.ask(world, 1.0, ["stub", "nothing"], 0)
    # Once each on the way to a warm start; the stub then for the last world alone.
    assert (Stub.asked.count("stub"), Stub.asked.count("nothing")) == (1 + 1, 1 + 3)
    assert again.kept.records[0].answers["stub"] == before[0].answers["stub"]
    read = Kept(kept).records
    assert read == again.kept.records
    assert [set(record.answers) for record in read] == [{"stub", "nothing"}] * 3
    # Another question under the same name is another question.
    harder = worlds[0].model_copy(update={"global_batch": 128})
    assert identity(harder) != identity(worlds[0])
    assert again.kept.missing(harder, 1.0, ["stub"]) == ["stub"]
    assert again.kept.missing(worlds[0], 2.0, ["stub"]) == ["stub"]
    assert again.kept.missing(worlds[0], 1.0, ["stub"]) == []


def test_a_file_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_text('{"worlds": []}\n', encoding="utf-8")
    with pytest.raises(PlanFileError, match=r"kept\.jsonl, line 1 is no answer"):
        Kept(path)
    assert main(["--results", str(tmp_path / "none.jsonl")]) == 1
    assert "no file" in capsys.readouterr().err


@pytest.mark.usefixtures("stubs")
def test_who_begins_changes_with_the_turn(cache: str) -> None:
    arena = Arena(Kept(), GraphStore(cache))
    first = []
    for turn in range(3):
        world = World(**{**WORLD, "name": f"tiny-{turn}"})
        arena.ask(world, 1.0, ["stub", "nothing", "refusing"], turn)
        first.append(next(iter(arena.kept.records[-1].answers)))
    assert first == ["stub", "nothing", "refusing"]


@pytest.mark.usefixtures("stubs")
def test_nothing_of_a_request_is_left_for_the_next(cache: str) -> None:
    seen: list[Request] = []
    arena = Arena(Kept(), GraphStore(cache))
    world = World(**WORLD)

    def ask_anew() -> Request:
        seen.append(arena._request(world, 1.0))
        return seen[-1]

    assert attempt("expert", ask_anew).score is not None
    solved, judged = seen
    assert "facts" in vars(solved)
    assert solved.context is not judged.context
    assert solved.context.graph is not judged.context.graph
    assert solved.context.graph == judged.context.graph


def test_names_in_order() -> None:
    names = solver_names()
    assert names[:3] == ["learned", "auto", "exhaustive"]
    ablated = [*names, "learned:no-graphs"]
    assert set(ablated) - set(baselines(ablated)) == {
        "learned",
        "auto",
        "learned:no-graphs",
    }


@pytest.mark.usefixtures("stubs")
def test_an_unknown_solver_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--worlds", _file(tmp_path, WORLD), "--solvers", "expart"]) == 1
    assert "expert" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("budgets", "counts", "words"),
    [
        ((1.0, 10.0), (5,), "one for each"),
        ((1.0,), (0,), "at least 1"),
        ((-1.0,), (1,), "are not all seconds"),
    ],
)
def test_a_wrong_study_is_refused(
    budgets: tuple[float, ...], counts: tuple[int, ...], words: str
) -> None:
    with pytest.raises(StrategyError, match=words):
        Study(kinds=("mixed",), budgets=budgets, counts=counts, solvers=("expert",))


def test_first_plans_are_asked_of_both_sizes() -> None:
    sizes = {world.machines().num_free for world in first_worlds()}
    assert sizes == {64, 4096}
    assert {world.kind for world in first_worlds()} == {FIRST}


@pytest.mark.slow
def test_a_study_of_drawn_worlds_ends_in_tables(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.jsonl"
    solvers = ("learned", "exhaustive", "expert")
    study = Study(
        kinds=("uniform",),
        budgets=(0.3, 1.0),
        counts=(1, 2),
        solvers=solvers,
        split="validation",
        ablate=1,
    )
    run_study(study, Arena(Kept(kept), GraphStore(cache)))
    asked = {(r.kind, r.budget_s, len(r.answers)) for r in Kept(kept).records}
    assert asked == {
        (FIRST, 0.0, 3),
        ("uniform", 0.3, 3),
        ("uniform", 1.0, 3),
        ("uniform", 1.0, 5),
        ("uniform", None, 2),
    }
    assert main(["--results", str(kept), "--docs", str(tmp_path / "docs")]) == 0
    text = capsys.readouterr().out
    for title in ("goals", "uniform, 1 s, 2 worlds", "time to a first plan"):
        assert f"\n{title}\n" in text
    [results] = (tmp_path / "docs" / "results").iterdir()
    figures = {path.name for path in (tmp_path / "docs" / "figures").iterdir()}
    assert figures == {
        "partitioners-ratios.png",
        "partitioners-quality-against-time.png",
    }
    for name in figures:
        assert f"(../figures/{name})" in results.read_text(encoding="utf-8")
