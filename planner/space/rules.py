"""Rules of the space, which tell legal strategies from others.

A rule is one vectorised predicate over a :class:`StrategyTable` and one sentence: the
enumerator uses the mask, error messages the sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import StrategyError
from planner.schema import Strategy, TensorSharding
from planner.schema.halo import best_split, split_violation
from planner.schema.methods import limit_violations
from planner.schema.methods.all_reduce import AllReduce
from planner.schema.optimizers import OPTIMIZERS
from planner.schema.schedules import schedule_name, schedule_spec
from planner.schema.strategy import plain_replicas
from planner.schema.strategy_parts import ShardTraffic
from planner.schema.violations import (
    Case,
    batch_norm_violation,
    boundary_violation,
    coupled_violation,
    hook_violation,
    offload_violation,
    shards_violation,
    stream_violation,
    whole_violation,
)
from planner.space.build import skeleton
from planner.space.facts import Facts
from planner.space.regime import Regime
from planner.space.table import (
    MESH_COLUMNS,
    RECOMPUTE_NAMES,
    StrategyTable,
    distinct,
)
from planner.space.target import target_violated, target_violations

__all__ = ["RULES", "Rule", "check", "legal", "violations", "zero_fits"]

Mask = NDArray[np.bool_]
Row = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A limit of the space.

    Attributes:
        name: Short name, for tables.
        violated: Function to the mask of the rows that violate it. Shape [n].
        violation: Function to the sentence for one such row: value, rule, remedy.
    """

    name: str
    violated: Callable[[StrategyTable, Facts], Mask]
    violation: Callable[[Row, Facts], str]


def zero_fits(zero_stage: Any, dp_shard: Any, cp: Any) -> Any:
    """True if a ZeRO stage suits a mesh; numbers, or columns of a table.

    ZeRO shards over dp_shard x cp, whose ranks would hold equal weights: over cp alone
    where dp_shard is 1. Without ZeRO, cp ranks are plain replicas.

    Args:
        zero_stage: ZeRO's stage.
        dp_shard: Degree.
        cp: Degree.
    """
    return (dp_shard * cp > 1) & (zero_stage > 0) | (dp_shard == 1) & (zero_stage == 0)


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def _devices_violation(row: Row, facts: Facts) -> str:
    need = row["pp"] * row["dp_replicate"] * row["dp_shard"] * row["cp"] * row["tp"]
    return (
        f"the mesh needs {need} devices, {facts.num_devices} are free; "
        f"lower a degree or free devices"
    )


def _batch_violation(row: Row, facts: Facts) -> str:
    dp = row["dp_replicate"] * row["dp_shard"]
    return (
        f"microbatch_size={row['microbatch_size']} x num_microbatches="
        f"{row['num_microbatches']} x data parallel {dp} is not "
        f"global_batch={facts.global_batch}; use a global batch that they divide"
    )


def _tp_dims_violated(table: StrategyTable, facts: Facts) -> Mask:
    ways = facts.regime.synchronisation.ways(table.tp, table.dp_replicate)
    violated = np.zeros(len(table), dtype=bool)
    for size in facts.tp_dims.values():
        violated |= size % ways != 0
    return violated


def _ways(row: Row, facts: Facts) -> tuple[str, int]:
    """Axis that divides layers, and its degree."""
    synchronisation = facts.regime.synchronisation
    axis = "dp_replicate" if synchronisation.splits else "tp"
    return axis, synchronisation.ways(row["tp"], row["dp_replicate"])


def _tp_dims_violation(row: Row, facts: Facts) -> str:
    axis, ways = _ways(row, facts)
    name, size = next((n, s) for n, s in facts.tp_dims.items() if s % ways)
    return f"{axis}={ways} does not divide {name}={size}; use {_divisors(size)}"


def _tp_sharding_violated(table: StrategyTable, facts: Facts) -> Mask:
    synchronisation = facts.regime.synchronisation
    divided = (table.tp > 1) | synchronisation.cuts(table.dp_replicate)
    return np.asarray(divided & (not facts.has_sharding))


def _tp_sharding_violation(row: Row, facts: Facts) -> str:
    reasons: dict[str, list[str]] = {}
    for pattern, reason in facts.whole.items():
        reasons.setdefault(reason, []).append(pattern)
    shown = "; ".join(f"{', '.join(p)} {why}" for why, p in reasons.items())
    value = facts.regime.synchronisation
    given, remedy = f"tp={row['tp']}", "use tp=1, or give a sharding"
    if value.cuts(row["dp_replicate"]):
        given = f"synchronisation={value} with dp_replicate={row['dp_replicate']}"
        remedy = "use another method"
    return (
        f"{given}, but no module of the model could be split"
        f"{f' ({shown})' if shown else ''}; {remedy}"
    )


