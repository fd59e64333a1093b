"""One point of the strategy space: who computes what, and how copies agree."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from planner.errors import StrategyError
from planner.schema.base import (
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
from planner.schema.schedules import Schedule, ScheduleSpec, schedule_spec
from planner.schema.strategy_parts import (
    AXES,
    Communication,
    ContextAlgorithm,
    Degree,
    Mesh,
    Offload,
    Optimizer,
    Overlap,
    Precision,
    Stage,
    TensorSharding,
    matches_pattern,
)

__all__ = [
    "MOST_STAGES",
    "PINNABLE",
    "Recompute",
    "Strategy",
    "plain_replicas",
]

#: Parts that the tokens of a microbatch are divided into for their loss.
LossChunks = Annotated[int, Field(ge=1, le=4096)]
#: Most stages; most of their turns in a step, one a microbatch.
MOST_STAGES, _MOST_TURNS = 2**13, 2**21
#: Most samples in a step.
_MOST_SAMPLES = 2**40


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
    "communication.shards.second_copy": "second_copy{}",
    "communication.shards.weight_bits": "weights_in_{}bits",
    "communication.shards.gradient_bits": "gradients_in_{}bits",
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
