"""Pricing of what keeps the copies of a model together, one file a method.

Each file holds a :class:`ReplicaPricing`, made from the method's document: for the
rows of a table and for one strategy alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.plugins import load_object
from planner.schema import GradientCompression
from planner.schema.methods import method_of
from planner.schema.methods.method import Synchronisation
from planner.units import dtype_bytes

if TYPE_CHECKING:
    from planner.cost.context import PricingContext
    from planner.cost.traffic.collectives import ReplicaGroups

__all__ = [
    "ReplicaBytes",
    "ReplicaPricing",
    "ReplicaRows",
    "ReplicaTraffic",
    "expert_spread",
    "replica_pricing",
    "seconds_in_pieces",
    "weight_bytes",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


def _one() -> Index:
    return np.ones(1, dtype=np.int64)


def _nothing() -> Array:
    return np.zeros(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRows:
    """Inputs of the price of keeping copies alike, for n devices. Shapes [n].

    Attributes:
        scalars: Parameters on the device before ZeRO, after tp and ep.
        trained: Those of them that have a gradient.
        experts: Part of ``scalars`` that ep divides: fewer ranks hold copies of them.
        trained_experts: Part of ``trained`` that ep divides.
        ep: Expert parallel degree; likewise tp, over whose ranks it goes first.
        units: Groups of parameters that are gathered or reduced together.
        zero_stage: 0 to 3.
        shards: Ranks that ZeRO divides a copy over.
        copies: Ranks that hold the same shard.
        pp: Pipeline degree.
        num_microbatches: Per step.
        virtual_stages: Chunks of a rank.
        forward_s: Forward of one microbatch on this device.
        backward_s: Its backward.
        whole: True where there are several plain replicas.
        compression: What is done to gradients on their way, of plain replicas alone.
        bucket_bytes: Of gradients that are exchanged at once; None for torch's own.
        parts: Share of ``trained`` in each part that a device runs in turn; none where
            there are no parts, or only their number is known. Shape [n, parts].
        tensors: Trained tensors that ``trained`` are in.
        hooks_s: What hosts take for gathers and reductions of a microbatch, over all
            stages: in pipelines a host has those of its own, and runs an action for
            each microbatch, which takes it as long as the hooks of a unit (1 to 2.7 ms
            on 2 cores of an EPYC, hooks 1.9 ms) and is not priced by itself.
    """

    scalars: Array
    trained: Array
    units: Array
    zero_stage: Index
    pp: Index
    num_microbatches: Index
    virtual_stages: Index
    forward_s: Array
    backward_s: Array
    whole: NDArray[np.bool_]
    experts: Array = field(default_factory=_nothing)
    trained_experts: Array = field(default_factory=_nothing)
    ep: Index = field(default_factory=_one)
    tp: Index = field(default_factory=_one)
    shards: Index = field(default_factory=_one)
    copies: Index = field(default_factory=_one)
    compression: GradientCompression = "none"
    bucket_bytes: int | None = None
    parts: Array = field(default_factory=lambda: np.zeros((1, 0)))
    tensors: Array = field(default_factory=_nothing)
    hooks_s: Array = field(default_factory=_nothing)

    @property
    def compressed(self) -> NDArray[np.bool_]:
        """Mask of rows whose gradients are made smaller on their way. Shape [n]."""
        return self.whole & (self.compression != "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTraffic:
    """Seconds and bytes of one device per step; arrays of shape [n].

    Attributes:
        exposed_s: Seconds added to those of compute.
        gathered_bytes: Payload of all all-gathers of weights.
        scattered_bytes: Payload of all reduce-scatters of gradients.
        reduced_bytes: Payload of the all-reduce over replicas.
        exchanged_bytes: Payload of all-to-alls between them.
        messaged_bytes: Payload of messages from one replica to another.
        awaited_s: Seconds in which updates wait for sums inside the pipeline, no part
            of ``exposed_s``.
        sent_bytes: Bytes that leave the device for all of them.
    """

    exposed_s: Array
    gathered_bytes: Array
    scattered_bytes: Array
    reduced_bytes: Array
    sent_bytes: Array
    exchanged_bytes: Array = field(default_factory=_nothing)
    messaged_bytes: Array = field(default_factory=_nothing)
    awaited_s: Array = field(default_factory=_nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBytes:
    """Bytes that a method adds to those of a step without it. Shapes [n].

    Attributes:
        kept: Held from step to step.
        working: Held while copies exchange, when activations are gone.
        weights: Of weights, less where copies divide them.
        states: Of optimizer states, likewise.
        turns: Held in the backward of each stage that a device runs in turn, when those
            behind it have let go of their activations; none where there are no such
            stages. Shape [n, stages].
    """

    kept: Array
    working: Array
    weights: Array = field(default_factory=_nothing)
    states: Array = field(default_factory=_nothing)
    turns: Array = field(default_factory=lambda: np.zeros((1, 0)))

    def beside(self, activations: Array) -> Array:
        """Most of activations and what is held in their place, later on. Shape [n].

        Args:
            activations: Bytes when they are most, in equal parts of stages. Shape [n].
        """
        most = np.maximum(activations, self.working)
        count = self.turns.shape[-1]
        if count:
            left = np.arange(1, count + 1) / count
            later = activations[..., None] * left + self.turns
            most = np.maximum(most, later.max(axis=-1))
        return np.asarray(most)

    @property
    def total(self) -> Array:
        """Bytes that a step holds more when activations are there."""
        return self.kept + self.weights + self.states


class ReplicaPricing(Protocol):
    """Price of one method that keeps copies together."""

    def seconds(
        self, rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
    ) -> Array:
        """Seconds that a mean step is longer for it. Shape [n]."""
        found = self.traffic(rows, groups, context)
        return found.exposed_s + found.awaited_s

    def traffic(
        self, rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
    ) -> ReplicaTraffic:
        """The same seconds, and the bytes that move."""
        ...

    def held(self, rows: ReplicaRows, context: PricingContext) -> ReplicaBytes:
        """Bytes that devices hold for it."""
        ...


def replica_pricing(synchronisation: Synchronisation) -> ReplicaPricing:
    """Return the pricing of what keeps copies together."""
    found = load_object(method_of("synchronisation", synchronisation).prices)
    pricing: ReplicaPricing = found(synchronisation)
    return pricing


def seconds_in_pieces(lines: Array, size: Array) -> Array:
    """Seconds of an exchange in pieces by the faster of two algorithms. Shape [n].

    Args:
        lines: Seconds of a message, and of a byte, by algorithm. Shape [n, 2, 2].
        size: Bytes of all pieces. Shape [n].
    """
    pieces = np.ceil(size / Synchronisation.PIECE_BYTES)
    found = pieces[:, None] * lines[:, :, 0] + lines[:, :, 1] * size[:, None]
    return np.asarray(found.min(axis=1))


def expert_spread(ep: ArrayLike, tp: ArrayLike) -> Array:
    """Ranks of data parallelism over which experts are dealt out; 1 where they are not.

    As many of ep's ranks as tp has lie side by side and share a sequence: where tp has
    more, several of these hold the same experts, and it is less than 1.
    """
    ways = np.asarray(ep, dtype=np.float64)
    return np.where(ways > 1, ways / np.asarray(tp), 1.0)


def weight_bytes(rows: ReplicaRows, context: PricingContext) -> Array:
    """Bytes of the trained weights that a device keeps. Shape [n]."""
    few = np.maximum(rows.shards / expert_spread(rows.ep, rows.tp), 1.0)
    dense = (rows.trained - rows.trained_experts) / rows.shards
    size = dtype_bytes(context.precision.parameter)
    return np.asarray((dense + rows.trained_experts / few) * size)
