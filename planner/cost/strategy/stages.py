"""The virtual stages of one strategy as columns, each worked out once.

Every stage that reads a tied weight trains a copy of its own; after the last backward
the ranks that hold one sum the gradients up, one all-reduce a weight, and nothing hides
that. Copies on one rank are summed without sending. A weight that three ranks hold is
priced as two sums of two, which is no less than one of three.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import PricingContext
from planner.cost.kernels.roofline import copy_seconds, optimizer_seconds
from planner.cost.offload import (
    OffloadRows,
    moving_seconds,
    update_on_host_seconds,
)
from planner.cost.optimizer_states import matrix_seconds, state_shares
from planner.cost.replicas import ReplicaRows, expert_spread
from planner.cost.table.memory import RULES, chunks_in_flight
from planner.cost.traffic.collectives import TP_KINDS, ReplicaGroups
from planner.cost.units import UnitCosts
from planner.errors import StrategyError
from planner.schema import Strategy
from planner.simulate import ActionTable, actions, schedule_columns
from planner.space.table import RECOMPUTE_NAMES

__all__ = ["ParameterShards", "StageTimes", "Stages", "TiedTraffic"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One microbatch on every virtual stage, communication included. Shapes [stages].

    Attributes:
        forward: Seconds of the forward.
        backward: Seconds of the whole backward, recomputation included.
        input_half: Part of ``backward`` that makes input gradients, where the schedule
            splits it; ``weight_half`` is the rest. Stage 0 sends no gradient: torch
            leaves all of its backward to the second half. Source:
            torch.distributed.pipelining.stage, backward_weight_one_chunk, torch 2.13.
        weight: Part of ``backward`` that makes weight gradients.
        again: Part of ``backward`` that is recomputation.
        tensor: Part of both that is exposed tp communication; likewise context,
            expert.
        forward_talk: Exposed communication in ``forward``.
        backward_talk: The same in ``backward``.
        send: One boundary's transfer in one direction. Shape [stages - 1].
        latency: Part of it that does not hold the link. Shape [stages - 1].
        hooks: Added by the host's work for gathers and reductions, where it has them.
    """

    forward: Array
    backward: Array
    input_half: Array
    weight_half: Array
    weight: Array
    again: Array
    tensor: Array
    context: Array
    expert: Array
    forward_talk: Array
    backward_talk: Array
    send: Array
    latency: Array
    hooks: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShards:
    """Scalars on one device of each pp rank, copies of tied weights too. Shapes [pp].

    Attributes:
        whole: Scalars of its stages, after tp and ep.
        shard: What ZeRO leaves of them.
        trained: Part of ``whole`` that has a gradient.
        trained_shard: Part of ``shard`` that has a gradient.
        experts: Part of ``whole`` that ep divides; likewise trained_experts, of
            ``trained``.
    """

    whole: Array
    shard: Array
    trained: Array
    trained_shard: Array
    experts: Array
    trained_experts: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedTraffic:
    """Sums of tied weights' gradients on one device of each pp rank. Shapes [pp].

    Attributes:
        exposed_s: Seconds of the sums that the rank takes part in.
        reduced_bytes: Their payload.
    """

    exposed_s: Array
    reduced_bytes: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Stages:
    """Stages of one strategy; its columns are found when first asked for.

    Attributes:
        context: What the strategy is priced in.
        strategy: With stages that list all units of the model in order.
        costs: Units under its one combination (C = 1).
    """

    context: PricingContext
    strategy: Strategy
    costs: UnitCosts

    @cached_property
    def bounds(self) -> Index:
        """Unit at which each stage starts, then the number of units. [stages + 1].

        Raises:
            StrategyError: If the stages are not the model's units in order.
        """
        names, stages = self.context.graph.unit_names, self.strategy.stages
        listed = [name for stage in stages for name in stage.modules]
        if tuple(listed) != names:
            missing = [name for name in names if name not in set(listed)]
            extra = [name for name in listed if name not in set(names)]
            detail = (
                (f"missing {missing[0]!r}" if missing else f"unknown {extra[0]!r}")
                if missing or extra
                else "the order differs"
            )
            raise StrategyError(
                f"stages do not list the model's {len(names)} units in order: "
                f"{detail}; units are {names[0]!r} … {names[-1]!r}"
            )
        sizes = [len(stage.modules) for stage in stages]
        return np.cumsum([0, *sizes]).astype(np.int64)

    @cached_property
    def rank(self) -> Index:
        """Pp rank of each stage. Shape [stages]."""
        return np.array([stage.rank for stage in self.strategy.stages])

    @property
    def pp(self) -> int:
        """Pipeline degree."""
        return self.strategy.mesh.pp

    @cached_property
    def recompute(self) -> Index:
        """Index into :data:`RECOMPUTE_NAMES` of each stage. Shape [stages]."""
        kinds = [stage.recompute for stage in self.strategy.stages]
        return np.array([RECOMPUTE_NAMES.index(kind) for kind in kinds])

    @property
    def ways(self) -> int:
        """Devices that share one copy of the weights."""
        mesh = self.strategy.mesh
        return mesh.shards if self.strategy.zero_stage else 1

    @property
    def _experts_left(self) -> float:
        """Share of a device's experts that ZeRO leaves on it."""
        mesh = self.strategy.mesh
        spread = float(expert_spread(mesh.ep, mesh.tp))
        return spread / max(self.ways, spread)

    @cached_property
    def order(self) -> ActionTable | None:
        """Order of the schedule's actions; None without a pipeline."""
        if self.pp == 1:
            return None
        strategy = self.strategy
        return actions(
            strategy.schedule,
            self.pp,
            strategy.virtual_stages,
            strategy.num_microbatches,
        )

    def sums(self, units: Array) -> Array:
        """Sum units [..., U] within stages. Shape [..., stages]."""
        return np.asarray(np.add.reduceat(units, self.bounds[:-1], axis=-1))

    def of_ranks(self, values: Array) -> Array:
        """Sum stages [stages] within pp ranks. Shape [pp]."""
        sums = np.bincount(self.rank, weights=values, minlength=self.pp)
        return np.asarray(sums, dtype=np.float64)

    @cached_property
    def tie_ends(self) -> tuple[Index, Index]:
        """Stages on which the two ends of each tied link lie. Shapes [links]."""
        ties = self.costs.ties
        first, second = (
            np.searchsorted(self.bounds, units, side="right") - 1
            for units in (ties.first, ties.second)
        )
        return first, second

    @cached_property
    def parameters(self) -> ParameterShards:
        """Scalars of weights on each pp rank."""
        costs, ways = self.costs, self.ways
        left = self._experts_left
        units = (
            costs.dense_parameters[0],
            costs.expert_parameters[0],
            costs.trained_dense[0],
            costs.trained_experts[0],
        )
        sums = self.sums(np.stack(units))
        first, second = self.tie_ends
        apart = first != second
        for row, copies in ((0, costs.tied_parameters), (2, costs.tied_trained)):
            np.add.at(sums[row], second[apart], copies[0, apart])
        dense, expert, trained, trained_experts = map(self.of_ranks, sums)
        return ParameterShards(
            whole=dense + expert,
            shard=dense / ways + expert * left,
            trained=trained + trained_experts,
            trained_shard=trained / ways + trained_experts * left,
            experts=expert,
            trained_experts=trained_experts,
        )

    @cached_property
    def tied(self) -> TiedTraffic:
        """Sums of tied weights' gradients."""
        trained, size = self.costs.tied_trained[0], self.context.scalar_bytes.stored
        first, second = (self.rank[stage] for stage in self.tie_ends)
        apart = (first != second) & (trained > 0)
        payload, sums = np.zeros((2, self.pp))
        for ends in (first[apart], second[apart]):
            np.add.at(payload, ends, trained[apart] * (size / self.ways))
            np.add.at(sums, ends, 1.0)
        seconds = np.zeros(self.pp)
        if sums.any():
            fixed, per_byte = self.context.pair_line(self.pp)
            seconds = fixed * sums + per_byte * payload
        return TiedTraffic(exposed_s=seconds, reduced_bytes=payload)

    @cached_property
    def tensors(self) -> Array:
        """Trained parameter tensors on each pp rank. Shape [pp]."""
        return self.of_ranks(self.sums(self.costs.tensors))

    @cached_property
    def working_bytes(self) -> Array:
        """Working set of the largest unit of each rank of a pipeline. Shape [pp]."""
        units = self.costs.transient_bytes[:, 0]
        of_stages = np.maximum.reduceat(units, self.bounds[:-1], axis=-1)
        found = np.zeros(self.pp)
        at = np.arange(len(self.rank))
        np.maximum.at(found, self.rank, of_stages[self.recompute, at])
        return found

    @cached_property
    def update_s(self) -> Array:
        """Seconds of one update of each pp rank's weights, at full speed. Shape [pp].

        Older versions that are kept are copies of all trained weights.
        """
        strategy, pp, context = self.strategy, self.pp, self.context
        types, devices = context.types_of_ranks(pp), context.cluster.device_types
        older = [strategy.asynchrony.older_versions(rank, pp) for rank in range(pp)]
        weights = self.parameters.trained_shard * context.scalar_bytes.stored
        copied = copy_seconds(weights * (np.array(older) > 0), types, devices)
        clip = strategy.grad_clip_norm is not None
        offload, moving = context.regime.offload, np.zeros(pp)
        if offload:
            moving = moving_seconds(self.offloaded, context)
        if offload.states != "none" and context.on_gpu:
            trained = self.parameters.trained_shard
            return moving + update_on_host_seconds(trained, context, clip=clip)
        update = optimizer_seconds(
            self.parameters.trained_shard,
            self.tensors,
            types,
            devices,
            context.optimizer,
            clip=clip,
        )
        products = matrix_seconds(
            self.parameters.trained * strategy.mesh.tp, types, context
        )
        return np.asarray(update + copied + moving + products)

    @cached_property
    def state_share(self) -> Array:
        """Bytes of optimizer states over what the model's mean would give. [pp]."""
        context, costs = self.context, self.costs
        trained = costs.trained_dense[0] + costs.trained_experts[0]
        shares = state_shares(context.optimizer, context.graph)
        both = self.sums(np.stack([trained * shares, trained]))
        found, plain = (self.of_ranks(each) for each in both)
        return np.divide(found, plain, out=np.ones_like(found), where=plain > 0)

    @cached_property
    def offloaded(self) -> OffloadRows:
        """Bytes that lie in the host's memory, by pp rank."""
        strategy, costs = self.strategy, self.costs
        index = np.arange(len(self.rank))
        saved = self.sums(costs.offloaded_bytes[:, 0])[self.recompute, index]
        flying = [
            chunks_in_flight(
                schedule_columns(*RULES),
                strategy.schedule_spec.code,
                self.pp,
                strategy.virtual_stages,
                strategy.num_microbatches,
                rank,
            )
            / strategy.virtual_stages
            for rank in range(self.pp)
        ]
        return OffloadRows(
            shards=self.parameters.shard,
            trained=self.parameters.trained_shard,
            saved_bytes=self.of_ranks(saved),
            in_flight=np.array(flying),
            zero_stage=np.full(self.pp, strategy.zero_stage),
            num_microbatches=np.full(self.pp, strategy.num_microbatches),
            forward_s=self.of_ranks(self.times.forward),
            backward_s=self.of_ranks(self.times.backward),
        )

    @cached_property
    def core_contention(self) -> tuple[float, float]:
        """Slowdown by shared cores, see :meth:`PricingContext.core_contention`."""
        return self.context.core_contention(self.pp)

    @cached_property
    def replicas(self) -> tuple[ReplicaRows, ReplicaGroups]:
        """Inputs of the price of keeping copies alike, and its groups, by pp rank."""
        strategy, mesh, pp = self.strategy, self.strategy.mesh, self.pp
        crowd, _ = self.core_contention
        copies = mesh.dp_replicate * (1 if strategy.zero_stage else mesh.cp)

        def full(value: int) -> Index:
            return np.full(pp, value, dtype=np.int64)

        rows = ReplicaRows(
            scalars=self.parameters.whole,
            trained=self.parameters.trained,
            experts=self.parameters.experts,
            trained_experts=self.parameters.trained_experts,
            ep=full(mesh.ep),
            tp=full(mesh.tp),
            units=self.of_ranks(np.diff(self.bounds).astype(float)),
            zero_stage=full(strategy.zero_stage),
            shards=full(self.ways),
            copies=full(copies),
            pp=full(pp),
            num_microbatches=full(strategy.num_microbatches),
            virtual_stages=full(strategy.virtual_stages),
            forward_s=self.of_ranks(self.times.forward) * crowd,
            backward_s=self.of_ranks(self.times.backward) * crowd,
            whole=np.full(pp, strategy.has_plain_replicas and copies > 1),
            compression=strategy.gradient_compression,
            bucket_bytes=strategy.overlap.bucket_bytes,
            parts=self._parts,
            tensors=self.tensors,
            hooks_s=full(1) * self.times.hooks.sum() * crowd,
        )
        return rows, self.context.replicas(pp, self.ways, copies, mesh.tp)

    @property
    def _parts(self) -> Array:
        """Share of trained scalars in parts that run in turn. Shape [pp, parts]."""
        sizes = [len(stage.modules) for stage in self.strategy.run_stages]
        if len(sizes) == len(self.rank):
            return np.zeros((self.pp, 0))
        units = self.costs.trained_dense[0] + self.costs.trained_experts[0]
        sums = np.add.reduceat(units, np.cumsum([0, *sizes[:-1]]))
        return np.asarray(sums[None] / max(sums.sum(), 1.0))

    @cached_property
    def times(self) -> StageTimes:
        """Seconds of every stage for one microbatch, at full speed."""
        costs, rank = self.costs, self.rank
        kernels = np.stack(
            [
                costs.forward_s[:, 0],
                costs.backward_s[:, 0],
                costs.weight_s[:, 0],
                costs.selective_s[:, 0],
                costs.full_s[:, 0],
                costs.hooks_s[:, 0],
            ]
        )
        kind = self.context.types_of_ranks(self.pp)[rank]
        typed = self.sums(kernels)[:, kind, np.arange(len(rank))]
        forward, backward, weight, selective, whole, hooks = typed
        again = np.choose(self.recompute, [np.zeros(len(rank)), selective, whole])
        talk = [costs.tp_s[0], costs.cp_s[0], costs.ep_s[0], costs.tp_again_s[0]]
        tp, cp, ep, tp_repeated = self.sums(np.stack(talk))
        cp_forward = cp * costs.cp_forward
        full = self.recompute == 2
        tp_again = np.where(self.recompute > 0, tp_repeated, 0.0)
        entering, leaving = self._around(self.crossing(costs.gather_s))
        forward_talk = tp + ep + cp_forward + entering
        repeated = tp_again + np.where(full, ep + cp_forward, 0.0)
        backward_talk = tp + ep + (cp - cp_forward) + repeated + leaving
        backward = backward + again + backward_talk
        input_half, weight_half = backward - weight, weight.copy()
        if self.strategy.schedule_spec.splits_backward:
            input_half[0], weight_half[0] = 0.0, backward[0]
        send, latency = self._transfers
        return StageTimes(
            forward=forward + forward_talk,
            backward=backward,
            input_half=input_half,
            weight_half=weight_half,
            weight=weight,
            again=again,
            tensor=2 * tp + tp_again + entering + leaving,
            context=cp + np.where(full, cp_forward, 0.0),
            expert=ep * np.where(full, 3.0, 2.0),
            forward_talk=forward_talk,
            backward_talk=backward_talk,
            send=send,
            latency=latency,
            hooks=hooks,
        )

    @cached_property
    def _transfers(self) -> tuple[Array, Array]:
        """Seconds of a transfer over each boundary, and its latency. [stages - 1]."""
        if self.pp == 1:
            send, latency = np.zeros((2, max(len(self.rank) - 1, 0)))
            return send, latency
        bandwidth, wait = self.context.boundaries(self.pp)
        before, after = self.rank[:-1], self.rank[1:]
        wraps = before - after == self.pp - 1
        edge = np.where(wraps, self.pp - 1, np.minimum(before, after))
        seconds = wait[edge] + self.at_cuts(self.costs.sent_bytes) / bandwidth[edge]
        return (
            np.where(before == after, 0.0, seconds),
            np.where(before == after, 0.0, wait[edge]),
        )

    def at_cuts(self, values: Array) -> Array:
        """Values [1, U - 1] at the cuts between stages. Shape [stages - 1]."""
        return np.asarray(values[0, self.bounds[1:-1] - 1])

    def crossing(self, values: Array) -> Array:
        """Values [1, U - 1] at the cuts between stages, 0 within a rank.

        The two stages at the fold of a V lie on one rank: nothing is sent.
        """
        return np.where(self.rank[1:] == self.rank[:-1], 0.0, self.at_cuts(values))

    @staticmethod
    def _around(cuts: Array) -> tuple[Array, Array]:
        """Values at the cuts before and behind each stage. Shapes [stages]."""
        return np.concatenate([[0.0], cuts]), np.concatenate([cuts, [0.0]])

    @cached_property
    def sent_bytes(self) -> Array:
        """Activations and gradients that each pp rank sends for a microbatch. [pp]."""
        before, behind = self._around(self.crossing(self.costs.sent_bytes))
        return self.of_ranks(before + behind)

    @cached_property
    def gathered_bytes(self) -> Array:
        """Bytes that tp ranks of each pp rank gather for a microbatch. Shape [pp]."""
        before, behind = self._around(self.crossing(self.costs.gathered_bytes))
        return self.of_ranks(before + behind)

    @cached_property
    def axis_bytes(self) -> dict[str, Array]:
        """Bytes that each pp rank sends along axes inside layers, a step. [pp]."""
        costs, many = self.costs, self.strategy.num_microbatches
        units = {"cp": costs.cp_bytes, "tp": costs.tp_bytes, "ep": costs.ep_bytes}
        found = {
            axis: self.of_ranks(self.sums(sent[0])) * many
            for axis, sent in units.items()
        }
        tp = self.strategy.mesh.tp
        found["tp"] = found["tp"] + self.gathered_bytes * many * (tp - 1) / tp
        return found

    @cached_property
    def payload_bytes(self) -> dict[str, Array]:
        """Payload of the collectives inside layers by kind of call, a step. [pp]."""
        costs, many = self.costs, self.strategy.num_microbatches
        anything, everything = self.recompute > 0, self.recompute == 2
        # What every step has, and what recomputing repeats.
        every, repeated = self.sums(costs.tp_payload[:, :, 0]).swapaxes(0, 1)
        tensor = {
            kind: (self.of_ranks(own) + self.of_ranks(more * anything)) * many
            for kind, own, more in zip(TP_KINDS, every, repeated, strict=True)
        }
        tensor["all_gather"] = tensor["all_gather"] + self.gathered_bytes * many
        summed, experts = map(self.of_ranks, self.sums(costs.summed_parameters[:, 0]))
        halo = self.strategy.context_algorithm == "halo"
        gathered = costs.cp_payload[0] * halo
        exchanged = self.sums(2 * costs.ep_payload[0] + costs.cp_payload[0] - gathered)
        # Selective recomputation keeps attention, and not what it was sent.
        light = self.context.recipe.selective == "light"
        resent = anything if light else everything
        size = self.context.scalar_bytes.stored
        shards = summed / self.ways + experts * self._experts_left
        passed = np.zeros(len(self.rank))
        if self.strategy.context_algorithm == "ring":
            passed = self.sums(costs.cp_bytes[0])
            passed = passed * (1.0 + resent * costs.cp_forward)
        elif halo:
            cp = self.strategy.mesh.cp
            sent = costs.cp_bytes[0] - 2 * gathered * (cp - 1) / cp
            # Every recomputation exchanges halos anew.
            passed = self.sums(sent) * (1.0 + anything * costs.cp_forward)
            whole = many * self.of_ranks(self.sums(gathered))
            tensor["all_gather"] = tensor["all_gather"] + whole
            tensor["reduce_scatter"] = tensor["reduce_scatter"] + whole
        return {
            **tensor,
            "all_reduce": tensor["all_reduce"] + shards * size,
            "all_to_all": many * self.of_ranks(exchanged * (2.0 + resent)),
            "send": many * self.of_ranks(passed),
        }
