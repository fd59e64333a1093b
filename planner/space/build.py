"""Strategies of rows of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from planner.schema import (
    Mesh,
    Optimizer,
    Precision,
    Recompute,
    Stage,
    Strategy,
    TensorSharding,
)
from planner.schema.halo import SpatialLayer, best_split
from planner.schema.schedules import schedule_name, schedule_spec
from planner.schema.strategy_parts import ContextAlgorithm
from planner.space.regime import Regime
from planner.space.table import MESH_COLUMNS, RECOMPUTE_NAMES

__all__ = ["build_strategy", "patterns_for", "skeleton"]


def skeleton(
    row: Mapping[str, int],
    *,
    precision: Precision | None = None,
    optimizer: Optimizer | None = None,
    regime: Regime | None = None,
) -> Strategy:
    """Build the strategy of a row without stages."""
    return Strategy(
        mesh=Mesh(**{axis: row[axis] for axis in MESH_COLUMNS}),
        zero_stage=row["zero_stage"],  # type: ignore[arg-type]
        schedule=schedule_name(row["schedule"]),
        virtual_stages=row["virtual_stages"],
        microbatch_size=row["microbatch_size"],
        num_microbatches=row["num_microbatches"],
        sharding=TensorSharding(sequence_parallel=bool(row["sequence_parallel"])),
        precision=precision or Precision(),
        optimizer=optimizer or Optimizer(),
        **(regime.strategy_fields if regime else {}),
    )


def patterns_for(
    mesh: Mesh, sharding: Mapping[str, str], regime: Regime | None = None
) -> dict[str, str]:
    """Return the patterns that a strategy uses: experts along ep, others along tp.

    Where copies divide layers, those along dp_replicate too.
    """
    synchronisation = (regime or Regime()).synchronisation
    divided = mesh.tp > 1 or synchronisation.cuts(mesh.dp_replicate)
    return {
        pattern: style
        for pattern, style in sharding.items()
        if (mesh.ep > 1 if style == "experts" else divided)
    }


def build_strategy(
    row: Mapping[str, int],
    *,
    unit_names: Sequence[str],
    bounds: Sequence[int],
    recompute: Sequence[Recompute] | None = None,
    sharding: Mapping[str, str] | None = None,
    precision: Precision | None = None,
    optimizer: Optimizer | None = None,
    grad_clip_norm: float | None = None,
    regime: Regime | None = None,
    device_ranges: tuple[tuple[int, int], ...] = (),
    context: ContextAlgorithm = "ring",
    spatial: tuple[SpatialLayer, ...] = (),
    like: Strategy | None = None,
) -> Strategy:
    """Build the strategy of a row with its stages.

    Args:
        row: A row from :meth:`StrategyTable.row`.
        unit_names: FQNs of the model's pipeline units, in order. Length U.
        bounds: Unit at which each stage starts, then U. Length stages + 1.
        recompute: Recomputation of each stage; the row's for all if None.
        sharding: Pattern to style; see :func:`patterns_for`.
        precision: Dtypes; defaults of :class:`Precision` if None.
        optimizer: Defaults of :class:`Optimizer` if None.
        grad_clip_norm: Largest gradient norm; None for no clipping.
        regime: Methods, and whether blocks are compiled; the default if None.
        device_ranges: Device ids by rank.
        context: Algorithm of attention over a sequence that cp divides.
        spatial: Convolutions of a model of which cp divides samples; the split with the
            fewest halos is taken, the first dimension alone if none serves them all.
        like: A strategy with the same precision, optimizer, clipping, regime and
            devices, which is copied, without validation, in a fifth of the time.
    """
    mesh, count = _mesh(*(row[axis] for axis in MESH_COLUMNS)), len(bounds) - 1
    schedule = schedule_name(row["schedule"])
    rank_of = schedule_spec(schedule).rank_of_stage
    kinds = recompute or (RECOMPUTE_NAMES[row["recompute"]],) * count
    stages = tuple(
        _stage(rank_of(at, mesh.pp), tuple(unit_names[start:stop]), kind)
        for at, (start, stop, kind) in enumerate(
            zip(bounds[:-1], bounds[1:], kinds, strict=True)
        )
    )
    patterns = patterns_for(mesh, sharding or {}, regime)
    split: tuple[int, ...] = ()
    if row["cp"] > 1 and spatial:
        context = "halo"
        split = best_split(spatial, row["cp"]) or (row["cp"],)
    made: dict[str, Any] = {
        "mesh": mesh,
        "zero_stage": row["zero_stage"],
        "schedule": schedule,
        "virtual_stages": row["virtual_stages"],
        "microbatch_size": row["microbatch_size"],
        "num_microbatches": row["num_microbatches"],
        "stages": stages,
        "context_algorithm": context if row["cp"] > 1 else "all_to_all",
        "spatial": _trimmed(split),
        "sharding": _sharding(
            tuple(patterns.items()), sequence_parallel=bool(row["sequence_parallel"])
        ),
    }
    if like is not None:
        return like.model_copy(update=made)
    return Strategy(
        **made,
        precision=precision or Precision(),
        optimizer=optimizer or Optimizer(),
        grad_clip_norm=grad_clip_norm,
        device_ranges=device_ranges,
        **(regime.strategy_fields if regime else {}),
    )


@lru_cache(maxsize=1024)
def _mesh(*degrees: int) -> Mesh:
    return Mesh(**dict(zip(MESH_COLUMNS, degrees, strict=True)))


@lru_cache(maxsize=4096)
def _stage(rank: int, modules: tuple[str, ...], recompute: Recompute) -> Stage:
    return Stage(rank=rank, modules=modules, recompute=recompute)


@lru_cache(maxsize=256)
def _sharding(
    patterns: tuple[tuple[str, Any], ...], *, sequence_parallel: bool
) -> TensorSharding:
    return TensorSharding(patterns=dict(patterns), sequence_parallel=sequence_parallel)


def _trimmed(split: tuple[int, ...]) -> tuple[int, ...]:
    """Leave out the last dimensions that are whole."""
    while split[1:] and split[-1] == 1:
        split = split[:-1]
    return split
