"""One strategy with its own stages, priced exactly: what ranks the finalists."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.data_parallel import (
    ReplicaTraffic,
    optimizer_seconds,
    replica_traffic,
)
from planner.cost.memory import MemoryParts, memory_parts
from planner.cost.result import Cost
from planner.cost.setting import Setting
from planner.cost.unit_costs import Combinations, UnitCosts, price_units
from planner.errors import StrategyError
from planner.schema import Strategy
from planner.simulate import (
    ActionTable,
    actions,
    closed_form_of_stages,
    evaluate,
    peak_activation_bytes,
)
from planner.space.table import RECOMPUTE_NAMES

__all__ = ["StageTimes", "detailed_cost", "stage_times", "unit_ranges"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One microbatch on every virtual stage, communication included. Shapes [stages].

    Attributes:
        forward: Seconds of the forward.
        backward: Seconds of the whole backward, recomputation included.
        weight: Part of ``backward`` that a split schedule may do later.
        again: Part of ``backward`` that is recomputation.
        tensor: Part of both that is exposed tp communication; likewise context,
            expert.
        send: One boundary's transfer in one direction. Shape [stages - 1].
    """

    forward: Array
    backward: Array
    weight: Array
    again: Array
    tensor: Array
    context: Array
    expert: Array
    send: Array


def unit_ranges(setting: Setting, strategy: Strategy) -> Index:
    """Unit at which each stage starts, then the number of units. Shape [stages + 1].

    Raises:
        StrategyError: If the stages are not the model's units in order.
    """
    names = setting.graph.unit_names
    listed = [name for stage in strategy.stages for name in stage.modules]
    if tuple(listed) != names:
        missing = [name for name in names if name not in set(listed)]
        extra = [name for name in listed if name not in set(names)]
        detail = (
            f"missing {missing[0]!r}" if missing else f"unknown {extra[0]!r}"
        ) if missing or extra else "the order differs"
        raise StrategyError(
            f"stages do not list the model's {len(names)} units in order: {detail}; "
            f"units are {names[0]!r} … {names[-1]!r}"
        )
    sizes = [len(stage.modules) for stage in strategy.stages]
    return np.cumsum([0, *sizes]).astype(np.int64)


def _unit_costs(setting: Setting, strategy: Strategy) -> UnitCosts:
    def one(value: int) -> Index:
        return np.array([value], dtype=np.int64)

    return price_units(
        setting,
        Combinations(
            tp=one(strategy.mesh.tp),
            cp=one(strategy.mesh.cp),
            ep=one(strategy.mesh.ep),
            microbatch=one(strategy.microbatch_size),
            sequence_parallel=one(int(strategy.sharding.sequence_parallel)),
        ),
    )


