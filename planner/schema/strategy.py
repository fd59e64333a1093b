"""One point of the strategy space: who computes what, and how copies agree."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from planner.errors import StrategyError
from planner.schema import send_tables
from planner.schema.base import (
    MOST_DEVICES,
    Count,
    Document,
    leaf_defaults,
    leaf_of,
)
from planner.schema.methods import (
    Asynchrony,
    GradientCompression,
    Learning,
    Synchronisation,
    default_value,
    slots,
)
from planner.schema.methods.method import Recompute
from planner.schema.optimizers import OPTIMIZERS, OptimizerName
from planner.schema.schedules import Schedule, ScheduleSpec, schedule_spec
from planner.schema.send_tables import SendTable

__all__ = [
    "AXES",
    "MOST_STAGES",
    "PINNABLE",
    "Boundary",
    "Collective",
    "Communication",
    "ContextAlgorithm",
    "Mesh",
    "Offload",
    "OffloadedStates",
    "Optimizer",
    "Overlap",
    "Precision",
    "Recompute",
    "Stage",
    "Strategy",
    "SumAlgorithm",
    "TensorSharding",
    "matches_pattern",
    "plain_replicas",
]

#: Mesh axes, outermost first. ep is folded out of dp_shard x cp x tp, not in here:
#: the product of these degrees is the number of devices.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


#: How ranks that share a sequence attend to all of it: they trade the sequence for
#: heads, or keys and values travel around them. How ranks that share an image or a
#: volume convolve all of it: they send each other the edges of their shards.
ContextAlgorithm = Literal["all_to_all", "ring", "halo"]
Degree = Count
#: Parts that the tokens of a microbatch are divided into for their loss.
LossChunks = Annotated[int, Field(ge=1, le=4096)]
#: Most stages; most of their turns in a step, one a microbatch.
MOST_STAGES, _MOST_TURNS = 2**13, 2**21
#: Most samples in a step.
_MOST_SAMPLES = 2**40


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
#: Buckets of gradients that are full: as backward fills them, or those first that the
#: next forward needs first.
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


class Communication(Document):
    """Ways in which messages travel.

    Attributes:
        boundary: Between pipeline stages: ``direct`` sends all that a tp rank holds;
            ``scattered`` sends the tp-th part of what all tp ranks hold alike, which
            those of the next stage gather. Exact.
        replicas: Sums of gradients over devices that hold the same weights: replicas of
            the model, or of a shard, a tp part or a stage of it.
        buckets: Order in which buckets of gradients that wait are summed: ``filled``,
            as backward has filled them; ``needed``, those of the first layers first,
            which the next forward needs first. Exact.
    """

    boundary: Boundary = "direct"
    replicas: Collective = Field(default_factory=Collective)
    buckets: BucketOrder = "filled"


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


def _count_devices(ranges: tuple[tuple[int, int], ...]) -> int:
    """Devices in half-open ranges.

    Raises:
        ValueError: If a range is empty or two overlap.
    """
    end = 0
    for start, stop in sorted(ranges):
        if not 0 <= start < stop:
            raise ValueError(
                f"device range [{start}, {stop}) is not 0 <= start < stop; the end is "
                f"not part of a range"
            )
        if start < end:
            raise ValueError(
                f"device {start} is in two device_ranges; each device has one rank"
            )
        end = stop
    return sum(stop - start for start, stop in ranges)


def plain_replicas(pp: Any, tp: Any, zero_stage: Any, shards: Any) -> Any:
    """True if each device holds the whole model; numbers, or columns of a table.

    Args:
        pp: Degree.
        tp: Degree.
        zero_stage: ZeRO's stage.
        shards: Devices that ZeRO would shard over, dp_shard x cp.
    """
    return (pp * tp == 1) & ((zero_stage == 0) | (shards == 1))


class Strategy(Document):
    """Way in which one model is trained on one set of devices.

    Attributes:
        mesh: Degrees along each axis.
        zero_stage: What dp_shard x cp splits, cp alone where dp_shard is 1: 0 nothing
            (plain replicas), 1 optimizer states, 2 and gradients, 3 and parameters.
        schedule: Order of the pipeline's work; GPipe when pp is 1.
        virtual_stages: Stages held by each pp rank.
        microbatch_size: Samples per microbatch on each data-parallel rank.
        num_microbatches: Microbatches per step; without a pipeline these are steps
            of gradient accumulation.
        stages: In order of execution; stage i is held by ``stages[i].rank``.
        sharding: What tp and ep do to which module.
        context_algorithm: How attention sees a sequence that cp divides; ``halo`` where
            it divides images or volumes.
        spatial: Shards along each spatial dimension of a sample, from the first on,
            whose product is cp; empty unless ``context_algorithm`` is ``halo``.
        synchronisation: How copies along dp_replicate are kept together.
        asynchrony: When the stages of a pipeline update their weights.
        learning: Rule by which a batch becomes new weights.
        gradient_compression: Done to gradients on their way between plain replicas.
        overlap: What communication runs ahead of, and in which pieces.
        communication: Ways in which messages travel.
        compile: Whether ``torch.compile`` fuses the ops of each block.
        loss_chunks: Parts of a microbatch's tokens whose logits are there at once. With
            several the last layer computes the loss of one after another, and their
            logits once more in backward; exact.
        offload: Tensors that lie in the host's memory.
        device_ranges: Device ids by rank, as half-open ranges [start, stop);
            rank 0 is the first id of the first range.
        semantics: ``exact`` if a step computes what plain training would; methods
            that change it want ``approximate``, the owner's consent.
    """

    KIND: ClassVar[str] = "strategy"

    mesh: Mesh = Mesh()
    zero_stage: Literal[0, 1, 2, 3] = 0
    schedule: Schedule = "GPipe"
    virtual_stages: Degree = 1
    microbatch_size: Degree = 1
    num_microbatches: Degree = 1
    stages: tuple[Stage, ...] = ()
    sharding: TensorSharding = TensorSharding()
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    context_algorithm: ContextAlgorithm = "all_to_all"
    spatial: Annotated[tuple[Degree, ...], Field(max_length=3)] = ()
    synchronisation: Synchronisation = default_value("synchronisation")
    asynchrony: Asynchrony = default_value("asynchrony")
    learning: Learning = default_value("learning")
    gradient_compression: GradientCompression = "none"
    grad_clip_norm: Annotated[float, Field(gt=0)] | None = None
    overlap: Overlap = Overlap()
    communication: Communication = Communication()
    compile: bool = False
    loss_chunks: LossChunks = 1
    offload: Offload = Offload()
    device_ranges: tuple[tuple[int, int], ...] = ()
    semantics: Literal["exact", "approximate"] = "exact"

    @model_validator(mode="after")
    def _work_can_be_listed(self) -> Strategy:
        stages = self.mesh.pp * self.virtual_stages
        if stages > MOST_STAGES:
            raise ValueError(
                f"pp={self.mesh.pp} x virtual_stages={self.virtual_stages} = "
                f"{stages:,} stages; use at most {MOST_STAGES:,}"
            )
        turns = stages * self.num_microbatches
        if turns > _MOST_TURNS:
            raise ValueError(
                f"{stages:,} stages x num_microbatches={self.num_microbatches:,} = "
                f"{turns:,} turns of a stage in a step; use at most {_MOST_TURNS:,}"
            )
        if self.global_batch > _MOST_SAMPLES:
            raise ValueError(
                f"microbatch_size x num_microbatches x data parallel = "
                f"{self.global_batch:,} samples a step; use at most {_MOST_SAMPLES:,}"
            )
        return self

    @model_validator(mode="after")
    def _shards_fit_the_mesh(self) -> Strategy:
        halo = self.context_algorithm == "halo"
        if self.spatial and not halo:
            raise ValueError(
                f"spatial={self.spatial} with context_algorithm="
                f"{self.context_algorithm}; shards of samples need halo, use it or "
                f"leave spatial out"
            )
        if halo and math.prod(self.spatial) != self.mesh.cp:
            raise ValueError(
                f"spatial={self.spatial} makes {math.prod(self.spatial)} shards of a "
                f"sample over cp={self.mesh.cp} ranks; use as many, such as "
                f"spatial=({self.mesh.cp},)"
            )
        return self

    @model_validator(mode="after")
    def _stages_fit_the_mesh(self) -> Strategy:
        expected = self.mesh.pp * self.virtual_stages
        if self.stages and len(self.stages) != expected:
            raise ValueError(
                f"{len(self.stages)} stages, but pp={self.mesh.pp} x "
                f"virtual_stages={self.virtual_stages} needs {expected}"
            )
        ranks = self.stage_ranks if self.stages else ()
        for index, (stage, want) in enumerate(zip(self.stages, ranks, strict=True)):
            if stage.rank != want:
                raise ValueError(
                    f"stage {index} is on pp rank {stage.rank}; schedule "
                    f"{self.schedule} with pp={self.mesh.pp} puts it on rank {want}"
                )
        if self.device_ranges:
            count = _count_devices(self.device_ranges)
            if count != self.mesh.num_devices:
                raise ValueError(
                    f"device_ranges name {count} devices, the mesh has "
                    f"{self.mesh.num_devices}"
                )
        return self

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step."""
        return self.microbatch_size * self.num_microbatches * self.mesh.data_parallel

    @property
    def schedule_spec(self) -> ScheduleSpec:
        """Record of its schedule."""
        return schedule_spec(self.schedule)

    @property
    def has_plain_replicas(self) -> bool:
        """True if each device holds the whole model, so that all copies are alike."""
        mesh = self.mesh
        return bool(plain_replicas(mesh.pp, mesh.tp, self.zero_stage, mesh.shards))

    @property
    def replicas_by_ddp(self) -> bool:
        """True if ``DistributedDataParallel`` would hold the replicas, if any."""
        precision = self.precision
        single = precision.parameter == precision.compute == precision.reduce
        return self.has_plain_replicas and single and not self.synchronisation.apart

    @property
    def may_use_own_buckets(self) -> bool:
        """True if buckets of our own can hold the replicas' gradients.

        Weights and gradients are float32, whatever is computed in.
        """
        precision = self.precision
        full = precision.parameter == precision.reduce == "float32"
        return self.has_plain_replicas and full and not self.synchronisation.apart

    @property
    def copies(self) -> int:
        """Devices that hold the same shard of the same stage, whose gradients it sums.

        Without ZeRO the ranks that share a sequence are such copies, too.
        """
        return self.mesh.dp_replicate * (1 if self.zero_stage else self.mesh.cp)

    @property
    def may_sum_by_table(self) -> bool:
        """True if messages of our own can sum the gradients of copies.

        Those are plain replicas, or hold a shard or a stage of the model each, and
        agree in every step. Weights and gradients are float32, whatever is computed in.
        """
        precision, fields = self.precision, type(self).model_fields
        full = precision.parameter == precision.reduce == "float32"
        plain = all(
            getattr(self, name) == fields[name].get_default(call_default_factory=True)
            for name in ("synchronisation", "asynchrony", "learning")
        )
        return self.copies > 1 and full and (plain or self.may_use_own_buckets)

    @property
    def replicas_by_table(self) -> bool:
        """True if messages of our own sum the replicas' gradients."""
        return self.communication.replicas.algorithm != "library"

    @property
    def shards_by_table(self) -> bool:
        """True if they sum gradients that ``fully_shard`` has reduced to shards."""
        return (
            self.replicas_by_table
            and self.may_sum_by_table
            and not self.may_use_own_buckets
        )

    @property
    def uses_own_buckets(self) -> bool:
        """True if buckets of our own do, for a codec or a send table."""
        coded = not isinstance(self.gradient_compression, str)
        return self.may_use_own_buckets and (coded or self.replicas_by_table)

    @property
    def divides_logits(self) -> bool:
        """True if each tp rank takes the loss of its classes alone.

        A loss in chunks is always computed so where tp divides the last layer.
        """
        if self.sharding.loss_parallel or self.loss_chunks == 1 or not self.stages:
            return self.sharding.loss_parallel
        head = self.stages[-1].modules[-1]
        styles = self.sharding.patterns.items()
        split = any(s == "colwise" and matches_pattern(p, head) for p, s in styles)
        return split and self.mesh.tp > 1

    @property
    def phases(self) -> Mapping[str, float]:
        """Kinds of step by its methods, of which one at most has several."""
        kinds = (self.synchronisation.phases, self.learning.phases)
        return max(kinds, key=len)

    def rank_of_stage(self, index: int) -> int:
        """Rank along pp that holds virtual stage ``index``."""
        return self.schedule_spec.rank_of_stage(index, self.mesh.pp)

    @property
    def run_stages(self) -> tuple[Stage, ...]:
        """Stages as they are run: a whole model in parts, where these take turns.

        Parts have about equally many modules.

        Raises:
            StrategyError: If there are fewer modules than parts.
        """
        count = self.synchronisation.parts(self.mesh.dp_replicate)
        if count == 1 or len(self.stages) != 1:
            return self.stages
        (whole,) = self.stages
        if len(whole.modules) < count:
            raise StrategyError(
                f"synchronisation={self.synchronisation} with dp_replicate="
                f"{self.mesh.dp_replicate} cuts {len(whole.modules)} modules into "
                f"{count} parts; use dp_replicate={len(whole.modules)} at most"
            )
        bounds = [round(len(whole.modules) * part / count) for part in range(count + 1)]
        return tuple(
            whole.model_copy(update={"modules": whole.modules[start:stop]})
            for start, stop in itertools.pairwise(bounds)
        )

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Rank along pp that holds each virtual stage, in order of execution."""
        spec, pp = self.schedule_spec, self.mesh.pp
        return tuple(spec.rank_of_stage(i, pp) for i in range(pp * self.virtual_stages))

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Virtual stages that a pp rank holds, in order of execution."""
        return tuple(i for i, holder in enumerate(self.stage_ranks) if holder == rank)

    def device_ids(self) -> tuple[int, ...]:
        """Device id of every rank; ranks themselves where no ranges are given."""
        if not self.device_ranges:
            return tuple(range(self.mesh.num_devices))
        return tuple(
            i for start, stop in self.device_ranges for i in range(start, stop)
        )

    @property
    def identity(self) -> str:
        """Hash of its canonical bytes: what makes two strategies the same."""
        return hashlib.sha256(self.canonical_bytes()).hexdigest()

    def label(self) -> str:
        """Short name for display: ``pp4 dp_shard8 tp8 zero3 1F1B mb1x16 full``.

        Every field that differs from its default shows, but for what belongs to one
        model or cluster: the cut, the patterns of modules, and devices in order.
        """
        parts = [
            f"{axis}{degree}"
            for axis, degree in zip(AXES, self.mesh.degrees, strict=True)
            if degree > 1
        ]
        if self.mesh.ep > 1:
            parts.append(f"ep{self.mesh.ep}")
        if self.zero_stage or self.mesh.dp_shard > 1:
            parts.append(f"zero{self.zero_stage}")
        if self.mesh.pp > 1 or self.schedule != "GPipe" or self.virtual_stages > 1:
            virtual = f"/v{self.virtual_stages}" if self.virtual_stages > 1 else ""
            parts.append(self.schedule + virtual)
        parts.append(f"mb{self.microbatch_size}x{self.num_microbatches}")
        kinds = sorted({stage.recompute for stage in self.stages})
        if kinds and kinds != ["none"]:
            parts.append("+".join(kinds))
        for name, default in _labelled().items():
            value = leaf_of(self, name)
            if value != default:
                parts.append(_TOKENS.get(name, f"{name}={{}}").format(value))
        if self.device_ranges and self.device_ids() != tuple(
            range(self.mesh.num_devices)
        ):
            shown = ",".join(
                f"{start}-{stop - 1}" for start, stop in self.device_ranges
            )
            parts.append(f"devices {shown}")
        return " ".join(parts)


