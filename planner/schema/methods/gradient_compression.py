"""Gradients made smaller on their way between plain replicas.

Casts are hooks of DistributedDataParallel. Codecs are documents with settings; they run
in buckets of Meshwright's own. Each tells the exact bytes that it exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from planner.schema.methods.method import Feature, Method, MethodDocument, Violation

if TYPE_CHECKING:
    from planner.schema.violations import Case

__all__ = [
    "METHODS",
    "QSGD",
    "Codec",
    "OneBitAdam",
    "PowerSGD",
    "TopK",
    "WireBytes",
]

Shape = tuple[int, ...]
#: Shapes of the parameters of each bucket.
Buckets = Sequence[Sequence[Shape]]

#: Bytes of a gradient, of a scale and of an index on the wire.
_SCALAR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WireBytes:
    """Payload of a step's collectives on one rank, each counted at its larger side.

    Attributes:
        reduced: All-reduces.
        gathered: All-gathers: what is received from all ranks.
        exchanged: All-to-alls.
    """

    reduced: int = 0
    gathered: int = 0
    exchanged: int = 0

    def sent(self, ranks: int) -> float:
        """Bytes that leave a rank by rings of as many."""
        others = (ranks - 1) / ranks
        return others * (2 * self.reduced + self.gathered + self.exchanged)


class Codec(MethodDocument):
    """Base of what makes gradients smaller, and makes up for it later or not at all."""

    #: Scalars that share a scale; parameters begin at multiples of it in a bucket.
    BLOCK: ClassVar[int] = 1
    #: Reads and writes of every gradient to encode, decode and keep the error.
    PASSES: ClassVar[float] = 1.0
    #: Tensors as large as a bucket that are made for a while.
    TEMPORARY: ClassVar[float] = 1.0
    #: Collectives of a bucket.
    CALLS: ClassVar[int] = 1

    def wire(self, buckets: Buckets, ranks: int) -> WireBytes:
        """Bytes of one step.

        Args:
            buckets: Shapes of trained parameters, as they are exchanged.
            ranks: Replicas.
        """
        raise NotImplementedError(f"gradient_compression {self.kind} tells no bytes")

    def kept_bytes(self, buckets: Buckets, ranks: int) -> int:
        """Bytes that a rank holds from step to step; arguments of :meth:`wire`."""
        return 0

    def product_flops(self, shapes: Sequence[Shape]) -> float:
        """FLOPs of the matrix products of a step."""
        return 0.0


def _scalars(buckets: Buckets) -> int:
    return sum(math.prod(shape) for bucket in buckets for shape in bucket)


def _blocks(bucket: Sequence[Shape], size: int) -> int:
    return sum(-(-math.prod(shape) // size) for shape in bucket)


class PowerSGD(Codec):
    """Matrices are exchanged as two factors of low rank.

    M + error is approximated by P Q^T: P = M Q, averaged and made orthonormal, then
    Q = M^T P, averaged. The next step starts from this Q. Parameters whose factors are
    not less than half as large are exchanged whole.

    Attributes:
        rank: Columns of the factors.
    """

    # Error added (3), two products that read, one that writes and reads, decoding (2).
    PASSES: ClassVar[float] = 9.0
    TEMPORARY: ClassVar[float] = 0.0
    CALLS: ClassVar[int] = 2
    #: A matrix is sent whole unless its factors are smaller by more than this.
    GAIN: ClassVar[int] = 2

    kind: Literal["powersgd"] = "powersgd"
    rank: Annotated[int, Field(ge=1, le=1024)] = 4

    def factors(self, shape: Shape) -> tuple[int, int, int] | None:
        """Rows, columns and rank of a parameter's factors; None if sent whole."""
        if len(shape) < 2 or not math.prod(shape):
            return None
        rows, columns = shape[0], math.prod(shape[1:])
        rank = min(rows, columns, self.rank)
        if (rows + columns) * rank * self.GAIN >= rows * columns:
            return None
        return rows, columns, rank

    def wire(self, buckets: Buckets, ranks: int) -> WireBytes:
        """Factors, and what is sent whole: all-reduced."""
        scalars = 0
        for shape in (shape for bucket in buckets for shape in bucket):
            found = self.factors(shape)
            if found is None:
                scalars += math.prod(shape)
            else:
                rows, columns, rank = found
                scalars += (rows + columns) * rank
        return WireBytes(reduced=scalars * _SCALAR)

    def kept_bytes(self, buckets: Buckets, ranks: int) -> int:
        """Errors of matrices, and the messages, which the next step starts from."""
        every = (self.factors(shape) for bucket in buckets for shape in bucket)
        found = (one for one in every if one is not None)
        errors = sum(_SCALAR * rows * columns for rows, columns, _ in found)
        return errors + self.wire(buckets, ranks).reduced

    def product_flops(self, shapes: Sequence[Shape]) -> float:
        """P, the two of Q and of the error, and the result: four products."""
        found = (one for one in map(self.factors, shapes) if one is not None)
        return float(sum(8 * rows * columns * rank for rows, columns, rank in found))