def _stage_sums(values: Array, bounds: Index) -> Array:
    """Sum units [..., U] within stages. Shape [..., stages]."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums[..., bounds[1:]] - sums[..., bounds[:-1]]


def _recompute_codes(strategy: Strategy) -> Index:
    return np.array([RECOMPUTE_NAMES.index(stage.recompute) for stage in strategy.stages])


def _ranks_of_stages(strategy: Strategy) -> Index:
    return np.array([stage.rank for stage in strategy.stages])


def stage_times(
    setting: Setting, strategy: Strategy, costs: UnitCosts, bounds: Index
) -> StageTimes:
    """Seconds of every stage for one microbatch, at full speed."""
    pp = strategy.mesh.pp
    rank = _ranks_of_stages(strategy)
    kind = setting.types_of_ranks(pp)[rank]
    column = np.arange(len(rank))

    def typed(values: Array) -> Array:
        return np.asarray(_stage_sums(values[:, 0], bounds)[kind, column])

    def plain(values: Array) -> Array:
        return np.asarray(_stage_sums(values[0], bounds))

    codes = _recompute_codes(strategy)
    forward, backward = typed(costs.forward_s), typed(costs.backward_s)
    kernels_again = np.choose(
        codes, [np.zeros(len(rank)), typed(costs.selective_s), typed(costs.full_s)]
    )
    tp, cp, ep = plain(costs.tp_s), plain(costs.cp_s), plain(costs.ep_s)
    full = codes == 2
    repeated = np.where(full, tp + ep + cp / 3, 0.0)
    send = np.zeros(max(len(rank) - 1, 0))
    if pp > 1:
        bandwidth, latency = setting.boundaries(pp)
        before, after = rank[:-1], rank[1:]
        edge = np.where((before - after) == pp - 1, pp - 1, np.minimum(before, after))
        cut = costs.cut_bytes[0, bounds[1:-1] - 1]
        send = np.where(before == after, 0.0, latency[edge] + cut / bandwidth[edge])
    return StageTimes(
        forward=forward + tp + ep + cp / 3,
        backward=backward + tp + ep + 2 * cp / 3 + kernels_again + repeated,
        weight=typed(costs.weight_s),
        again=kernels_again,
        tensor=tp * np.where(full, 3.0, 2.0),
        context=cp * np.where(full, 4 / 3, 1.0),
        expert=ep * np.where(full, 3.0, 2.0),
        send=send,
    )


def _by_rank(values: Array, rank: Index, pp: int) -> Array:
    return np.bincount(rank, weights=values, minlength=pp)


def _schedule(strategy: Strategy) -> ActionTable | None:
    """The order of actions; None without a pipeline."""
    if strategy.mesh.pp == 1:
        return None
    return actions(
        strategy.schedule,
        strategy.mesh.pp,
        strategy.virtual_stages,
        strategy.num_microbatches,
    )


def _memory(
    setting: Setting,
    strategy: Strategy,
    costs: UnitCosts,
    bounds: Index,
    table: ActionTable | None,
) -> MemoryParts:
    """Peak memory of one device of each pp rank. Shapes [pp]."""
    pp, rank = strategy.mesh.pp, _ranks_of_stages(strategy)
    codes = _recompute_codes(strategy)
    column = np.arange(len(rank))
    kept = _stage_sums(costs.saved_bytes[:, 0], bounds)[codes, column]
    held = _by_rank(kept, rank, pp) if table is None else peak_activation_bytes(table, kept)
    transient, largest = np.zeros(pp), np.zeros(pp)
    scalars = costs.dense_parameters[0] + costs.expert_parameters[0]
    for stage, owner in enumerate(rank):
        units = slice(bounds[stage], bounds[stage + 1])
        peak = costs.transient_bytes[codes[stage], 0, units].max()
        transient[owner] = max(transient[owner], peak)
        largest[owner] = max(largest[owner], scalars[units].max())
    dense = _by_rank(_stage_sums(costs.dense_parameters[0], bounds), rank, pp)
    expert = _by_rank(_stage_sums(costs.expert_parameters[0], bounds), rank, pp)
    cut = np.concatenate([[0.0], costs.cut_bytes[0, bounds[1:-1] - 1], [0.0]])
    same = np.concatenate([[False], rank[1:] == rank[:-1], [False]])
    cut = np.where(same, 0.0, cut)
    return memory_parts(
        parameters=dense + expert,
        sharded=_sharded(strategy, dense, expert),
        largest_unit=largest,
        zero_stage=strategy.zero_stage,
        pp=pp,
        num_microbatches=strategy.num_microbatches,
        kept_bytes=held,
        transient_bytes=transient,
        receive_bytes=_by_rank(cut[:-1] + cut[1:], rank, pp),
        precision=setting.precision,
        optimizer=setting.optimizer,
        recipe=setting.recipe,
        on_gpu=setting.on_gpu,
    )


def _sharded(strategy: Strategy, dense: Array, expert: Array) -> Array:
    mesh = strategy.mesh
    ways = mesh.dp_shard * mesh.cp if strategy.zero_stage else 1
    return dense / ways + expert * mesh.ep / max(ways, mesh.ep)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tail:
    """After (or beside) the pipeline: copies made alike, weights updated. [pp]."""

    traffic: ReplicaTraffic
    update: Array

    @property
    def exposed(self) -> Array:
        return self.traffic.exposed_s


def _tail(
    setting: Setting,
    strategy: Strategy,
    costs: UnitCosts,
    bounds: Index,
    busy: tuple[Array, Array],
) -> _Tail:
    mesh, pp = strategy.mesh, strategy.mesh.pp
    rank = _ranks_of_stages(strategy)
    dense = _by_rank(_stage_sums(costs.dense_parameters[0], bounds), rank, pp)
    expert = _by_rank(_stage_sums(costs.expert_parameters[0], bounds), rank, pp)
    units = _by_rank(np.diff(bounds).astype(float), rank, pp)
    ways = mesh.dp_shard * mesh.cp if strategy.zero_stage else 1
    copies = mesh.dp_replicate * (1 if strategy.zero_stage else mesh.cp)

    def full(value: int) -> Index:
        return np.full(pp, value, dtype=np.int64)

    traffic = replica_traffic(
        scalars=dense + expert,
        units=units,
        zero_stage=full(strategy.zero_stage),
        pp=full(pp),
        num_microbatches=full(strategy.num_microbatches),
        forward_s=busy[0],
        backward_s=busy[1],
        shard=setting.groups(full(ways), full(mesh.tp)),
        replicate=setting.groups(full(copies), full(mesh.tp * ways)),
        precision=setting.precision,
        recipe=setting.recipe,
        measured=setting.cluster.document.collectives,
        on_gpu=setting.on_gpu,
    )
    kinds = setting.types_of_ranks(pp)
    tensors = _by_rank(_stage_sums(costs.tensors, bounds), rank, pp)
    owned = _sharded(strategy, dense, expert)
    update = np.array(
        [
            optimizer_seconds(
                owned[r],
                tensors[r],
                setting.cluster.device_types[kinds[r]],
                setting.optimizer,
                clip=strategy.grad_clip_norm is not None,
            )
            for r in range(pp)
        ]
    )
    return _Tail(traffic=traffic, update=update)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipeline:
    """End of the pipeline, without and with transfers, and per rank. [pp]."""

    plain_s: float
    sent_s: float
    done_s: Array
    busy_s: Array


def _pipeline(
    strategy: Strategy, times: StageTimes, table: ActionTable | None, fidelity: str
) -> _Pipeline:
    rank, pp = _ranks_of_stages(strategy), strategy.mesh.pp
    work = times.forward + times.backward
    busy = strategy.num_microbatches * _by_rank(work, rank, pp)
    if table is None:
        total = float(busy[0])
        return _Pipeline(plain_s=total, sent_s=total, done_s=busy, busy_s=busy)
    backward = times.backward - times.weight
    if fidelity == "analytic":
        key = (strategy.schedule, pp, strategy.virtual_stages, strategy.num_microbatches)
        parts = (times.forward, backward, times.weight)
        plain = float(closed_form_of_stages(*key, *parts))
        sent = float(closed_form_of_stages(*key, *parts, times.send, times.send))
        return _Pipeline(
            plain_s=plain, sent_s=sent, done_s=np.full(pp, sent), busy_s=busy
        )
    with_sends = evaluate(
        table, times.forward, backward, times.weight, times.send, times.send
    )
    without = evaluate(table, times.forward, backward, times.weight)
    done = np.zeros(pp)
    np.maximum.at(done, rank, with_sends.backward_done_s)
    return _Pipeline(
        plain_s=float(without.makespan_s),
        sent_s=float(with_sends.makespan_s),
        done_s=done,
        busy_s=busy,
    )


def detailed_cost(
    setting: Setting, strategy: Strategy, fidelity: str = "simulated"
) -> Cost:
    """Time and memory of a strategy whose stages are given.

    Args:
        setting: The request.
        strategy: With stages that list all units of the model in order.
        fidelity: ``simulated`` runs the schedule's exact order, ``analytic`` takes its
            closed form.
    Raises:
        StrategyError: If the stages are not the model's units.
    """
    bounds = unit_ranges(setting, strategy)
    costs = _unit_costs(setting, strategy)
    table = _schedule(strategy)
    times = stage_times(setting, strategy, costs, bounds)
    pp, rank = strategy.mesh.pp, _ranks_of_stages(strategy)
    run = _pipeline(strategy, times, table, fidelity)
    crowd, everyone = setting.crowding(pp)
    forward = _by_rank(times.forward, rank, pp) * crowd
    backward = _by_rank(times.backward, rank, pp) * crowd
    tail = _tail(setting, strategy, costs, bounds, (forward, backward))
    cores = float(run.busy_s.sum()) / pp * everyone
    plain = max(run.plain_s * crowd, cores)
    sent = max(run.sent_s * crowd, cores)
    # Ranks that end early reduce and update while the others still compute.
    lag = sent - run.done_s * crowd if table is not None else np.zeros(pp)
    after = np.maximum(tail.exposed + tail.update * everyone - lag, 0.0)
    last = int(after.argmax())
    breakdown = _breakdown(strategy, times, run, crowd, plain, sent)
    share = after[last] / max(tail.exposed[last] + tail.update[last] * everyone, 1e-300)
    breakdown["data_parallel"] = float(tail.exposed[last] * share)
    breakdown["optimizer"] = float(tail.update[last] * everyone * share)
    return Cost(
        step_time_s=float(sum(breakdown.values())),
        breakdown_s=breakdown,
        memory=_memory(setting, strategy, costs, bounds, table),
        limit_bytes=setting.limits_of_ranks(pp),
        device_type=setting.types_of_ranks(pp),
        link_bytes=_link_bytes(strategy, costs, bounds, tail),
        collective_bytes=_collective_bytes(strategy, costs, bounds, tail),
        fidelity="simulated" if fidelity == "simulated" else "analytic",
    )


def _breakdown(
    strategy: Strategy,
    times: StageTimes,
    run: _Pipeline,
    crowd: float,
    plain: float,
    sent: float,
) -> dict[str, float]:
    """Parts of the busiest rank's time, then what the pipeline adds."""
    rank, pp = _ranks_of_stages(strategy), strategy.mesh.pp
    slowest = int(run.busy_s.argmax())
    many = strategy.num_microbatches * crowd

    def of(values: Array) -> float:
        return float(_by_rank(values, rank, pp)[slowest] * many)

    parts = {
        "recompute": of(times.again),
        "tensor": of(times.tensor),
        "context": of(times.context),
        "expert": of(times.expert),
    }
    busy = float(run.busy_s[slowest] * crowd)
    return {
        "compute": busy - sum(parts.values()),
        **parts,
        "pipeline_bubble": plain - busy,
        "pipeline_transfer": sent - plain,
    }


