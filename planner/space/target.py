"""What whoever is to run a plan says to rows of the table: asked once a kind of row.

Meshwright's executors and other launchers look at which axes, schedule and recompute
kind there are. A launcher that looks at sizes as well names them in
:attr:`planner.targets.Target.sizes`; then rows of other sizes are other kinds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.schema import SCHEDULES, Strategy
from planner.schema.support import unsupported
from planner.space.build import build_strategy
from planner.space.facts import OWN_TARGETS, Facts
from planner.space.table import StrategyTable, distinct
from planner.targets import Case, Target, get_target

__all__ = [
    "refuses_schedule",
    "target_broken",
    "target_reasons",
    "with_sayable_streams",
]

Mask = NDArray[np.bool_]
Index = NDArray[np.int64]
Row = dict[str, int]

#: Columns of which it matters whether they are above 1.
_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "virtual_stages")


def _kinds(table: StrategyTable) -> Index:
    """A small number for what the executors' support table looks at. Shape [n].

    It looks at which axes there are, not at how big they are.
    """
    kind = np.zeros(len(table), dtype=np.int64)
    for name in (*_AXES, "num_microbatches"):
        kind = kind * 2 + (getattr(table, name) > 1)
    kind = kind * 4 + table.zero_stage
    kind = kind * len(SCHEDULES) + table.schedule
    return (kind * 3 + table.recompute) * 2 + table.sequence_parallel


def _smallest(row: Row, facts: Facts, kept: frozenset[str]) -> Strategy:
    """A row's strategy at the smallest size of the same kind.

    Whether an axis, a schedule and a recompute kind go together does not depend on how
    many stages there are; how many microbatches a schedule wants was checked before.
    """
    small = dict(row)
    if row["pp"] > 1 and kept.isdisjoint({"pp", "num_microbatches"}):
        small["pp"] = 2
        small["num_microbatches"] = 2 * max(1, row["num_microbatches"] // row["pp"])
    count = small["pp"] * small["virtual_stages"]
    return build_strategy(
        small,
        unit_names=[str(index) for index in range(count)],
        bounds=range(count + 1),
        sharding=facts.sharding,
        precision=facts.precision,
        optimizer=facts.optimizer,
        compiled=facts.compile,
    )


def target_reasons(row: Row, facts: Facts) -> tuple[str, ...]:
    """What the target says against a row; empty if it takes it."""
    if facts.target == "any":
        return ()
    if facts.target == "meshwright":
        return unsupported(
            _smallest(row, facts, frozenset()),
            tied=facts.tied,
            backend=facts.backend,
            attention=facts.attention,
        )
    target = get_target(facts.target)
    found = [str(refusal) for refusal in _refusals(target, row, facts)]
    uneven = _uneven_why(target, row, facts)
    return (*found, uneven) if uneven else tuple(found)


def _sizes(target: Target) -> frozenset[str]:
    """Columns whose sizes its rules look at."""
    return frozenset(name.rpartition(".")[2] for name in target.sizes)


def _refusals(target: Target, row: Row, facts: Facts) -> tuple[object, ...]:
    """What a launcher says against a row, however a divided sequence attends."""
    small = _smallest(row, facts, _sizes(target))
    first: tuple[object, ...] = ()
    algorithms = ("ring", "all_to_all") if row["cp"] > 1 else ("all_to_all",)
    for algorithm in algorithms:
        changes = {
            "grad_clip_norm": facts.grad_clip_norm,
            "context_algorithm": algorithm,
        }
        found = target.refusals(
            Case(
                strategy=small.model_copy(update=changes),
                hosts=facts.hosts,
                layers=False,
                placed=False,
                tied=facts.tied,
                backend=facts.backend,
                attention=facts.attention,
                device_types=facts.device_types,
            )
        )
        if not found:
            return ()
        first = first or found
    return first


def _uneven(target: Target, table: StrategyTable, facts: Facts) -> Mask:
    """Pipelines whose stages cannot have equally many layers, where they must."""
    pipeline = table.pp > 1
    if not target.even_layers or not pipeline.any():
        return np.zeros(len(table), dtype=bool)
    if facts.layers is None:
        return np.asarray(pipeline)
    stages = table.pp * table.virtual_stages
    return np.asarray(pipeline & (facts.layers.layers % stages != 0))


def _uneven_why(target: Target, row: Row, facts: Facts) -> str | None:
    one = StrategyTable.from_columns(**row)
    if not _uneven(target, one, facts)[0]:
        return None
    cuts = f"{target.title} {target.version} cuts a pipeline into equally many layers"
    if facts.layers is None:
        return f"pp={row['pp']}: {cuts}, and the model is not a row of layers; use pp=1"
    count = facts.layers.layers
    divisors = ", ".join(str(d) for d in range(1, count + 1) if count % d == 0)
    return (
        f"pp={row['pp']} x virtual_stages={row['virtual_stages']} does not divide the "
        f"model's {count} layers: {cuts}; use {divisors} stages"
    )


def target_broken(table: StrategyTable, facts: Facts) -> Mask:
    """Mask of the rows that the target does not take. Shape [n]."""
    if facts.target == "any" or not len(table):
        return np.zeros(len(table), dtype=bool)
    if facts.target != "meshwright":
        return _unsayable(get_target(facts.target), table, facts)
    known = _refused_by_executors(
        tuple(facts.sharding.items()),
        facts.precision,
        facts.optimizer,
        facts.compile,
        facts.tied,
        facts.backend,
        facts.attention,
    )
    kinds = _kinds(table)
    example = np.full(int(kinds.max()) + 1, -1, dtype=np.int64)
    example[kinds] = np.arange(len(table))
    bad = np.zeros(len(example), dtype=bool)
    for kind in np.flatnonzero(example >= 0).tolist():
        if kind not in known:
            row = table.row(int(example[kind]))
            known[kind] = bool(target_reasons(row, facts))
        bad[kind] = known[kind]
    return np.asarray(bad[kinds])


@lru_cache(maxsize=64)
def _refused_by_executors(*_: object) -> dict[int, bool]:
    """Kinds of rows that were asked for, of all requests that are alike to them.

    Whoever plans for many clusters asks the same of each: a tenth of a second a time.
    """
    return {}


def _unsayable(target: Target, table: StrategyTable, facts: Facts) -> Mask:
    sizes = [getattr(table, name) for name in sorted(_sizes(target))]
    columns = [_kinds(table), (table.microbatch_size > 1).astype(np.int64), *sizes]
    first, which = distinct(*columns)
    bad = np.zeros(len(first), dtype=bool)
    for place, example in enumerate(first.tolist()):
        key = tuple(int(column[example]) for column in columns)
        if key not in facts.refused:
            refusals = _refusals(target, table.row(example), facts)
            facts.refused[key] = bool(refusals)
        bad[place] = facts.refused[key]
    return np.asarray(bad[which] | _uneven(target, table, facts))


def with_sayable_streams(table: StrategyTable, facts: Facts) -> StrategyTable:
    """The table without sequence parallelism where a launcher cannot say it.

    The enumerator has it wherever it applies, as it costs nothing.
    """
    if facts.target in OWN_TARGETS or not table.sequence_parallel.any():
        return table
    refused = target_broken(table, facts) & (table.sequence_parallel > 0)
    return replace(
        table, sequence_parallel=np.where(refused, 0, table.sequence_parallel)
    )


def refuses_schedule(name: str, facts: Facts) -> bool:
    """Whether a launcher refuses a schedule of torch, all else being plain."""
    index = SCHEDULES.index(name)
    row = {
        **dict.fromkeys((*_AXES, "microbatch_size"), 1),
        **dict.fromkeys(("zero_stage", "recompute", "sequence_parallel"), 0),
        "pp": 2,
        "num_microbatches": 2,
        "schedule": index,
        "virtual_stages": 1 if name in {"GPipe", "1F1B"} else 2,
    }
    key = (-1, index)
    if key not in facts.refused:
        facts.refused[key] = bool(_refusals(get_target(facts.target), row, facts))
    return facts.refused[key]
