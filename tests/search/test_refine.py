"""Cuts that a row of the table is priced with."""

from __future__ import annotations

import numpy as np

from planner.cost import CostModel
from planner.schema.schedules import schedule_spec
from planner.search.refine import candidates_of_row
from tests.cost.made import device, hosts, row, setting_for, uniform_graph


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