class TopK(Codec):
    """The largest entries of every parameter's gradient are exchanged alone.

    What is not sent is added to the next gradient. Every rank chooses its own, so that
    each entry takes its index along, and all ranks gather what all have chosen.

    Attributes:
        share: Of a parameter's entries that are sent; at least one.
    """

    # Error added (3), magnitudes (2), selection (about 4), result cleared (1).
    PASSES: ClassVar[float] = 10.0

    kind: Literal["topk"] = "topk"
    share: Annotated[float, Field(gt=0, le=1)] = 0.01

    def chosen(self, scalars: int) -> int:
        """Entries that are sent of a parameter of so many."""
        return min(scalars, max(1, math.ceil(self.share * scalars)))

    def wire(self, buckets: Buckets, ranks: int) -> WireBytes:
        """A value and a 32-bit index an entry, gathered from every rank."""
        every = (math.prod(shape) for bucket in buckets for shape in bucket)
        chosen = sum(map(self.chosen, every))
        return WireBytes(gathered=ranks * chosen * 2 * _SCALAR)

    def kept_bytes(self, buckets: Buckets, ranks: int) -> int:
        """The error."""
        return _scalars(buckets) * _SCALAR


class QSGD(Codec):
    """Entries are rounded at random to a few levels of their block's largest.

    The rounding is right in the mean, so that no error is kept. Blocks are of 512
    entries.

    Attributes:
        bits: Bits an entry, one of them its sign.
    """

    BLOCK: ClassVar[int] = 512
    # Largest (1), scaling and noise (6), packing (2).
    PASSES: ClassVar[float] = 9.0
    TEMPORARY: ClassVar[float] = 2.0

    kind: Literal["qsgd"] = "qsgd"
    bits: Literal[2, 4, 8] = 8

    @property
    def levels(self) -> int:
        """Levels above zero."""
        return int(2 ** (self.bits - 1)) - 1

    def wire(self, buckets: Buckets, ranks: int) -> WireBytes:
        """Codes and a scale a block, gathered from every rank."""
        block = self.BLOCK * self.bits // 8 + _SCALAR
        blocks = sum(_blocks(bucket, self.BLOCK) for bucket in buckets)
        return WireBytes(gathered=ranks * blocks * block)


