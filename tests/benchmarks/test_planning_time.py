"""The stopwatch, by a clock that is turned by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import planning_time
from benchmarks.planning_time import Stopwatch


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def process_time(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return 3.0 * self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(planning_time, "time", made)
    return made


def test_a_step_inside_another_counts_only_itself(clock: _Clock) -> None:
    def spend(seconds: float) -> None:
        clock.now += seconds

    watch = Stopwatch()
    inner = watch.watched("inner", spend)

    def both() -> None:
        spend(1.0)
        inner(5.0)
        spend(1.0)

    watch.start()
    watch.watched("outer", both)()
    spend(0.5)
    assert list(watch.stop().items()) == [("inner", 5.0), ("outer", 2.0), (_REST, 0.5)]
    assert watch.wall == {"inner": 15.0, "outer": 6.0, _REST: 1.5}


def test_turns_of_a_generator_are_timed(clock: _Clock) -> None:
    def turns() -> Iterator[int]:
        for number in range(3):
            clock.now += 2.0
            yield number

    watch = Stopwatch()
    for _ in watch.watched("turns", turns)():
        clock.now += 1.0
    assert watch.stop() == {"turns": 6.0, _REST: 3.0}


def test_errors_pass_and_end_the_step(clock: _Clock) -> None:
    def fails() -> None:
        raise ValueError("no")

    watch = Stopwatch()
    with pytest.raises(ValueError, match="no"):
        watch.watched("fails", fails)()
    clock.now += 1.0
    assert watch.stop() == {"fails": 0.0, _REST: 1.0}


_REST = "all else"
