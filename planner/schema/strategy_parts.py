"""Parts of a strategy: mesh, precision, optimizer, overlap, communication, stages."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from planner.errors import StrategyError
from planner.schema import send_tables
from planner.schema.base import (
    MOST_DEVICES,
    Count,
    Document,
)
from planner.schema.methods.method import Recompute
from planner.schema.optimizers import OPTIMIZERS, OptimizerName
from planner.schema.send_tables import SendTable

__all__ = [
    "AXES",
    "Boundary",
    "Collective",
    "Communication",
    "ContextAlgorithm",
    "Degree",
    "Mesh",
    "Offload",
    "OffloadedStates",
    "Optimizer",
    "Overlap",
    "Precision",
    "ShardTraffic",
    "Stage",
    "SumAlgorithm",
    "TensorSharding",
    "matches_pattern",
]

#: Mesh axes, outermost first. ep is folded out of dp_shard x cp x tp, not in here:
#: the product of these degrees is the number of devices.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
#: How ranks that share a sequence attend to all of it: they trade the sequence for
#: heads, or keys and values travel around them. How ranks that share an image or a
#: volume convolve all of it: they send each other the edges of their shards.
ContextAlgorithm = Literal["all_to_all", "ring", "halo"]
Degree = Count


class Mesh(Document):
    """Degrees along the axes, in the order of :data:`AXES`, outermost first.

    Rank of the device at coordinates (pp, dp_replicate, dp_shard, cp, tp): row-major,
    tp fastest. ``ep`` devices that share experts are the innermost of dp_shard x cp x
    tp, and each holds its experts whole.
    """

    pp: Degree = 1
    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    cp: Degree = 1
    tp: Degree = 1
    ep: Degree = 1

    @model_validator(mode="after")
    def _devices_can_be_counted(self) -> Mesh:
        if self.num_devices > MOST_DEVICES:
            raise ValueError(
                f"pp x dp_replicate x dp_shard x cp x tp = {self.num_devices:,} "
                f"devices; at most {MOST_DEVICES:,} are planned for"
            )
        return self

    @property
    def num_devices(self) -> int:
        """Devices that the mesh covers: the product of all axes but ep."""
        return math.prod(self.degrees)

    @property
    def degrees(self) -> tuple[int, int, int, int, int]:
        """Degrees in the order of :data:`AXES`."""
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def shards(self) -> int:
        """Devices that ZeRO shards over, neighbours of equal weights: dp_shard x cp."""
        return self.dp_shard * self.cp

    @property
    def expert_shards(self) -> int:
        """Devices of dp_shard x cp x tp that hold the same experts."""
        return self.shards * self.tp // self.ep

    @property
    def data_parallel(self) -> int:
        """Ways in which the global batch is divided: dp_replicate x dp_shard."""
        return self.dp_replicate * self.dp_shard

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along an axis."""
        return math.prod(self.degrees[AXES.index(axis) + 1 :])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank along every axis."""
        place = {}
        for axis, degree in zip(reversed(AXES), reversed(self.degrees), strict=True):
            rank, place[axis] = divmod(rank, degree)
        return {axis: place[axis] for axis in AXES}


class Precision(Document):
    """Dtype of each kind of tensor.

    ``parameter`` is the dtype in which weights are kept and updated; ``compute`` what
    the matrix products see; ``reduce`` the dtype of gradient reductions.
    """

    parameter: Literal["float32", "bfloat16"] = "float32"
    compute: Literal["float32", "bfloat16", "float16", "float8"] = "bfloat16"
    reduce: Literal["float32", "bfloat16"] = "float32"

    @property
    def activation_dtype(self) -> str:
        """Dtype that activations are kept in; products in float8 keep bfloat16."""
        return "bfloat16" if self.compute == "float8" else self.compute


#: Share of what was that is kept in an average.
Factor = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Document):
    """The optimizer, for its memory and its arithmetic.

    Attributes:
        name: Of the class in ``torch.optim``.
        learning_rate: Before a schedule.
        momentum: Of those that take one.
        weight_decay: As torch applies it: decoupled for AdamW, else to the gradient.
            None if nobody gave it: nothing here, another launcher's own there.
        betas: Of Adam and its kin; None for torch's.
        state_dtype: Of what it keeps.
        ema: Share that a step keeps of an exponential moving average of the weights;
            None to keep no average.
    """

    name: OptimizerName = "AdamW"
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    betas: tuple[Factor, Factor] | None = None
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None

    @property
    def states_per_parameter(self) -> int:
        """State tensors of the size of a parameter, an average of the weights too."""
        more = bool(self.momentum) + (self.ema is not None)
        return OPTIMIZERS[self.name].states + more

    @property
    def used_weight_decay(self) -> float:
        """Weight decay; none where none is given."""
        return self.weight_decay or 0.0

    @property
    def used_betas(self) -> tuple[float, float] | None:
        """Both factors, torch's where none are given; None for one without any."""
        return self.betas or OPTIMIZERS[self.name].betas

    @model_validator(mode="after")
    def _has_no_effect(self) -> Self:
        kind = OPTIMIZERS[self.name]
        if self.momentum and not kind.momentum:
            raise ValueError(
                f"momentum={self.momentum} with optimizer {self.name}, which takes "
                f"none; leave it out or use {_those_with('momentum')}"
            )
        if self.betas is not None and kind.betas is None:
            raise ValueError(
                f"betas={self.betas} with optimizer {self.name}, which takes none; "
                f"leave them out or use {_those_with('betas')}"
            )
        return self


