"""Violations of a target's limits by rows, found once for each kind of row.

Meshwright's executors and other launchers look at the axes, schedule and recompute kind
of a row, so that they are asked about the smallest row of its kind. A launcher that
looks at sizes as well names them in :attr:`planner.targets.Target.sizes`; these columns
keep their sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.schema import Optimizer, Precision, Strategy
from planner.schema.halo import SpatialLayer
from planner.schema.schedules import schedule_spec
from planner.schema.strategy_parts import ContextAlgorithm
from planner.schema.violations import executor_violations
from planner.space.build import build_strategy
from planner.space.facts import OWN_TARGETS, Facts
from planner.space.regime import Regime
from planner.space.table import MESH_COLUMNS, StrategyTable, distinct
from planner.targets import Case, Target, get_target

__all__ = [
    "target_violated",
    "target_violations",
    "violates_schedule",
    "with_expressible_streams",
]

Mask = NDArray[np.bool_]
Index = NDArray[np.int64]
Row = dict[str, int]

#: Columns that matter by being above 1.
_DEGREES = (*MESH_COLUMNS, "virtual_stages")
_COUNTS = ("microbatch_size", "num_microbatches")
_CODES = ("zero_stage", "schedule", "recompute", "sequence_parallel")
_COLUMNS = (*_DEGREES, *_COUNTS, *_CODES)
#: Microbatches that fill a pipeline of two ranks under every schedule.
_FILLING = 4


@dataclass(frozen=True, slots=True)
class _Asker:
    """Facts of a request that a target's answer depends on, beside the row.

    Answers are cached by equal askers: planning for many clusters asks the same for
    each, a tenth of a second a time.
    """

    target: str
    sharding: tuple[tuple[str, str], ...]
    precision: Precision
    optimizer: Optimizer
    regime: Regime
    grad_clip_norm: float | None
    tied: tuple[tuple[str, ...], ...]
    backend: str
    attention: str | None
    spatial: tuple[SpatialLayer, ...]
    spatial_sizes: tuple[int, ...]
    hosts: tuple[tuple[int, int], ...]
    device_types: tuple[str, ...]
    host_types: tuple[tuple[int, str], ...]
    num_experts: int

    @classmethod
    def of(cls, facts: Facts) -> _Asker:
        """Return the asker of a request."""
        told = {
            name: getattr(facts, name)
            for name in cls.__dataclass_fields__
            if name != "sharding"
        }
        if facts.target in OWN_TARGETS:
            # Executors do not look at the machines.
            told.update(hosts=(), device_types=(), host_types=())
        return cls(sharding=tuple(facts.sharding.items()), **told)

    def strategy(self, row: Row, like: Strategy | None = None) -> Strategy:
        """Build the row's strategy with stages of no particular model.

        Args:
            row: A row of the table.
            like: Another of this asker's strategies.
        """
        count = row["pp"] * row["virtual_stages"]
        return build_strategy(
            row,
            unit_names=[str(index) for index in range(count)],
            bounds=range(count + 1),
            sharding=dict(self.sharding),
            precision=self.precision,
            optimizer=self.optimizer,
            grad_clip_norm=self.grad_clip_norm,
            regime=self.regime,
            spatial=self.spatial,
            like=like,
        )

    def violations(self, row: Row, like: Strategy | None = None) -> tuple[str, ...]:
        """Return the limits of the target that a row exceeds.

        A divided sequence may attend by either algorithm: a launcher that can express
        one of them can express the row.

        Args:
            row: A row of the table.
            like: Another of this asker's strategies.
        """
        strategy = self.strategy(row, like)
        if self.target == "meshwright":
            return executor_violations(
                strategy,
                tied=self.tied,
                backend=self.backend,
                attention=self.attention,
                spatial_sizes=self.spatial_sizes,
                experts=self.num_experts,
            )
        target = get_target(self.target)
        first: tuple[str, ...] = ()
        for algorithm in self._algorithms(strategy):
            found = target.violations(
                Case(
                    strategy=strategy.model_copy(
                        update={"context_algorithm": algorithm}
                    ),
                    spatial_sizes=self.spatial_sizes,
                    hosts=self.hosts,
                    layers=False,
                    placed=False,
                    tied=self.tied,
                    backend=self.backend,
                    attention=self.attention,
                    num_experts=self.num_experts,
                    device_types=self.device_types,
                    host_types=self.host_types,
                )
            )
            if not found:
                return ()
            first = first or tuple(map(str, found))
        return first

    def _algorithms(self, strategy: Strategy) -> tuple[ContextAlgorithm, ...]:
        """Ways in which ranks can divide what the row divides by cp."""
        if strategy.mesh.cp == 1:
            return ("all_to_all",)
        return ("halo",) if self.spatial else ("ring", "all_to_all")


@lru_cache(maxsize=64)
def _violation_predicate(asker: _Asker) -> Callable[[tuple[int, ...]], bool]:
    """Return a cached predicate of rows that exceed a limit of the target."""
    plain = dict.fromkeys(_COLUMNS, 1) | dict.fromkeys(_CODES, 0)
    like = asker.strategy(plain)

    @cache
    def violates(columns: tuple[int, ...]) -> bool:
        row = dict(zip(_COLUMNS, columns, strict=True))
        return bool(asker.violations(row, like))

    return violates


def _smallest(
    columns: dict[str, Index], kept: frozenset[str], *, own: bool
) -> list[Index]:
    """Return the columns of the smallest rows of the same kinds. Shapes [n].

    The combination of an axis, a schedule and a recompute kind is allowed for any
    number of stages or for none; the microbatches that a schedule needs are another
    rule.

    Args:
        columns: Columns of a table.
        kept: Names of the columns whose sizes the target looks at.
        own: Whether the target is one of the executors.
    """
    made = {
        name: column if name in kept or name in _CODES else np.minimum(column, 2)
        for name, column in columns.items()
    }
    pipeline = (columns["pp"] > 1) & (columns["num_microbatches"] > 1)
    if own:
        # Batch norms, whose values a microbatch must have, are another rule.
        made["microbatch_size"] = np.ones_like(columns["microbatch_size"])
    if kept.isdisjoint({"pp", "num_microbatches"}):
        made["num_microbatches"] = np.where(
            pipeline, _FILLING, made["num_microbatches"]
        )
    else:
        for name in ("pp", "num_microbatches"):
            made[name] = columns[name]
    return [made[name] for name in _COLUMNS]


def _sizes(facts: Facts) -> frozenset[str]:
    """Return the columns whose sizes the target's rules, or methods, look at."""
    # A method that names some of the copies needs as many.
    named = {"dp_replicate"} if facts.regime.synchronisation.waiting else set()
    if facts.regime.asynchrony.unflushed:
        # Drains are as far apart as so many steps.
        named |= {"pp", "num_microbatches"}
    if facts.target in OWN_TARGETS:
        return frozenset(named)
    sizes = get_target(facts.target).sizes
    return frozenset({*named, *(name.rpartition(".")[2] for name in sizes)})


