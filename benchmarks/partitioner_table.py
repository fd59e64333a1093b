"""Partitioners on the same worlds: one table for each kind and budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.partitioner_ratios import (
    TIE,
    Comparison,
    best_of,
    common_solvers,
    compare,
    value_of,
)
from benchmarks.partitioner_solvers import ABLATIONS, baselines
from benchmarks.partitioner_worlds import FIRST, Record

__all__ = ["KindTable", "SolverRow", "ablations", "kind_tables"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverRow:
    """A solver within one kind and budget.

    Attributes:
        solver: Its name.
        against_best: Itself against the best baseline of each world.
        best_share: Share of worlds where nobody is better, by more than 0.1 %.
        seconds: Mean wall time.
        late: Worlds where it answered too late.
        missed: Worlds where it found nothing.
    """

    solver: str
    against_best: Comparison
    best_share: float
    seconds: float
    late: int
    missed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTable:
    """One kind of worlds at one budget.

    Attributes:
        kind: Of the worlds.
        budget_s: Of each solver.
        worlds: How many.
        strongest: Baseline that is best over all of them.
        against_strongest: Learned solvers against that one, by name.
        rows: All solvers.
    """

    kind: str
    budget_s: float
    worlds: int
    strongest: str
    against_strongest: dict[str, Comparison]
    rows: tuple[SolverRow, ...]

    def row(self, solver: str) -> SolverRow | None:
        """Row of a solver, if it took part."""
        return next((row for row in self.rows if row.solver == solver), None)


def kind_tables(records: Sequence[Record]) -> tuple[KindTable, ...]:
    """One for each kind and budget that at least one baseline was asked at."""
    groups: dict[tuple[str, float], list[Record]] = {}
    for record in records:
        if record.budget_s is not None and record.kind != FIRST:
            groups.setdefault((record.kind, record.budget_s), []).append(record)
    return tuple(
        _kind_table(kind, budget_s, group)
        for (kind, budget_s), group in groups.items()
        if baselines(common_solvers(group))
    )


def _kind_table(kind: str, budget_s: float, records: list[Record]) -> KindTable:
    names = common_solvers(records)
    others = baselines(names)
    values = {n: [value_of(r.answers[n]) for r in records] for n in names}
    best = [best_of(record, others) for record in records]
    overall = [best_of(record, names) for record in records]
    worst = [
        max((v for v in world if v is not None), default=None)
        for world in zip(*values.values(), strict=True)
    ]
    against = {name: compare(values[name], best, worst) for name in names}
    strongest = min(others, key=lambda name: (against[name].ratio.value, name))
    return KindTable(
        kind=kind,
        budget_s=budget_s,
        worlds=len(records),
        strongest=strongest,
        against_strongest={
            name: compare(values[name], values[strongest], worst)
            for name in names
            if name not in others
        },
        rows=tuple(
            SolverRow(
                solver=name,
                against_best=against[name],
                best_share=_share_of_best(values[name], overall),
                seconds=float(np.mean([r.answers[name].seconds for r in records])),
                late=sum(r.answers[name].late for r in records),
                missed=sum(r.answers[name].score is None for r in records),
            )
            for name in names
        ),
    )


def _share_of_best(
    values: Sequence[float | None], overall: Sequence[float | None]
) -> float:
    wins = [
        value is not None and best is not None and value <= best * (1 + TIE)
        for value, best in zip(values, overall, strict=True)
    ]
    return float(np.mean(wins))


def ablations(
    records: Sequence[Record],
) -> dict[tuple[str, float], dict[str, Comparison]]:
    """By kind and budget: each ablation against the whole, on worlds that have both."""
    found: dict[tuple[str, float], dict[str, Comparison]] = {}
    keys = {(r.kind, r.budget_s): None for r in records if r.budget_s is not None}
    for kind, budget_s in keys:
        for name in ABLATIONS:
            both = [
                (value_of(r.answers[name]), value_of(r.answers["learned"]))
                for r in records
                if (r.kind, r.budget_s) == (kind, budget_s)
                and {name, "learned"} <= set(r.answers)
            ]
            if both:
                mine, whole = zip(*both, strict=True)
                here = found.setdefault((kind, float(budget_s or 0)), {})
                here[name] = compare(mine, whole)
    return found