def _those_with(setting: str) -> str:
    return ", ".join(n for n, kind in OPTIMIZERS.items() if getattr(kind, setting))


#: Units gathered ahead.
Depth = Annotated[int, Field(ge=1, le=64)]


class Overlap(Document):
    """Distance by which communication runs ahead, and sizes of its pieces.

    None leaves a choice to torch.

    Attributes:
        forward_prefetch: Units whose weights ZeRO gathers ahead of the one that
            forward is in; torch issues a gather when the unit's own turn comes.
        backward_prefetch: The same in backward, for ZeRO 3; torch gathers 1 ahead.
        bucket_bytes: Gradient bytes that replicas (DDP) all-reduce at once; torch
            takes 1 MiB for the first bucket and 25 MiB for the others.
    """

    forward_prefetch: Depth | None = None
    backward_prefetch: Depth | None = None
    bucket_bytes: Annotated[int, Field(ge=1024, le=2**40)] | None = None


#: How tp ranks send what all of them hold to the next stage: each all of it, or each
#: its part, which the receivers put together.
Boundary = Literal["direct", "scattered"]
#: Order of the sums of buckets of gradients: as backward fills them; or those first
#: that the next forward needs first, which then begins without waiting for the others.
BucketOrder = Literal["filled", "needed"]
SumAlgorithm = Literal["library", "ring", "halving", "direct", "tree", "hierarchy"]
_Ranks = tuple[Annotated[int, Field(ge=0)], ...]


class Collective(Document):
    """Algorithm by which a group of ranks sums a tensor. Exact up to order of sums.

    Attributes:
        algorithm: ``library`` leaves it to NCCL or gloo. Others are messages of our
            own, see :mod:`planner.schema.send_tables`.
        order: Ranks of the group in the order of a ring, a halving or a tree; as they
            are if empty.
        parts: Part that each rank sums, of ``direct``; or each outermost domain, of
            ``hierarchy``. Equal, or for ``hierarchy`` a ring, if empty.
        domains: Domain of each rank, of ``hierarchy``, innermost level first.
        pieces: That ``tree``, ``direct`` and ``hierarchy`` send one after the other.
    """

    algorithm: SumAlgorithm = "library"
    order: _Ranks = ()
    parts: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    domains: tuple[_Ranks, ...] = ()
    pieces: Annotated[Count, Field(le=1024)] = 1

    def table(self, ranks: int) -> SendTable:
        """Return its messages.

        Args:
            ranks: Of the group.
        Raises:
            StrategyError: If the library chooses them, or order, parts or domains are
                for another number of ranks.
        """
        return _table(self, ranks)


@functools.lru_cache(maxsize=64)
def _table(collective: Collective, ranks: int) -> SendTable:
    """Messages of :meth:`Collective.table`, which are asked for many times."""
    order = collective.order or tuple(range(ranks))
    if len(order) != ranks:
        raise StrategyError(
            f"communication.replicas.order={order} for {ranks} replicas; name each "
            f"once, or leave it out"
        )
    if collective.algorithm == "direct":
        parts = collective.parts or (1 / ranks,) * ranks
        if len(parts) != ranks:
            raise StrategyError(
                f"communication.replicas.parts={parts} for {ranks} replicas; give "
                f"one for each, or leave them out"
            )
        return send_tables.direct(parts, collective.pieces)
    if collective.algorithm == "hierarchy":
        return send_tables.hierarchy(
            order, collective.domains, collective.parts, collective.pieces
        )
    if collective.algorithm == "tree":
        return send_tables.tree(order, collective.pieces)
    if collective.algorithm == "library":
        raise StrategyError("algorithm=library has no messages of our own")
    make = send_tables.ring if collective.algorithm == "ring" else send_tables.halving
    return make(order)