def target_violations(row: Row, facts: Facts) -> tuple[str, ...]:
    """Return the limits of the target that a row exceeds."""
    if facts.target == "any":
        return ()
    small = dict(row)
    if row["pp"] > 1 and _sizes(facts).isdisjoint({"pp", "num_microbatches"}):
        small["pp"], small["num_microbatches"] = 2, _FILLING
    found = _Asker.of(facts).violations(small)
    if facts.target == "meshwright":
        return found
    uneven = _uneven_violation(get_target(facts.target), row, facts)
    return (*found, uneven) if uneven else found


def _uneven(target: Target, table: StrategyTable, facts: Facts) -> Mask:
    """Return a mask of pipelines without equal layers, for targets that need them."""
    pipeline = table.pp > 1
    if not target.even_layers or not pipeline.any():
        return np.zeros(len(table), dtype=bool)
    if facts.layers is None:
        return np.asarray(pipeline)
    stages = table.pp * table.virtual_stages
    return np.asarray(pipeline & (facts.layers.layers % stages != 0))


def _uneven_violation(target: Target, row: Row, facts: Facts) -> str | None:
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


def target_violated(table: StrategyTable, facts: Facts) -> Mask:
    """Return a mask of the rows that exceed a limit of the target. Shape [n]."""
    if facts.target == "any" or not len(table):
        return np.zeros(len(table), dtype=bool)
    violates = _violation_predicate(_Asker.of(facts))
    columns = {name: getattr(table, name) for name in _COLUMNS}
    small = _smallest(columns, _sizes(facts), own=facts.target in OWN_TARGETS)
    first, which = distinct(*small)
    rows = zip(*(column[first].tolist() for column in small), strict=True)
    violated = np.array([violates(row) for row in rows], dtype=bool)[which]
    if facts.target in OWN_TARGETS:
        return np.asarray(violated)
    return np.asarray(violated | _uneven(get_target(facts.target), table, facts))


def with_expressible_streams(table: StrategyTable, facts: Facts) -> StrategyTable:
    """Switch sequence parallelism off where a launcher cannot express it.

    The enumerator switches it on wherever it applies, as it costs nothing.
    """
    if facts.target in OWN_TARGETS or not table.sequence_parallel.any():
        return table
    off = target_violated(table, facts) & (table.sequence_parallel > 0)
    return replace(table, sequence_parallel=np.where(off, 0, table.sequence_parallel))


def violates_schedule(name: str, facts: Facts) -> bool:
    """Return True if a plain strategy with a schedule exceeds a limit."""
    spec = schedule_spec(name)
    row = {
        **dict.fromkeys((*_DEGREES, *_COUNTS), 1),
        **dict.fromkeys(_CODES, 0),
        "pp": 2,
        "num_microbatches": 2,
        "schedule": spec.code,
        "virtual_stages": spec.usual_virtual_stages,
    }
    return _violation_predicate(_Asker.of(facts))(tuple(row[name] for name in _COLUMNS))
