"""Codecs: gradients made smaller on their way between replicas, one class each.

Each is made from its document (:mod:`planner.schema.methods`), which tells the exact
bytes. All replicas decode the same messages in the same order, so that their means are
equal bit for bit. What is lost is the residual: what is sent and the residual make up
gradient and old residual. TopK's are entries moved, which is exact; the others'
residual is a difference, rounded to float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from executors.communication.buckets import Bucket
from planner.schema.methods.gradient_compression import (
    QSGD,
    PowerSGD,
    TopK,
)

__all__ = [
    "ALL_GATHER",
    "BucketCodec",
    "PowerSGDExchange",
    "QSGDExchange",
    "TopKExchange",
    "join",
    "pack",
    "split",
    "unpack",
]


#: Its name since torch 2.13, or the one before.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class BucketCodec:
    """Base of codecs: layout, state, and gathers."""

    block = 1

    def layout(self, ranks: int) -> tuple[int, int]:
        """See :class:`executors.communication.buckets.Exchange`; likewise all below."""
        return self.block, self.block

    def prepare(self, buckets: Sequence[Bucket], group: dist.ProcessGroup) -> None:
        """Keep the group, and what the codec keeps of each bucket."""
        self._group = group
        self._kept = {bucket.index: self.keep(bucket) for bucket in buckets}

    def keep(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Make what is kept of a bucket, by name."""
        return {}

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the same."""
        return optimizer

    def held(self) -> list[torch.Tensor]:
        """Return what is kept of all buckets."""
        return [tensor for kept in self._kept.values() for tensor in kept.values()]

    def state(self) -> dict[str, torch.Tensor]:
        """Return the live tensors of all buckets."""
        return {
            f"{index}.{name}": tensor
            for index, kept in self._kept.items()
            for name, tensor in kept.items()
            if tensor.numel()
        }

    def restored(self, state: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: live tensors were read into."""

    def gather(self, message: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin to gather equal messages of all ranks. Shape [ranks, *message]."""
        ranks = self._group.size()
        every = message.new_empty((ranks, *message.shape))
        flat = every.view(ranks * message.shape[0], *message.shape[1:])
        work = ALL_GATHER(flat, message, group=self._group, async_op=True)
        return every, work


# -- PowerSGD ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A parameter that is exchanged as factors; all are views. [m, n], [m, r], [n, r].

    The result's place is the gradient's.
    """

    gradient: torch.Tensor
    error: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor


class PowerSGDExchange(BucketCodec):
    """Averages of factors of low rank.

    M = gradient + error, P = orthonormal(mean(M Q)), Q = M^T P; error = M - P Q^T; the
    mean gradient is P mean(Q)^T. Source: Vogels et al. 2019, algorithm 1; the error is
    taken of the rank's own Q, whose mean over ranks is that of the averaged one.
    """

    def __init__(self, codec: PowerSGD) -> None:
        self.codec = codec
        self._matrices: dict[int, list[_Matrix]] = {}
        self._lefts: dict[int, torch.Tensor] = {}

    def keep(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Errors of matrices, and the second factor, from a seed of the bucket's."""
        every = [(v, self.codec.factors(tuple(v.shape))) for v in bucket.views]
        found = [(view, factors) for view, factors in every if factors]
        rest = sum(view.numel() for view, factors in every if not factors)
        flat = bucket.flat
        errors = flat.new_zeros(sum(m * n for _, (m, n, _) in found))
        rights = flat.new_empty(sum(n * r for _, (_, n, r) in found))
        lefts = flat.new_zeros(sum(m * r for _, (m, _, r) in found) + rest)
        generator = torch.Generator(device=flat.device).manual_seed(bucket.index)
        rights.normal_(generator=generator)
        at = [0, 0, 0]
        matrices = []
        for view, (m, n, r) in found:
            sizes = m * n, m * r, n * r
            parts = [
                whole[begin : begin + size]
                for whole, begin, size in zip(
                    (errors, lefts, rights), at, sizes, strict=True
                )
            ]
            at = [begin + size for begin, size in zip(at, sizes, strict=True)]
            matrices.append(
                _Matrix(
                    view.view(m, n),
                    parts[0].view(m, n),
                    parts[1].view(m, r),
                    parts[2].view(n, r),
                )
            )
        self._matrices[bucket.index] = matrices
        self._lefts[bucket.index] = lefts
        return {"error": errors, "right": rights}

    def held(self) -> list[torch.Tensor]:
        """Return messages, too, whose memory is kept."""
        return [*super().held(), *self._lefts.values()]

    def run(self, bucket: Bucket) -> Iterator[None]:
        """First factors with what is sent whole, then the second ones."""
        matrices, lefts = self._matrices[bucket.index], self._lefts[bucket.index]
        rights, ranks = self._kept[bucket.index]["right"], self._group.size()
        wholes = self._wholes(bucket)
        for one in matrices:
            one.gradient.add_(one.error)
            torch.mm(one.gradient, one.right, out=one.left)
        end = lefts.numel() - sum(view.numel() for view in wholes)
        for view in wholes:
            lefts[end : end + view.numel()].copy_(view.reshape(-1))
            end += view.numel()
        lefts.div_(ranks)
        work: Any = dist.all_reduce(lefts, group=self._group, async_op=True)
        yield
        work.wait()
        end = lefts.numel() - sum(view.numel() for view in wholes)
        for view in wholes:
            view.copy_(lefts[end : end + view.numel()].view_as(view))
            end += view.numel()
        for one in matrices:
            one.left.copy_(torch.linalg.qr(one.left).Q)
            torch.mm(one.gradient.t(), one.left, out=one.right)
            # The residual of this rank's own message.
            torch.addmm(one.gradient, one.left, one.right.t(), alpha=-1, out=one.error)
        if not matrices:
            return
        rights.div_(ranks)
        work = dist.all_reduce(rights, group=self._group, async_op=True)
        yield
        work.wait()
        for one in matrices:
            torch.mm(one.left, one.right.t(), out=one.gradient)

    def _wholes(self, bucket: Bucket) -> list[torch.Tensor]:
        """Gradients that are sent as they are."""
        return [
            view
            for view, parameter in zip(bucket.views, bucket.parameters, strict=True)
            if self.codec.factors(tuple(parameter.shape)) is None
        ]


# -- TopK ----------------------------------------------------------------------------


class TopKExchange(BucketCodec):
    """Largest entries of each parameter, with their indexes in the bucket."""

    def __init__(self, codec: TopK) -> None:
        self.codec = codec

    def keep(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """The residual."""
        return {"error": torch.zeros_like(bucket.flat)}

    def run(self, bucket: Bucket) -> Iterator[None]:
        """Gather values and indexes of all ranks, 8 bytes an entry."""
        flat, error = bucket.flat, self._kept[bucket.index]["error"]
        flat.add_(error)
        chosen = [
            view.reshape(-1)
            .abs()
            .topk(self.codec.chosen(view.numel()), sorted=False)
            .indices.add_(offset)
            for view, offset in zip(bucket.views, bucket.offsets, strict=True)
            if view.numel()
        ]
        indexes = torch.cat(chosen)
        values = flat[indexes]
        error.copy_(flat)
        error[indexes] = 0
        message = torch.stack((values.view(torch.int32), indexes.to(torch.int32)))
        every, work = self.gather(message)
        yield
        work.wait()
        flat.zero_()
        ranks = self._group.size()
        for part in every:
            # No index comes twice in one rank's message: the order of sums is fixed.
            sent = part[0].view(flat.dtype)
            flat.index_add_(0, part[1].long(), sent, alpha=1 / ranks)


# -- QSGD ----------------------------------------------------------------------------


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack small numbers into bytes.

    Args:
        codes: Of uint8, below 2 ** bits. Shape [..., n].
        bits: 1, 2, 4 or 8.

    Returns:
        Shape [..., n * bits / 8].
    """
    each = 8 // bits
    packed = codes[..., ::each].clone()
    for place in range(1, each):
        packed |= codes[..., place::each] << (bits * place)
    return packed


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo :func:`pack`. Shape [..., n]."""
    each, most = 8 // bits, 2**bits - 1
    parts = [(packed >> (bits * place)) & most for place in range(each)]
    return torch.stack(parts, dim=-1).flatten(-2)


def join(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Join packed codes and scales of blocks. Shape [blocks, bytes]."""
    return torch.cat((codes, scales.view(torch.uint8)), dim=-1)


def split(message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a message. Shapes [..., bytes - 4], [..., 1]."""
    return message[..., :-4], message[..., -4:].contiguous().view(torch.float32)


class QSGDExchange(BucketCodec):
    """Entries rounded at random to levels of the largest of their block."""

    def __init__(self, codec: QSGD) -> None:
        self.codec = codec
        self.block = codec.BLOCK
        self._draws: dict[int, int] = {}

    def run(self, bucket: Bucket) -> Iterator[None]:
        """Gather codes and scales of all ranks."""
        blocks = bucket.flat.view(-1, self.block)
        message = self.encode(blocks, self._noise(bucket))
        every, work = self.gather(message)
        yield
        work.wait()
        blocks.zero_()
        for part in every:
            blocks.add_(self.decode(part), alpha=1 / self._group.size())

    def encode(self, blocks: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Message of a bucket's blocks.

        Args:
            blocks: Shape [blocks, 512].
            noise: Uniform in [0, 1), of the same shape; it is written over.

        Returns:
            Shape [blocks, 64 bits + 4], of uint8.
        """
        levels = self.codec.levels
        scales = blocks.abs().amax(dim=1, keepdim=True)
        # A block of zeros has no scale; nan and inf stay what they are in it.
        steps = torch.where(scales > 0, scales / levels, torch.ones_like(scales))
        codes = noise.add_(blocks / steps).floor_().clamp_(-levels, levels)
        codes = torch.nan_to_num_(codes).add_(levels).to(torch.uint8)
        return join(pack(codes, self.codec.bits), scales)

    def decode(self, message: torch.Tensor) -> torch.Tensor:
        """Values of a message. Shape [blocks, 512]."""
        packed, scales = split(message)
        codes = unpack(packed, self.codec.bits).to(torch.float32)
        return codes.sub_(self.codec.levels).mul_(scales / self.codec.levels)

    def _noise(self, bucket: Bucket) -> torch.Tensor:
        """Uniform numbers, from a seed of the rank, the bucket and the step alone."""
        drawn = self._draws.get(bucket.index, 0)
        self._draws[bucket.index] = drawn + 1
        seed = (drawn * len(self._kept) + bucket.index) * self._group.size()
        generator = torch.Generator(device=bucket.flat.device)
        generator.manual_seed(seed + self._group.rank())
        noise = torch.empty_like(bucket.flat.view(-1, self.block))
        return noise.uniform_(generator=generator)

    def state(self) -> dict[str, torch.Tensor]:
        """Number of times that each bucket was rounded."""
        drawn = [self._draws.get(index, 0) for index in sorted(self._kept)]
        return {"draws": torch.tensor(drawn)}

    def restored(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with the random numbers that come next."""
        self._draws = dict(enumerate(state["draws"].tolist()))