class ShardTraffic(Document):
    """Messages of ranks that ZeRO 3 shards over: DeepSpeed's ZeRO++.

    Source: Wang et al. 2023, arXiv:2306.10209.

    Attributes:
        second_copy: Neighbouring ranks that share a second copy of the weights, in the
            dtype of products. A step's first forward leaves it, and all gathers behind
            that are from it (hpZ); 1 for none. Exact.
        weight_bits: Bits of a weight that is gathered (qwZ), None for those of the
            dtype of products. Inexact.
        gradient_bits: Bits of a gradient that is reduced (qgZ), None for those of the
            dtype of reductions. Inexact.
    """

    second_copy: Degree = 1
    weight_bits: Literal[8] | None = None
    gradient_bits: Literal[4] | None = None

    def __str__(self) -> str:
        changed = self.model_dump(exclude_defaults=True).items()
        return ", ".join(f"{name}={value}" for name, value in changed)


class Communication(Document):
    """Ways in which messages travel.

    Attributes:
        boundary: Between pipeline stages: ``direct`` sends all that a tp rank holds;
            ``scattered`` sends the tp-th part of what all tp ranks hold alike, which
            those of the next stage gather. Exact.
        replicas: Sums of gradients over devices that hold the same weights: replicas of
            the model, or of a shard, a tp part or a stage of it.
        buckets: Order in which buckets of gradients are summed: ``filled``, as backward
            fills them; ``needed``, behind backward those of the first layers first: the
            weights of each are updated when its sum is there, and in the next forward
            a layer waits for its own alone. Exact.
        shards: Weights and gradients between ranks that ZeRO 3 shards over.
    """

    boundary: Boundary = "direct"
    replicas: Collective = Field(default_factory=Collective)
    buckets: BucketOrder = "filled"
    shards: ShardTraffic = Field(default_factory=ShardTraffic)


#: Tensors that live from step to step and lie in the host's memory: none, what the
#: optimizer keeps, or that and the weights and gradients.
OffloadedStates = Literal["none", "optimizer", "parameters"]


class Offload(Document):
    """Tensors that lie in the host's memory while nothing is computed with them. Exact.

    Attributes:
        states: ``optimizer``: what the optimizer keeps, and a copy of the weights. The
            host updates them by the gradients that it is sent, and sends new weights
            back. ``parameters``: weights and gradients as well; a device has those of
            the units it computes, which ZeRO gathers.
        activations: What the units of a stage begin their recomputation with.
    """

    states: OffloadedStates = "none"
    activations: bool = False

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Every value in the words of a pin, ``optimizer+activations``."""
        each = itertools.product(get_args(OffloadedStates), (False, True))
        return tuple(str(cls(states=s, activations=a)) for s, a in each)

    @classmethod
    def from_name(cls, name: str) -> Offload:
        """Return the value that a pin names, one of :meth:`names`."""
        parts = name.split("+")
        states = next((p for p in parts if p in ("optimizer", "parameters")), "none")
        return cls.model_validate(
            {"states": states, "activations": "activations" in parts}
        )

    def __str__(self) -> str:
        parts: list[str] = [self.states] if self.states != "none" else []
        parts += ["activations"] if self.activations else []
        return "+".join(parts) or "none"

    def __bool__(self) -> bool:
        return self.states != "none" or self.activations


Style = Literal["colwise", "rowwise", "vocab", "replicated", "region", "experts"]


class TensorSharding(Document):
    """Split of modules along tp and ep: patterns of module names to styles.

    Patterns follow Hugging Face: ``layers.*.mlp.down_proj``, where ``*`` is one
    component of the dotted name. Styles along tp: ``colwise`` (output features
    split), ``rowwise`` (input features split), ``vocab`` (rows of an embedding
    split), ``replicated`` (a parameter that computes with split features: whole on
    every rank, its gradient summed), ``region`` (a module around colwise layers all of
    whose inputs enter the split computation). Along ep: ``experts`` (each rank holds
    some of a module's experts).
    """

    patterns: dict[str, Style] = Field(default_factory=dict)
    sequence_parallel: bool = False
    loss_parallel: bool = False


def matches_pattern(pattern: str, fqn: str) -> bool:
    """True if a sharding pattern matches a module's name.

    ``*`` stands for one component; the pattern is matched against the end of the
    name, as Hugging Face's plans are relative to the base model.

    >>> matches_pattern("layers.*.mlp.up_proj", "model.layers.7.mlp.up_proj")
    True
    """
    want, have = pattern.split("."), fqn.split(".")
    if len(want) > len(have):
        return False
    pairs = zip(want, have[len(have) - len(want) :], strict=True)
    return all(w in ("*", h) for w, h in pairs)


class Stage(Document):
    """One virtual pipeline stage.

    Attributes:
        rank: pp coordinate of the devices that hold it.
        modules: FQNs of the blocks it computes, in order of execution.
        recompute: What its backward computes again instead of keeping.
    """

    rank: Annotated[int, Field(ge=0)]
    modules: tuple[str, ...]
    recompute: Recompute = "none"