def _blocks_violated(table: StrategyTable, facts: Facts) -> Mask:
    value, blocks = facts.regime.synchronisation, len(facts.residual_blocks.units)
    if not value.of_blocks:
        return np.zeros(len(table), dtype=bool)
    several = table.dp_replicate > 1
    return np.asarray(
        several & ((value.depth(table.dp_replicate, blocks) > blocks) | (blocks == 0))
    )


def _blocks_violation(row: Row, facts: Facts) -> str:
    value, copies = facts.regime.synchronisation, row["dp_replicate"]
    given = f"synchronisation={value} with dp_replicate={copies}"
    units = facts.residual_blocks.units
    if not units:
        return f"{given}, but {facts.residual_blocks.reason}; use another method"
    return (
        f"{given} gives each copy {value.depth(copies, len(units))} residual blocks, "
        f"more than the {len(units)} equal ones of the model, {units[0]} to "
        f"{units[-1]}; use {len(units)} at most"
    )


def _chain_reason(facts: Facts) -> str:
    """Reason why the units cannot learn as the request says; empty if they can."""
    value, chain = facts.regime.learning, facts.chain
    found = chain.no_classes if value.of_classes else ""
    return found or (chain.no_layers if value.of_layers else "")


def _hooks_violated(table: StrategyTable, facts: Facts) -> Mask:
    if facts.hooked is None:
        return np.zeros(len(table), dtype=bool)
    if hook_violation(facts.hooked, 1, 1, facts.precision) is not None:
        return np.ones(len(table), dtype=bool)
    return np.asarray(table.num_devices * table.num_microbatches > 1)


def _coupled_violated(table: StrategyTable, facts: Facts) -> Mask:
    if facts.own_loss != "coupled":
        return np.zeros(len(table), dtype=bool)
    return np.asarray(table.dp_replicate * table.dp_shard * table.num_microbatches > 1)


def _stream_violation(facts: Facts) -> str | None:
    """Return the reason why the stream may not be divided; None if it may."""
    return stream_violation(
        TensorSharding(patterns=dict(facts.sharding), sequence_parallel=True),  # type: ignore[arg-type]
        whole_stream=facts.whole_stream,
        mixing=facts.mixing,
    )


def _sequence_violation(row: Row, facts: Facts) -> str:
    if facts.seq_len is None and row["cp"] == 1:
        return (
            "sequence_parallel, but the model has no sequence to divide; switch it off"
        )
    if facts.spatial:
        return _space_violation(row, facts)
    if facts.seq_len is None:
        return f"cp={row['cp']}, but the model has no sequence to divide; use cp=1"
    halves = 2 if row["cp"] > 1 else 1
    parts = halves * row["cp"] * (row["tp"] if row["sequence_parallel"] else 1)
    shown = f"{'2 x ' * (halves - 1)}cp x tp (sequence parallel)"
    return (
        f"{shown} = {parts} does not divide seq_len={facts.seq_len}; use one of its "
        f"divisors"
    )


def _space_violation(row: Row, facts: Facts) -> str:
    """Why cp does not divide the samples of a model of convolutions."""
    if row["sequence_parallel"]:
        return (
            "sequence_parallel, but the model has no sequence to divide; switch it off"
        )
    for axis in ("pp", "tp", "ep"):
        if row[axis] > 1:
            return (
                f"cp={row['cp']} with {axis}={row[axis]}; shards of samples go with "
                f"data parallelism and ZeRO alone, use {axis}=1"
            )
    return split_violation(facts.spatial, row["cp"])


def _space_violated(table: StrategyTable, facts: Facts) -> Mask:
    several = (table.pp > 1) | (table.tp > 1) | (table.ep > 1)
    degrees = np.unique(table.cp)
    whole = [
        degree
        for degree in degrees.tolist()
        if degree > 1 and best_split(facts.spatial, degree) is None
    ]
    divided = (table.cp > 1) & (several | np.isin(table.cp, whole))
    return np.asarray(divided | (table.sequence_parallel > 0))


