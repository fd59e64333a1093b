"""The table of policies on any cluster."""

from __future__ import annotations

import pytest

from benchmarks.job_stream_world import FIXED, POLICIES, WORLDS, Cell, table
from policies.stream.worlds import HELD_OUT, TRAINED_ON


def _cell(policy: str, rates: tuple[float, ...], load: float = 1.0) -> Cell:
    return Cell(
        world="new jobs",
        load=load,
        policy=policy,
        rates=rates,
        refused=0.01,
        late=0.02,
        throughput=3.0,
        utilisation=0.5,
        decision_s=0.002,
    )


def test_differences_are_seed_by_seed_to_the_best_fixed_policy() -> None:
    cells = [
        _cell("min_feasible", (0.2, 0.4)),
        _cell("constant_4", (0.3, 0.5)),
        _cell("learned", (0.1, 0.2)),
        _cell("min_feasible", (0.5, 0.5), 2.0),
        _cell("constant_4", (0.4, 0.4), 2.0),
        _cell("learned", (0.4, 0.4), 2.0),
    ]
    text = table(cells)
    assert "| min_feasible | 0.3000 | 0.5000 |" in text
    # Differences of -10 and -20 points: Student's t of one degree of freedom is 12.7.
    assert "| new jobs | 1 | min_feasible 0.3000 | -15.00 ± 63.53 (-50 %) |" in text
    assert "| new jobs | 2 | constant_4 0.4000 | +0.00 ± 0.00 (+0 %) |" in text
    assert "### new jobs: dgx-a100:4, 8 jobs" in text


def test_worlds_are_what_they_are_called() -> None:
    trained = {world.cluster for world in TRAINED_ON}
    for name, world in WORLDS.items():
        assert ("new jobs" in name) == (set(world.models) == set(HELD_OUT))
        assert ("cluster" in name) == (world.cluster not in trained)
    assert set(FIXED) < set(POLICIES)


def test_a_table_of_one_seed_has_no_interval() -> None:
    assert "nan" in table([_cell("min_feasible", (0.5,)), _cell("learned", (0.4,))])


@pytest.mark.parametrize("policy", ["learned", "rollout"])
def test_policies_that_were_left_out_have_no_column(policy: str) -> None:
    text = table([_cell("random", (0.5, 0.6)), _cell(policy, (0.4, 0.3))])
    assert f"| best fixed | {policy} |" in text