class OneBitAdam(Codec):
    """Signs of Adam's momentum are exchanged, its variance is frozen.

    The first steps are Adam's with whole gradients. Then the variance stays as it is,
    and each rank sends the signs of its momentum, and a scale for each block of 512:
    first to the rank that averages that part of a bucket, then from there to all. Both
    keep what was lost for the next step.

    Variance is a mean of as many squared gradients as there were steps, with a relative
    error of sqrt(2 / steps): 14 % after 100, the least that is taken. The paper freezes
    it when its sum grows by less than 4 % in 1 / (1 - beta2) = 1000 steps, the default;
    warm-up of the learning rate should be over by then.

    Attributes:
        warm_up_steps: Steps of Adam with whole gradients.
    """

    BLOCK: ClassVar[int] = 512
    # Momentum (4), error added and kept (6), signs (2), result (3).
    PASSES: ClassVar[float] = 15.0
    TEMPORARY: ClassVar[float] = 1.5
    CALLS: ClassVar[int] = 2

    kind: Literal["onebit_adam"] = "onebit_adam"
    warm_up_steps: Annotated[int, Field(ge=100, le=10**9)] = 1000

    def part_blocks(self, bucket: Sequence[Shape], ranks: int) -> int:
        """Blocks of a bucket that each rank averages."""
        return -(-_blocks(bucket, self.BLOCK) // ranks)

    def wire(self, buckets: Buckets, ranks: int) -> WireBytes:
        """Signs and scales, exchanged, then gathered; after the warm-up."""
        block = self.BLOCK // 8 + _SCALAR
        blocks = sum(ranks * self.part_blocks(bucket, ranks) for bucket in buckets)
        return WireBytes(exchanged=blocks * block, gathered=blocks * block)

    def kept_bytes(self, buckets: Buckets, ranks: int) -> int:
        """Errors of the own signs, and of the averaged part."""
        parts = sum(self.part_blocks(bucket, ranks) for bucket in buckets)
        return (ranks + 1) * parts * self.BLOCK * _SCALAR


def _replicas_by_ddp(case: Case) -> str | None:
    strategy = case.strategy
    if strategy.replicas_by_ddp:
        return None
    return (
        f"gradient_compression={strategy.gradient_compression} with "
        f"{strategy.label()}; it is for plain replicas in one precision (pp=1, tp=1, "
        f"no ZeRO), use none, or precision.reduce=bfloat16"
    )


def _plain_replicas(case: Case) -> str | None:
    strategy = case.strategy
    if strategy.has_plain_replicas and not strategy.synchronisation.apart:
        return None
    return (
        f"gradient_compression={strategy.gradient_compression} with "
        f"{strategy.label()}; codecs are for plain replicas (pp=1, tp=1, no ZeRO), use "
        f"none, or precision.reduce=bfloat16"
    )


def _full_precision(case: Case) -> str | None:
    strategy, precision = case.strategy, case.strategy.precision
    if _plain_replicas(case) or precision.parameter == precision.reduce == "float32":
        return None
    return (
        f"gradient_compression={strategy.gradient_compression} with "
        f"precision.parameter={precision.parameter} and reduce={precision.reduce}; "
        f"codecs take float32 gradients of float32 weights, use float32 for both, "
        f"with any compute"
    )


def _adam(case: Case) -> str | None:
    strategy = case.strategy
    if strategy.optimizer.name in ("Adam", "AdamW"):
        return None
    return (
        f"gradient_compression={strategy.gradient_compression} with "
        f"optimizer={strategy.optimizer.name}; it sends the momentum of Adam, use Adam "
        f"or AdamW, or gradient_compression=topk"
    )


def _unclipped(case: Case) -> str | None:
    limit = case.strategy.grad_clip_norm
    if limit is None:
        return None
    return (
        f"gradient_compression={case.strategy.gradient_compression} with "
        f"grad_clip_norm={limit}; what is exchanged is momentum, whose rounding would "
        f"be clipped, leave it out"
    )


_INEXACT = "it changes gradients"
_PAGE = "methods/gradient-compression.md"
_TEST = "tests/distributed/test_compression.py"


def _cast(
    kind: str, tolerance: tuple[float, float, float] | None = None, *, changes: bool
) -> Method:
    feature = None
    if tolerance is not None:
        feature = Feature(
            name=kind,
            mesh={"dp_replicate": 2},
            fields={"gradient_compression": kind, "semantics": "approximate"},
            kind="compression",
            tolerance=tolerance,
        )
    return Method(
        kind=kind,
        slot="gradient_compression",
        default=not changes,
        words="gradients compressed by {kind}" if changes else "",
        inexact=_INEXACT if changes else None,
        violations=(_replicas_by_ddp,) if changes else (),
        feature=feature,
        prices="planner.cost.replicas.all_reduce:AllReducePricing",
        runs="executors.strategies.compression:compress_gradients",
        page=_PAGE,
        test=_TEST,
        source="torch.distributed.algorithms.ddp_comm_hooks, torch 2.13",
    )


def _codec(
    document: type[Codec],
    source: str,
    *,
    limits: tuple[Violation, ...] = (),
    violations: tuple[Violation, ...] = (),
    feature: Feature | None = None,
    unverified: str | None = None,
    module: str = "codecs",
) -> Method:
    return Method(
        kind=document.model_fields["kind"].default,
        slot="gradient_compression",
        document=document,
        words="gradients compressed by {kind}",
        inexact=_INEXACT,
        limits=limits,
        violations=(_plain_replicas, _full_precision, *violations),
        feature=feature,
        prices="planner.cost.replicas.codecs:size_up",
        runs=f"executors.communication.{module}:{document.__name__}Exchange",
        unverified=unverified,
        page=_PAGE,
        test="tests/distributed/test_codecs.py",
        source=source,
    )


METHODS = (
    _cast("none", changes=False),
    # The composition table has float16 for both casts.
    _cast("bfloat16", changes=True),
    _cast("float16", (1e-3, 5e-3, 5e-3), changes=True),
    # It has this one for all codecs.
    _codec(
        PowerSGD,
        "Vogels et al. 2019, arXiv 1905.13727",
        feature=Feature(
            name="powersgd",
            mesh={"dp_replicate": 2},
            fields={"gradient_compression": PowerSGD(), "semantics": "approximate"},
            kind="compression",
            tolerance=(2e-2, float("inf"), float("inf")),
        ),
    ),
    _codec(TopK, "Lin et al. 2018, arXiv 1712.01887; Stich et al. 2018, 1809.07599"),
    _codec(QSGD, "Alistarh et al. 2017, arXiv 1610.02132"),
    _codec(
        OneBitAdam,
        "Tang et al. 2021, arXiv 2102.02888",
        limits=(_adam,),
        violations=(_unclipped,),
        unverified="its first steps exchange whole gradients",
        module="one_bit",
    ),
)
