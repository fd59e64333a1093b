"""The comparison of closed forms and simulator, with few plans of one small case."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import fidelity
from planner.schema.schedules import schedule_names


@pytest.fixture(scope="module")
def few() -> list[fidelity.Difference]:
    case = fidelity.Case(
        model="gpt2", cluster="dgx-v100:1", global_batch=16, seq_len=256
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fidelity, "CASES", (case,))
        return fidelity.compare(24, seed=3, schedules=schedule_names()[:2])


def test_every_schedule_and_cut_is_drawn(few: list[fidelity.Difference]) -> None:
    assert len(few) == 24
    assert {entry.schedule for entry in few} == set(schedule_names()[:2])
    assert {entry.cut for entry in few} == {"even", "moved", "anywhere"}
    uneven = [len(set(entry.units)) > 1 for entry in few if entry.cut == "anywhere"]
    assert any(uneven)


def test_only_even_cuts_are_rows_of_a_table(few: list[fidelity.Difference]) -> None:
    for entry in few:
        assert (entry.table_s is None) == (entry.cut != "even")


def test_both_fidelities_are_near(few: list[fidelity.Difference]) -> None:
    summary = fidelity.summaries(few)
    assert summary["all"]["plans"] == 24
    assert summary["all"]["mean"] == pytest.approx(
        np.mean([abs(entry.relative) for entry in few])
    )
    assert 0 < summary["all"]["mean"] < 2 * fidelity.TARGET