#: Fields that a label tells in words of its own, or not at all.
_TOLD_APART = frozenset(
    {
        *(f"mesh.{name}" for name in Mesh.model_fields),
        *("zero_stage", "schedule", "virtual_stages"),
        *("microbatch_size", "num_microbatches"),
        *("stages", "sharding.patterns", "device_ranges"),
        *(f"communication.replicas.{name}" for name in ("order", "parts", "domains")),
        "communication.replicas.pieces",
    }
)
#: Tokens of other fields; ``name=value`` for what is not in here.
_TOKENS = {
    "sharding.sequence_parallel": "sp",
    "sharding.loss_parallel": "loss_parallel",
    "precision.parameter": "{}_weights",
    "precision.compute": "{}",
    "precision.reduce": "{}_reduce",
    "optimizer.name": "{}",
    "optimizer.learning_rate": "lr{:g}",
    "optimizer.momentum": "momentum{:g}",
    "optimizer.weight_decay": "weight_decay{:g}",
    "optimizer.state_dtype": "{}_states",
    "optimizer.ema": "ema{:g}",
    "context_algorithm": "{}",
    "spatial": "spatial{}",
    "synchronisation": "{}",
    "asynchrony": "{}",
    "learning": "{}",
    "gradient_compression": "{}",
    "grad_clip_norm": "clip{:g}",
    "overlap.forward_prefetch": "forward_prefetch{}",
    "overlap.backward_prefetch": "backward_prefetch{}",
    "overlap.bucket_bytes": "bucket{}",
    "communication.boundary": "{}_boundary",
    "communication.replicas.algorithm": "{}_sums",
    "communication.buckets": "{}_buckets",
    "compile": "compiled",
    "loss_chunks": "loss_chunks{}",
    "offload.states": "{}_on_host",
    "offload.activations": "activations_on_host",
    "semantics": "{}",
}


@functools.cache
def _labelled() -> dict[str, Any]:
    """Defaults of the fields that a label tells by tokens."""
    leaves = leaf_defaults(Strategy)
    return {name: leaves[name] for name in leaves if name not in _TOLD_APART}


#: Fields of a strategy, its mesh, sharding and stages that a request may fix.
PINNABLE = (
    *Mesh.model_fields,
    "zero_stage",
    "schedule",
    "virtual_stages",
    "microbatch_size",
    "num_microbatches",
    "recompute",
    "sequence_parallel",
    *slots(),
    "boundary",
    "replicas",
    "buckets",
    "compile",
    "loss_chunks",
    "offload",
    "semantics",
)