def _sequence_violated(table: StrategyTable, facts: Facts) -> Mask:
    if facts.spatial:
        return _space_violated(table, facts)
    if facts.seq_len is None:
        return (table.cp > 1) | (table.sequence_parallel > 0)
    # A ring gives each rank two chunks, one from either end of the sequence.
    chunks = np.where(table.cp > 1, 2 * table.cp, 1)
    parts = chunks * np.where(table.sequence_parallel > 0, table.tp, 1)
    return np.asarray(facts.seq_len % parts != 0)


def _experts_violated(table: StrategyTable, facts: Facts) -> Mask:
    wide = table.ep > 1
    if not facts.num_experts:
        return np.asarray(wide)
    fits = (facts.num_experts % table.ep == 0) & (
        (table.dp_shard * table.cp * table.tp) % table.ep == 0
    )
    return np.asarray(wide & ~fits)


def _experts_violation(row: Row, facts: Facts) -> str:
    if not facts.num_experts:
        return f"ep={row['ep']}, but the model has no experts; use ep=1"
    return (
        f"ep={row['ep']} must divide num_experts={facts.num_experts} and dp_shard x cp "
        f"x tp={row['dp_shard'] * row['cp'] * row['tp']}; use a common divisor"
    )


def _units_violation(row: Row, facts: Facts) -> str:
    synchronisation, copies = facts.regime.synchronisation, row["dp_replicate"]
    if synchronisation.parts(copies) > 1:
        return (
            f"synchronisation={synchronisation} with dp_replicate={copies} cuts the "
            f"model's {facts.num_units} units into {synchronisation.parts(copies)} "
            f"parts; use dp_replicate={facts.num_units} at most"
        )
    if facts.uncut:
        return f"pp={row['pp']} cuts {facts.uncut}; use pp=1"
    return (
        f"pp={row['pp']} x virtual_stages={row['virtual_stages']} is more stages than "
        f"the model's {facts.num_units} units; use at most {facts.num_units}"
    )


def _schedule_rule(
    schedule: int, pp: int, virtual: int, microbatches: int
) -> str | None:
    name = schedule_name(schedule)
    if pp == 1:
        if name != "GPipe":
            return f"schedule {name} needs pp > 1; without a pipeline use GPipe"
        if virtual > 1:
            return f"virtual_stages={virtual} needs pp > 1; without a pipeline use 1"
        return None
    return schedule_spec(name).violation(pp, virtual, microbatches)


def _schedule_violated(table: StrategyTable, _: Facts) -> Mask:
    keys = (table.schedule, table.pp, table.virtual_stages, table.num_microbatches)
    first, which = distinct(*keys)
    bad = np.array(
        [_schedule_rule(*(int(key[row]) for key in keys)) is not None for row in first],
        dtype=bool,
    )
    return np.asarray(bad[which])


def _schedule_violation(row: Row, _: Facts) -> str:
    reason = _schedule_rule(
        row["schedule"], row["pp"], row["virtual_stages"], row["num_microbatches"]
    )
    return reason or ""


#: Columns that limits of methods and batch norms look at.
_OF_METHODS = (
    *(*MESH_COLUMNS, "zero_stage", "schedule", "virtual_stages"),
    *("microbatch_size", "num_microbatches"),
)


def _skeleton(row: Row, facts: Facts) -> Strategy:
    return skeleton(
        row,
        precision=facts.precision,
        optimizer=facts.optimizer,
        regime=facts.regime,
    )


def _method_violations(row: Row, facts: Facts) -> tuple[str, ...]:
    kind = RECOMPUTE_NAMES[row["recompute"]]
    return limit_violations(Case(strategy=_skeleton(row, facts), kinds=(kind,)))


def _methods_violated(table: StrategyTable, facts: Facts) -> Mask:
    if not facts.regime.has_limits:
        return np.zeros(len(table), dtype=bool)
    names: tuple[str, ...] = _OF_METHODS
    if facts.regime.asynchrony.wanted_recompute:
        names = (*names, "recompute")
    first, which = distinct(*(getattr(table, name) for name in names))
    bad = [bool(_method_violations(table.row(int(row)), facts)) for row in first]
    return np.array(bad, dtype=bool)[which]


def _batch_norm_violation(row: Row, facts: Facts) -> str:
    return batch_norm_violation(_skeleton(row, facts), facts.batch_norm_values) or ""


def _batch_norm_violated(table: StrategyTable, facts: Facts) -> Mask:
    if facts.batch_norm_values is None:
        return np.zeros(len(table), dtype=bool)
    first, which = distinct(*(getattr(table, name) for name in _OF_METHODS))
    bad = [bool(_batch_norm_violation(table.row(int(row)), facts)) for row in first]
    return np.array(bad, dtype=bool)[which]


