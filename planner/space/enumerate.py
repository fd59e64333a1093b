"""All strategies of a request, as tables of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.schema.schedules import schedule_spec, schedules
from planner.space.facts import OWN_TARGETS, Facts
from planner.space.pins import normalize_pins
from planner.space.rules import legal, zero_fits
from planner.space.table import MESH_COLUMNS, StrategyTable
from planner.space.target import violates_schedule, with_expressible_streams

__all__ = ["enumerate_meshes", "enumerate_strategies", "expand_meshes"]

_MAX_TP = 64
_MAX_CP = 64
_MAX_VIRTUAL = 8


def _divisors(number: int, limit: int | None = None) -> NDArray[np.int64]:
    upto = min(number, limit or number)
    candidates = np.arange(1, upto + 1, dtype=np.int64)
    return np.asarray(candidates[number % candidates == 0])


def _grid(*columns: Any) -> list[NDArray[np.int64]]:
    return [axis.reshape(-1) for axis in np.meshgrid(*columns, indexing="ij")]


def _meshes(count: int, facts: Facts, pins: Mapping[str, int]) -> NDArray[np.int64]:
    """Return the meshes over ``count`` devices. Shape [n, 6]."""
    divisors = _divisors(count)

    def allowed(axis: str, limit: int) -> NDArray[np.int64]:
        if axis in pins:
            return np.asarray(divisors[divisors == pins[axis]])
        return np.asarray(divisors[divisors <= limit])

    pp, cp, tp, shard = _grid(
        allowed("pp", facts.num_units),
        allowed("cp", _MAX_CP if facts.seq_len or facts.spatial else 1),
        allowed("tp", _MAX_TP if facts.has_sharding else 1),
        allowed("dp_shard", count),
    )
    inner = pp * cp * tp * shard
    fits = count % inner == 0
    pp, cp, tp, shard = (axis[fits] for axis in (pp, cp, tp, shard))
    replicate = count // (pp * cp * tp * shard)
    if "dp_replicate" in pins:
        fits = replicate == pins["dp_replicate"]
        pp, cp, tp, shard, replicate = (
            axis[fits] for axis in (pp, cp, tp, shard, replicate)
        )
    divides = facts.global_batch % (replicate * shard) == 0
    for size in facts.tp_dims.values():
        divides &= size % tp == 0
    mesh = np.stack([pp, replicate, shard, cp, tp], axis=1)[divides]
    return _with_experts(mesh, facts, pins)


def _with_experts(
    mesh: NDArray[np.int64], facts: Facts, pins: Mapping[str, int]
) -> NDArray[np.int64]:
    degrees = (
        _divisors(facts.num_experts) if facts.num_experts else np.ones(1, np.int64)
    )
    if "ep" in pins:
        degrees = np.array([pins["ep"]], dtype=np.int64)
    index, ep = _grid(np.arange(len(mesh)), degrees)
    fits = mesh[index, 2:5].prod(axis=1) % ep == 0
    return np.concatenate([mesh[index[fits]], ep[fits, None]], axis=1)


def _uneven_rounds(pp: NDArray[np.int64], many: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask where interleaved schedules need another number of microbatches."""
    return np.asarray(many % np.maximum(many // pp, 1) > 0)


def _schedules(
    mesh: NDArray[np.int64], facts: Facts, pins: Mapping[str, int]
) -> list[tuple[int, int]]:
    """Return the pairs (schedule, virtual stages) to try with pp > 1.

    Unless one is pinned, representatives stand for all schedules. The others differ
    from these in bubbles and memory alone: partitioners try them on the best meshes
    (:func:`planner.search.refine.schedule_variants`).
    """
    uneven = bool(_uneven_rounds(mesh[:, :1], _divisors(facts.global_batch)).any())
    inexpressible = _inexpressible_stand_ins(facts)
    pairs = []
    for spec in schedules():
        if "schedule" in pins:
            listed = spec.code == pins["schedule"]
        else:
            listed = spec.representative or spec.name in inexpressible
            if spec.stands_in_for is not None:
                other = schedule_spec(spec.stands_in_for)
                listed |= uneven and other.equal_rounds
        if not listed:
            continue
        least, most = spec.virtual_stages
        virtual = [least]
        if most != least:
            upto = min(most or _MAX_VIRTUAL, _MAX_VIRTUAL)
            virtual = list(range(max(2, least), upto + 1))
        if "virtual_stages" in pins:
            virtual = [pins["virtual_stages"]]
        if virtual == [1] and spec.one_stage is not None:
            # Its order has a name of its own then, unless that was not asked for.
            if "schedule" not in pins:
                pairs.append((schedule_spec(spec.one_stage).code, 1))
            continue
        pairs += [(spec.code, count) for count in virtual]
    return pairs


def _inexpressible_stand_ins(facts: Facts) -> set[str]:
    """Return stand-ins whose counterpart the launcher cannot express."""
    if facts.target in OWN_TARGETS:
        return set()
    return {
        spec.name
        for spec in schedules()
        if spec.stands_in_for and violates_schedule(spec.stands_in_for, facts)
    }


def _is_needed(
    schedule: NDArray[np.int64],
    pp: NDArray[np.int64],
    many: NDArray[np.int64],
    facts: Facts,
) -> NDArray[np.bool_]:
    """Return a mask that is False for stand-ins with a legal counterpart. [n]."""
    inexpressible = _inexpressible_stand_ins(facts)
    needed = np.ones((), dtype=bool)
    for spec in schedules():
        if spec.stands_in_for is None or spec.name in inexpressible:
            continue
        other = schedule_spec(spec.stands_in_for)
        illegal = (pp == 1) | (many < other.microbatches_per_stage * pp)
        if other.equal_rounds:
            illegal = illegal | _uneven_rounds(pp, many)
        needed = needed & ((schedule != spec.code) | illegal)
    return np.asarray(needed)


def _expand(
    mesh: NDArray[np.int64], facts: Facts, pins: Mapping[str, int]
) -> StrategyTable:
    """Expand meshes by every schedule, microbatch, ZeRO stage and recompute kind."""
    sizes = _divisors(facts.global_batch)
    if "microbatch_size" in pins:
        sizes = sizes[sizes == pins["microbatch_size"]]
    pairs = _schedules(mesh, facts, pins)
    plain = schedule_spec("GPipe").code
    no_pipeline = (pins.get("schedule", plain), pins.get("virtual_stages", 1))
    if no_pipeline not in pairs:
        pairs = [no_pipeline, *pairs]
    zero = [pins["zero_stage"]] if "zero_stage" in pins else [0, 1, 2, 3]
    recompute = [pins["recompute"]] if "recompute" in pins else [0, 1, 2]
    # Axes of the masks: mesh, schedule, microbatch size, ZeRO stage.
    schedule, virtual = np.array(pairs, dtype=np.int64).T[:, None, :, None, None]
    size, stage = sizes[:, None], np.array(zero, dtype=np.int64)
    pp, replicate, shard, cp, tp, _ = mesh.T[..., None, None, None]
    per_replica = facts.global_batch // (replicate * shard)
    keep = (
        (per_replica % size == 0)
        & zero_fits(stage, shard, cp)
        & ((pp > 1) | ((schedule == no_pipeline[0]) & (virtual == no_pipeline[1])))
        & (pp * virtual <= facts.num_units)
    )
    if "schedule" not in pins:
        keep &= _is_needed(schedule, pp, per_replica // size, facts)
    if "num_microbatches" in pins:
        keep &= per_replica == size * pins["num_microbatches"]
    of_mesh, of_pair, of_size, of_stage = (
        np.repeat(axis, len(recompute)) for axis in np.nonzero(keep)
    )
    sequence_parallel = _sequence_parallel(cp, tp, facts, pins).reshape(-1)
    degrees = mesh[of_mesh].T
    table = StrategyTable.from_columns(
        **dict(zip(MESH_COLUMNS, degrees, strict=True)),
        zero_stage=stage[of_stage],
        schedule=schedule.reshape(-1)[of_pair],
        virtual_stages=virtual.reshape(-1)[of_pair],
        microbatch_size=sizes[of_size],
        num_microbatches=per_replica.reshape(-1)[of_mesh] // sizes[of_size],
        recompute=np.tile(recompute, len(of_mesh) // len(recompute)),
        sequence_parallel=sequence_parallel[of_mesh],
    )
    if "sequence_parallel" in pins:
        return table
    return with_expressible_streams(table, facts)


def _sequence_parallel(
    cp: NDArray[np.int64],
    tp: NDArray[np.int64],
    facts: Facts,
    pins: Mapping[str, int],
) -> NDArray[np.int64]:
    """Return 1 wherever sequence parallelism applies: it saves memory at no cost."""
    if "sequence_parallel" in pins:
        return np.full(tp.shape, pins["sequence_parallel"], dtype=np.int64)
    if facts.seq_len is None or facts.whole_stream is not None:
        return np.zeros(tp.shape, dtype=np.int64)
    chunks = np.where(cp > 1, 2 * cp, 1)
    divides = (tp > 1) & (facts.seq_len % (chunks * tp) == 0)
    return np.asarray(divides, dtype=np.int64)


def _all_pins(facts: Facts, pins: Mapping[str, int] | None) -> dict[str, int]:
    """Return pins with the knobs that methods fix."""
    return {**normalize_pins(facts.regime.fixes), **(pins or {})}


def enumerate_meshes(
    facts: Facts, num_devices: int, pins: Mapping[str, int] | None = None
) -> NDArray[np.int64]:
    """Return meshes over ``num_devices`` devices that divide the model and the batch.

    Only rules about degrees are applied: a mesh may turn out to have no legal row.

    Args:
        facts: Facts of the request.
        num_devices: Devices to use.
        pins: Fixed columns, from :func:`normalize_pins`.
    Returns:
        Columns :data:`MESH_COLUMNS`. Shape [meshes, 6].
    """
    return _meshes(num_devices, facts, dict(pins or {}))


def expand_meshes(
    mesh: NDArray[np.int64], facts: Facts, pins: Mapping[str, int] | None = None
) -> StrategyTable:
    """Return every legal row of meshes, as in :func:`enumerate_strategies`.

    Args:
        mesh: Columns :data:`MESH_COLUMNS`, over equally many devices. Shape [n, 6].
        facts: Facts of the request.
        pins: Fixed columns, from :func:`normalize_pins`.
    """
    table = _expand(mesh, facts, _all_pins(facts, pins))
    return table[np.flatnonzero(legal(table, facts))]


def enumerate_strategies(
    facts: Facts,
    *,
    num_devices: int | None = None,
    pins: Mapping[str, int] | None = None,
    rows: int = 500_000,
) -> Iterator[StrategyTable]:
    """Yield every legal strategy that uses exactly ``num_devices`` devices.

    Degrees are divisors of the number of devices (tp and cp at most 64), microbatch
    sizes divisors of the global batch.

    Args:
        facts: Facts of the request.
        num_devices: Devices to use; all free ones if None.
        pins: Fixed columns, from :func:`normalize_pins`.
        rows: Approximate number of rows of one table before rules.
    Yields:
        Tables of legal rows; empty ones are left out.
    """
    pins = _all_pins(facts, pins)
    mesh = _meshes(num_devices or facts.num_devices, facts, pins)
    if not len(mesh):
        return
    fan_out = (
        len(_divisors(facts.global_batch))
        * (len(_schedules(mesh, facts, pins)) + 1)
        * 12
    )
    chunk = max(1, rows // fan_out)
    for start in range(0, len(mesh), chunk):
        table = _expand(mesh[start : start + chunk], facts, pins)
        table = table[np.flatnonzero(legal(table, facts))]
        if len(table):
            yield table
