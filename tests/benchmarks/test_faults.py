"""The verdict on runs that were disturbed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks import faults
from benchmarks.faults import Curves, Outcome, Trial, run_one, table


def _outcome(kind: str, failure: str | None, orphans: int = 0) -> Outcome:
    return Outcome(
        kind=kind,
        mesh="tp",
        failure=failure,
        orphans=orphans,
        fault_s=2.0,
        took_s=9.0,
        said="",
    )


def test_the_table_counts_what_was_resumed_and_what_was_left() -> None:
    some = [
        _outcome("SIGTERM", None),
        _outcome("SIGTERM", "no curve", orphans=2),
        _outcome("full disk", None),
    ]
    _, *lines = table(some)
    assert [line[:4] for line in lines] == [
        ["SIGTERM", "2", "1", "2"],
        ["full disk", "1", "1", "0"],
        ["all", "3", "2", "2"],
    ]


@pytest.mark.parametrize("misses", [0, 3, 9])
def test_a_fault_that_comes_too_late_is_made_again(
    misses: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left = [misses]

    def late(trial: Trial, _: Path) -> None:
        trial.kept.mkdir()
        if left[0]:
            left[0] -= 1
            raise faults.MissedError

    monkeypatch.setitem(faults.KINDS, "SIGTERM", late)
    monkeypatch.setattr(faults, "_resume", lambda *_: None)
    monkeypatch.setattr(Curves, "of", lambda *_: (tmp_path / "plan.json", [1.0]))
    found = run_one(0, 0, "SIGTERM", Curves(folder=tmp_path))
    assert (found.failure is None) == (misses < 6)


def test_a_damaged_file_differs_from_what_was_written(tmp_path: Path) -> None:
    for seed in range(30):
        (tmp_path / "part").write_bytes(b"tensors")
        how = faults._damage(random.Random(seed), tmp_path)
        path = tmp_path / "part"
        assert how.startswith("part ")
        assert not path.exists() or path.read_bytes() != b"tensors"
