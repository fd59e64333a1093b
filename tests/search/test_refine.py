"""Cuts that a row of the table is priced with."""

from __future__ import annotations

import numpy as np
import pytest

from planner.cost import CostModel
from planner.schema.schedules import schedule_spec
from planner.search.refine import candidates_of_row
from tests.cost.made import (
    device,
    hosts,
    real_graph,
    row,
    setting_for,
    uniform_graph,
)


def test_ranks_with_several_stages_take_equally_long() -> None:
    # Of 10 units in four stages each rank gets five: 3 and 2, not 3 and 3.
    values = row(
        pp=2,
        virtual_stages=2,
        num_microbatches=4,
        schedule=schedule_spec("Interleaved1F1B").code,
    )
    context = setting_for(uniform_graph(10), hosts((1, 2, device())))
    found = candidates_of_row(CostModel(context), values, free_recompute=False)
    units = [
        np.bincount(
            one.strategy.stage_ranks, [len(s.modules) for s in one.strategy.stages]
        )
        for one in found
    ]
    assert any(each.tolist() == [5, 5] for each in units)


@pytest.mark.parametrize(
    ("cp", "bandwidth", "algorithm"), [(4, 1e10, "all_to_all"), (2, 5e10, "ring")]
)
def test_a_sequence_is_divided_by_the_faster_algorithm_first(
    cp: int, bandwidth: float, algorithm: str
) -> None:
    """The single candidate that most searches ask for is the faster of the two."""
    cluster = hosts((1, cp, device()), inside=bandwidth)
    values = row(cp=cp, zero_stage=1)
    model = CostModel(setting_for(real_graph("gpt2"), cluster))
    both = candidates_of_row(model, values, most=2)
    best = min(both, key=lambda one: one.cost.step_time_s)
    assert {one.strategy.context_algorithm for one in both} == {"ring", "all_to_all"}
    assert best.strategy.context_algorithm == algorithm
    (alone,) = candidates_of_row(model, values, most=1)
    assert alone.strategy == best.strategy
