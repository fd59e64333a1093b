"""Many strategies at once as a struct of arrays, for the analytic cost model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.schema import AXES, Recompute, Strategy

__all__ = ["MESH_COLUMNS", "RECOMPUTE_NAMES", "StrategyTable", "distinct"]

#: Columns of a mesh.
MESH_COLUMNS = (*AXES, "ep")
#: Codes of the ``recompute`` column.
RECOMPUTE_NAMES: tuple[Recompute, ...] = ("none", "selective", "full")

Column = NDArray[np.int64]


def distinct(*columns: Column) -> tuple[Column, Column]:
    """Find the distinct combinations of columns.

    Packs a row into one integer, because sorting integers is several times faster than
    ``np.unique(axis=0)``.

    Args:
        columns: Non-negative integers. Shape [n] each.
    Returns:
        First row of each combination, shape [combinations]; and the index of every
        row's combination, shape [n].
    """
    packed = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        packed = packed * (int(column.max(initial=0)) + 1) + column
    _, first, inverse = np.unique(packed, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTable:
    """Strategies as rows; every column has shape [n].

    Stages are no part of it: a row stands for the best cut of the model into
    pp x virtual_stages stages, and ``recompute`` holds for all of them.

    Attributes:
        schedule: Code of the schedule; see :mod:`planner.schema.schedules`.
        recompute: Index into :data:`RECOMPUTE_NAMES`.
        sequence_parallel: 0 or 1.
    """

    pp: Column
    dp_replicate: Column
    dp_shard: Column
    cp: Column
    tp: Column
    ep: Column
    zero_stage: Column
    schedule: Column
    virtual_stages: Column
    microbatch_size: Column
    num_microbatches: Column
    recompute: Column
    sequence_parallel: Column

    def __len__(self) -> int:
        return len(self.pp)

    def __getitem__(self, rows: Any) -> StrategyTable:
        return replace(
            self, **{f.name: getattr(self, f.name)[rows] for f in fields(self)}
        )

    @property
    def num_devices(self) -> Column:
        """Number of devices of each row. Shape [n]."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    def row(self, index: int) -> dict[str, int]:
        """Return a row as plain integers, schedule and recompute as codes."""
        return {f.name: int(getattr(self, f.name)[index]) for f in fields(self)}

    def rows(self) -> Iterator[dict[str, int]]:
        """Yield all rows, one after the other."""
        return (self.row(index) for index in range(len(self)))

    @classmethod
    def from_columns(cls, **columns: Any) -> StrategyTable:
        """Broadcast columns (arrays or scalars) to a common length [n]."""
        names = [f.name for f in fields(cls)]
        arrays = np.broadcast_arrays(
            *(
                np.atleast_1d(np.asarray(columns[name], dtype=np.int64))
                for name in names
            )
        )
        return cls(**dict(zip(names, arrays, strict=True)))

    @classmethod
    def from_strategies(cls, strategies: Sequence[Strategy]) -> StrategyTable:
        """Make the rows of strategies, each with its heaviest recompute kind."""
        return cls.from_columns(
            pp=[s.mesh.pp for s in strategies],
            dp_replicate=[s.mesh.dp_replicate for s in strategies],
            dp_shard=[s.mesh.dp_shard for s in strategies],
            cp=[s.mesh.cp for s in strategies],
            tp=[s.mesh.tp for s in strategies],
            ep=[s.mesh.ep for s in strategies],
            zero_stage=[s.zero_stage for s in strategies],
            schedule=[s.schedule_spec.code for s in strategies],
            virtual_stages=[s.virtual_stages for s in strategies],
            microbatch_size=[s.microbatch_size for s in strategies],
            num_microbatches=[s.num_microbatches for s in strategies],
            recompute=[
                max((RECOMPUTE_NAMES.index(g.recompute) for g in s.stages), default=0)
                for s in strategies
            ],
            sequence_parallel=[int(s.sharding.sequence_parallel) for s in strategies],
        )

    @staticmethod
    def concatenate(tables: Sequence[StrategyTable]) -> StrategyTable:
        """Concatenate the rows of several tables."""
        return StrategyTable(
            **{
                f.name: np.concatenate([getattr(table, f.name) for table in tables])
                for f in fields(StrategyTable)
            }
        )