RULES: tuple[Rule, ...] = (
    Rule(
        name="devices",
        violated=lambda t, f: t.num_devices > f.num_devices,
        violation=_devices_violation,
    ),
    Rule(
        name="batch",
        violated=lambda t, f: (
            t.microbatch_size * t.num_microbatches * t.dp_replicate * t.dp_shard
            != f.global_batch
        ),
        violation=_batch_violation,
    ),
    Rule(
        name="batch_norm",
        violated=_batch_norm_violated,
        violation=_batch_norm_violation,
    ),
    Rule(
        name="coupled",
        violated=_coupled_violated,
        violation=lambda r, f: (
            coupled_violation(
                r["dp_replicate"] * r["dp_shard"],
                r["num_microbatches"],
                f.own_loss,
                reason=f.whole_batch,
            )
            or ""
        ),
    ),
    Rule(
        name="hooks",
        violated=_hooks_violated,
        violation=lambda r, f: (
            hook_violation(
                f.hooked,
                r["pp"] * r["dp_replicate"] * r["dp_shard"] * r["cp"] * r["tp"],
                r["num_microbatches"],
                f.precision,
            )
            or ""
        ),
    ),
    Rule(
        name="units",
        violated=lambda t, f: (
            t.pp * t.virtual_stages * f.regime.synchronisation.parts(t.dp_replicate)
            > f.num_units
        ),
        violation=_units_violation,
    ),
    Rule(name="schedule", violated=_schedule_violated, violation=_schedule_violation),
    Rule(
        name="zero",
        violated=lambda t, _: ~zero_fits(t.zero_stage, t.dp_shard, t.cp),
        violation=lambda r, _: (
            f"zero_stage={r['zero_stage']} with dp_shard={r['dp_shard']} x cp="
            f"{r['cp']}: zero_stage 1 to 3 shards over dp_shard x cp > 1, and "
            f"dp_shard > 1 needs it; plain replicas are dp_replicate"
        ),
    ),
    Rule(name="tp_dims", violated=_tp_dims_violated, violation=_tp_dims_violation),
    Rule(
        name="tp_sharding",
        violated=_tp_sharding_violated,
        violation=_tp_sharding_violation,
    ),
    Rule(name="blocks", violated=_blocks_violated, violation=_blocks_violation),
    Rule(
        name="boundary",
        violated=lambda t, f: (
            (f.regime.communication.boundary != "direct") & ((t.pp == 1) | (t.tp == 1))
        ),
        violation=lambda r, f: (
            boundary_violation(f.regime.communication.boundary, r["pp"], r["tp"]) or ""
        ),
    ),
    Rule(
        name="replicas",
        violated=lambda t, f: (
            (f.regime.communication.replicas.algorithm != "library")
            & (t.dp_replicate * np.where(t.zero_stage > 0, 1, t.cp) == 1)
        ),
        violation=lambda r, f: (
            f"communication.replicas={f.regime.communication.replicas.algorithm} with "
            f"zero_stage={r['zero_stage']}, dp_replicate={r['dp_replicate']}: messages "
            f"of our own sum gradients over dp_replicate (with cp, where nothing is "
            f"sharded), of which there must be 2 or more"
        ),
    ),
    Rule(
        name="buckets",
        violated=lambda t, f: (
            (f.regime.communication.buckets != "filled")
            & (
                ~plain_replicas(t.pp, t.tp, t.zero_stage, t.dp_shard * t.cp)
                | (t.dp_replicate * t.cp == 1)
                | (f.regime.communication.replicas.algorithm == "library")
            )
        ),
        violation=lambda r, f: (
            f"communication.buckets={f.regime.communication.buckets} with "
            f"pp={r['pp']}, tp={r['tp']}, zero_stage={r['zero_stage']}, dp_replicate="
            f"{r['dp_replicate']}: the order is that of buckets of our own, of plain "
            f"replicas (pp=1, tp=1, no ZeRO) with replicas=ring or another algorithm"
        ),
    ),
    Rule(
        name="loss_chunks",
        violated=lambda t, f: np.full(
            len(t), f.regime.loss_chunks > 1 and f.unchunkable is not None
        ),
        violation=lambda _, f: (
            f"loss_chunks={f.regime.loss_chunks}, but {f.unchunkable}; use "
            f"loss_chunks=1"
        ),
    ),
    Rule(
        name="optimizer",
        violated=lambda t, f: (
            OPTIMIZERS[f.optimizer.name].whole
            & (((t.zero_stage > 0) & (t.dp_shard * t.cp > 1)) | (t.tp > 1) | (t.ep > 1))
        ),
        violation=lambda r, f: (
            whole_violation(
                f.optimizer.name,
                r["dp_shard"] * r["cp"] if r["zero_stage"] else 1,
                r["tp"],
                r["ep"],
            )
            or ""
        ),
    ),
    Rule(
        name="offloaded activations",
        violated=lambda t, f: (
            f.regime.offload.activations
            & (t.recompute != RECOMPUTE_NAMES.index("full"))
        ),
        violation=lambda r, _: (
            f"offload.activations with recompute={RECOMPUTE_NAMES[r['recompute']]}: "
            f"what is offloaded is what recomputation begins with, use recompute=full"
        ),
    ),
    Rule(
        name="offload",
        violated=lambda t, f: (
            (f.regime.offload.states == "parameters")
            & ((t.pp > 1) | (t.zero_stage == 0) | (t.dp_shard * t.cp == 1))
        ),
        violation=lambda r, f: (
            offload_violation(
                f.regime.offload, r["pp"], r["zero_stage"], r["dp_shard"] * r["cp"]
            )
            or ""
        ),
    ),
    Rule(
        name="shard traffic",
        violated=lambda t, f: (
            (f.regime.communication.shards != ShardTraffic())
            & (
                (t.zero_stage != 3)
                | (t.dp_shard * t.cp == 1)
                | (t.pp > 1)
                | (f.regime.synchronisation != AllReduce())
                | (t.dp_shard * t.cp % f.regime.communication.shards.second_copy != 0)
            )
        ),
        violation=lambda r, f: (
            shards_violation(
                f.regime.communication.shards,
                r["pp"],
                r["zero_stage"],
                r["dp_shard"] * r["cp"],
                plain=f.regime.synchronisation == AllReduce(),
            )
            or ""
        ),
    ),
    Rule(
        name="chain",
        violated=lambda t, f: np.full(len(t), bool(_chain_reason(f))),
        violation=lambda _, f: (
            f"learning={f.regime.learning}, but {_chain_reason(f)}; use "
            f"learning=backpropagation"
        ),
    ),
    Rule(
        name="sequence_parallel",
        violated=lambda t, _: (t.sequence_parallel > 0) & (t.tp == 1),
        violation=lambda r, _: (
            f"sequence_parallel with tp={r['tp']} needs tp > 1; switch it off"
        ),
    ),
    Rule(name="sequence", violated=_sequence_violated, violation=_sequence_violation),
    Rule(
        name="stream",
        violated=lambda t, f: (
            (t.sequence_parallel > 0) & (_stream_violation(f) is not None)
        ),
        violation=lambda _, f: _stream_violation(f) or "",
    ),
    Rule(name="experts", violated=_experts_violated, violation=_experts_violation),
    Rule(
        name="methods",
        violated=_methods_violated,
        violation=lambda r, f: "; ".join(_method_violations(r, f)),
    ),
    Rule(
        name="target",
        violated=target_violated,
        violation=lambda r, f: "; ".join(target_violations(r, f)),
    ),
)


