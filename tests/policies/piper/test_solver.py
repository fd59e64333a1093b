"""The ``learned`` solver of Piper tasks, and the weights that it reads."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from planner.errors import StrategyError
from planner.split import GIB, parse_piper, read_piper, solve_piper
from policies.piper.learning import Lesson
from policies.piper.network import PiperNetwork
from policies.piper.saved import (
    SavedPiperPolicy,
    load_policy,
    save_policy,
    shipped_folder,
)
from policies.piper.solver import SearchConfig, best_by_network, learned
from tests.split.conftest import piper_solvers, registered
from tests.split.test_piper import layers

__all__ = ["piper_solvers", "registered"]

_DATA = Path(os.environ.get("MESHWRIGHT_DATA", "none")) / "piper"


@pytest.mark.usefixtures("piper_solvers")
def test_tasks_are_planned_nearly_as_well_as_can_be(lessons: list[Lesson]) -> None:
    ratios = []
    for lesson in lessons:
        found = solve_piper(lesson.task, "learned")
        assert found.found_by == "learned"
        best = solve_piper(lesson.task, "exact").time_per_sample
        ratios.append(found.time_per_sample / best)
    assert min(ratios) > 1 - 1e-9
    assert np.mean(ratios) < 1.02


def test_a_seed_gives_the_same_pipeline(lessons: list[Lesson]) -> None:
    for lesson in lessons[:4]:
        assert learned(lesson.task, seed=5) == learned(lesson.task, seed=5)


def test_more_suffixes_and_rounds_are_of_use(
    lessons: list[Lesson], network: PiperNetwork
) -> None:
    few, many = (
        [
            best_by_network(network, lesson.task, search=search).time_per_sample
            for lesson in lessons
        ]
        for search in (
            SearchConfig(kept=2, rounds=0, close=1e-3),
            SearchConfig(kept=2, rounds=6, close=1e-3),
        )
    )
    assert (np.array(many) <= np.array(few)).all()
    assert (np.array(many) < np.array(few)).sum() >= 2


def test_what_the_network_expects_need_not_be_right(
    lessons: list[Lesson], network: PiperNetwork
) -> None:
    """A time asked for first decides how long the search takes, not what it finds."""
    search = SearchConfig(rounds=0, close=1e-6)
    for wrong in (-5.0, 5.0):
        network.time[-1].bias.data.fill_(wrong)
        for lesson in lessons[:4]:
            found = best_by_network(network, lesson.task, search=search)
            assert found.time_per_sample == pytest.approx(lesson.best, rel=2e-3)


def test_what_fits_nowhere_has_no_stages(network: PiperNetwork) -> None:
    task = parse_piper(layers(np.random.default_rng(0), 6, memory=0.5), "made")
    assert best_by_network(network, task).stages == ()


def test_out_of_time_it_says_so(lessons: list[Lesson], network: PiperNetwork) -> None:
    found = best_by_network(network, lessons[0].task, ends=time.monotonic() - 1)
    assert found.stages == ()


def test_published_tasks_are_near_their_optima() -> None:
    path = _DATA / "GOLDEN_piper_optima.json"
    if not path.is_file():
        pytest.skip("MESHWRIGHT_DATA has no piper/GOLDEN_piper_optima.json")
    ratios = []
    for row in json.loads(path.read_text(encoding="utf-8")):
        task = read_piper(_DATA / "inputs" / f"{row['instance']}.json").on(
            devices=row["k"],
            memory_bytes=row["memGB"] * GIB,
            bandwidth=row["bandwidthGB"] * GIB,
            microbatches=row["mbsInBatch"],
        )
        found = learned(task)
        if row["piperTPS"] < 0:
            assert found.stages == ()
        else:
            ratios.append(found.time_per_sample / row["piperTPS"])
    assert min(ratios) > 1 - 1e-9
    assert np.mean(ratios) < 1.02


def test_shipped_weights_are_small_and_described() -> None:
    folder = shipped_folder()
    assert (folder / "README.md").stat().st_size > 500
    assert (folder / "policy.safetensors").stat().st_size < 500_000
    assert "gain_over_best_known" in load_policy().notes["validated_on"]


def test_weights_come_back_as_they_were(tmp_path: Path, network: PiperNetwork) -> None:
    save_policy(SavedPiperPolicy(network=network, notes={"by": "me"}), tmp_path)
    again = load_policy(tmp_path)
    assert again.notes == {"by": "me"}
    for one, other in zip(
        network.parameters(), again.network.parameters(), strict=True
    ):
        assert bool((one == other).all())


def test_weights_that_see_something_else_are_refused(
    tmp_path: Path, network: PiperNetwork
) -> None:
    save_policy(SavedPiperPolicy(network=network), tmp_path)
    path = tmp_path / "config.json"
    described = json.loads(path.read_text(encoding="utf-8"))
    described["cuts"] = described["cuts"][:-1]
    path.write_text(json.dumps(described), encoding="utf-8")
    with pytest.raises(StrategyError, match=r"other cuts .*'orders'"):
        load_policy(tmp_path)
    with pytest.raises(StrategyError, match="give the folder of a Piper policy"):
        load_policy(tmp_path / "none")


@pytest.mark.parametrize("wrong", [{"kept": 0}, {"rounds": -1}, {"close": 0.0}])
def test_searches_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(StrategyError, match=next(iter(wrong))):
        SearchConfig(**wrong)