def _link_bytes(
    strategy: Strategy, costs: UnitCosts, bounds: Index, tail: _Tail
) -> dict[str, float]:
    """Bytes that the busiest sender of each axis sends per step."""
    rank, pp = _ranks_of_stages(strategy), strategy.mesh.pp
    many = strategy.num_microbatches

    def most(values: Array) -> float:
        return float(_by_rank(_stage_sums(values[0], bounds), rank, pp).max() * many)

    cut = np.concatenate([costs.cut_bytes[0, bounds[1:-1] - 1], [0.0]])
    gradient = np.concatenate([[0.0], costs.cut_bytes[0, bounds[1:-1] - 1]])
    sent = {
        "pp": float(_by_rank(cut + gradient, rank, pp).max() * many) if pp > 1 else 0.0,
        "dp": float(tail.traffic.sent_bytes.max()),
        "cp": most(costs.cp_bytes),
        "tp": most(costs.tp_bytes),
        "ep": most(costs.ep_bytes),
    }
    return {axis: value for axis, value in sent.items() if value > 0}


def _collective_bytes(
    strategy: Strategy, costs: UnitCosts, bounds: Index, tail: _Tail
) -> dict[str, float]:
    """Payload per step by kind of call, each kind on its busiest rank."""
    rank, pp = _ranks_of_stages(strategy), strategy.mesh.pp
    many, traffic = strategy.num_microbatches, tail.traffic
    passes = np.where(_recompute_codes(strategy) == 2, 3.0, 2.0)

    def per_rank(payload: Array) -> Array:
        return _by_rank(_stage_sums(payload[0], bounds) * passes, rank, pp) * many

    tensor, routed = per_rank(costs.tp_payload), 2 * per_rank(costs.ep_payload)
    split = strategy.sharding.sequence_parallel
    cut = np.concatenate([costs.cut_bytes[0, bounds[1:-1] - 1], [0.0]])
    gradient = np.concatenate([[0.0], costs.cut_bytes[0, bounds[1:-1] - 1]])
    payload = {
        "all_reduce": traffic.reduced_bytes + (0 if split else tensor),
        "all_gather": traffic.gathered_bytes + (tensor if split else 0),
        "reduce_scatter": traffic.scattered_bytes + (tensor if split else 0),
        "all_to_all": routed,
        "send": _by_rank(cut + gradient, rank, pp) * many * (pp > 1),
    }
    return {k: float(np.max(v)) for k, v in payload.items() if np.max(v) > 0}