def legal(table: StrategyTable, facts: Facts) -> Mask:
    """Return a mask of the rows that violate no rule. Shape [n].

    Each rule only sees rows that passed the rules before it, cheap rules first.
    """
    alive, rows = np.arange(len(table)), table
    for rule in RULES:
        violated = rule.violated(rows, facts)
        if violated.any():
            alive = alive[~violated]
            rows = table[alive]
    mask = np.zeros(len(table), dtype=bool)
    mask[alive] = True
    return mask


def violations(strategy: Strategy, facts: Facts) -> tuple[str, ...]:
    """Return the violations of a strategy; empty if it is legal.

    Limits of the target are checked for strategies that violate no other rule.
    """
    table = StrategyTable.from_strategies([strategy])
    row = table.row(0)
    facts = replace(facts, regime=Regime.of(strategy))
    if strategy.sharding.patterns:
        facts = replace(facts, sharding=strategy.sharding.patterns)
    found: list[str] = []
    for rule in RULES:
        if rule.name == "target" and found:
            continue
        if rule.violated(table, facts)[0]:
            found.append(rule.violation(row, facts))
    return tuple(found)


def check(strategy: Strategy, facts: Facts) -> None:
    """Check that a strategy violates no rule.

    Raises:
        StrategyError: If it does, with every violation.
    """
    found = violations(strategy, facts)
    if found:
        raise StrategyError(f"{strategy.label()}: " + "; ".join(found))
