"""Suffixes along orders, what is next to them, and which are kept."""

from __future__ import annotations

import numpy as np
import pytest

from planner.errors import StrategyError, UnknownNameError
from planner.split import PiperTask, solve_piper
from planner.split.piper.stage import Flags
from policies.piper.candidates import MOST, distinct, lay_out, neighbours_of
from policies.piper.learning import Lesson
from policies.piper.network import PiperNetwork
from policies.piper.restricted import at_suffixes, cuts_of, next_to, spread
from policies.piper.solver import best_by_network
from policies.piper.worlds import PARTS, PiperWorld, draw_piper


def are_suffixes(task: PiperTask, has: Flags) -> bool:
    """Whether all that come after a layer of theirs are theirs, too."""
    return bool((has[:, task.edge_source] <= has[:, task.edge_target]).all())


def test_suffixes_along_orders(lessons: list[Lesson]) -> None:
    for lesson in lessons:
        layout, task = lesson.layout, lesson.task
        assert are_suffixes(task, layout.has)
        assert not layout.has[0].any()
        assert layout.has[-1].all()
        assert len(np.unique(layout.has, axis=0)) == len(layout.has)
        assert (np.diff(layout.has.sum(axis=1)) >= 0).all()
        assert layout.share[0] == layout.share[-1] == 1
        if len(layout.has) < MOST:
            # Each order has a suffix of every size.
            assert layout.share.sum() == pytest.approx(len(task) + 1)


def test_of_many_suffixes_some_are_looked_at() -> None:
    wide = PiperWorld(least=100, most=140)
    tasks = (draw_piper(number, "test", wide) for number in range(40))
    task = next(task for task in tasks if task.name.startswith(("grid", "towers")))
    layout = lay_out(task)
    assert MOST / 2 < len(layout.has) <= MOST
    assert are_suffixes(task, layout.has)
    assert layout.has[-1].all()
    np.testing.assert_array_equal(lay_out(task).has, layout.has)


def test_of_very_many_layers_one_order_is_whole(network: PiperNetwork) -> None:
    long = PiperWorld(least=MOST + 40, most=MOST + 60, devices=8)
    tasks = (draw_piper(number, "test", long) for number in range(60))
    task = next(t for t in tasks if t.name.startswith("series") and len(t) > MOST)
    layout = lay_out(task.on(memory_bytes=1e12))
    assert len(layout.has) == len(task) + 1
    assert layout.has[-1].all()
    assert best_by_network(network, task.on(memory_bytes=1e12)).stages


def test_neighbours_differ_by_one_layer(lessons: list[Lesson]) -> None:
    for lesson in lessons[:4]:
        for row in lesson.layout.has[:: len(lesson.layout.has) // 4]:
            near = neighbours_of(lesson.task, row[None])
            assert are_suffixes(lesson.task, near)
            assert (np.abs(near - row).sum(axis=1) == 1).all()
            wanted = 0
            for v in range(len(row)):
                other = row.copy()
                other[v] ^= 1
                wanted += are_suffixes(lesson.task, other[None])
            assert len(near) == wanted


def test_next_to_cuts_are_no_more_than_asked_for(lessons: list[Lesson]) -> None:
    rng = np.random.default_rng(0)
    lesson = next(lesson for lesson in lessons if len(lesson.used) > 1)
    cuts = lesson.layout.has[[0, *lesson.used, -1]]
    near = next_to(lesson.task, cuts, most=3, rng=rng)
    assert len(cuts) < len(near) <= len(cuts) + 3
    rows = {row.tobytes() for row in near}
    assert {row.tobytes() for row in cuts} <= rows
    assert len(distinct(np.concatenate([near, cuts]))) == len(near)


def test_kept_suffixes_are_the_best_of_each_part_of_the_work() -> None:
    work = np.linspace(0, 1, 42)
    scores = np.zeros(42)
    scores[[5, 17, 18, 33]] = 1, 2, 1, 1
    kept = spread(scores, work, 4)
    assert kept.tolist()[0] == 0
    assert kept.tolist()[-1] == 41
    assert set(kept.tolist()) >= {5, 17, 33}
    assert len(kept) == 6
    # Where the work is in one place, the best scores fill up what is kept.
    assert set(spread(scores, np.full(42, 0.5), 4).tolist()) >= {5, 17, 18, 33}
    np.testing.assert_array_equal(spread(scores, work, 40), np.arange(42))


def test_cuts_of_a_pipeline_give_it_back(lessons: list[Lesson]) -> None:
    for lesson in lessons[:6]:
        plan = solve_piper(lesson.task, "exact")
        again = at_suffixes(lesson.task, cuts_of(lesson.task, plan), close=1e-9)
        assert again.time_per_sample == pytest.approx(plan.time_per_sample)


def test_a_known_pipeline_is_kept_or_beaten(lessons: list[Lesson]) -> None:
    lesson = next(lesson for lesson in lessons if len(lesson.used) > 1)
    ends = lesson.layout.has[[0, -1]]
    best = at_suffixes(lesson.task, lesson.layout.has)
    assert at_suffixes(lesson.task, ends, known=best) is best


def test_worlds_of_each_part_are_others() -> None:
    tasks = [draw_piper(3, part) for part in PARTS]
    times = {task.time.tobytes() for task in tasks}
    assert len(times) == len(PARTS)
    assert draw_piper(3, "train").time.tobytes() in times
    with pytest.raises(UnknownNameError, match="tests"):
        draw_piper(3, "tests")
    with pytest.raises(StrategyError, match="least=4"):
        PiperWorld(least=4)
