"""Layouts of columns that a table may come with."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from planner.cost import CostModel
from planner.cost.table.rows import Columns, columns_of
from planner.space import StrategyTable
from tests.cost.made import device, hosts, row, setting_for, table_of, uniform_graph


def test_plain_columns_are_taken_as_they_are() -> None:
    table = table_of(row(pp=2), row(tp=2))
    columns = columns_of(table, np.array([0, 1]), np.array([1, 0]))
    assert columns.pp is table.pp
    assert columns.pair.tolist() == [0, 1]
    assert columns.place.tolist() == [1, 0]
    for name in Columns._fields[:-2]:
        assert getattr(columns, name).tolist() == getattr(table, name).tolist()


def test_strided_and_read_only_columns_cost_what_plain_ones_cost() -> None:
    model = CostModel(setting_for(uniform_graph(8), hosts((1, 8, device()))))
    table = table_of(*(row(pp=pp, dp_shard=8 // pp, zero_stage=2) for pp in (1, 2, 4)))
    plain = model.table(table)
    names = [field.name for field in fields(StrategyTable)]
    strided = {name: np.repeat(getattr(table, name), 2)[::2] for name in names}
    frozen = {name: getattr(table, name).copy() for name in names}
    for column in frozen.values():
        column.setflags(write=False)
    for columns in (strided, frozen):
        other = model.table(StrategyTable(**columns))
        assert (other.step_time_s == plain.step_time_s).all()
        assert (other.memory_bytes == plain.memory_bytes).all()
