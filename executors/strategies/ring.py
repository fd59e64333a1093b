"""Ring attention: keys and values travel around the ranks that share a sequence.

Each rank keeps its queries; at every hop it attends to the keys and values that have
just arrived while the next are on their way. Partial results are put together by their
log-sum-exp. The backward goes round once more: a partial backward given the *final*
output and log-sum-exp yields exactly its share of the gradients (Liu et al. 2023; Dao
2023, section 3.1). Gradients of keys and values follow these, a hop behind, in their
dtype. Heads that several queries share travel once, and are repeated where they are
used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from planner.errors import ExecutionError

__all__ = ["ring_attention"]

#: Dimensions of what attention is given: [batch, heads, sequence, features].
_HEADS, _SEQUENCE = 1, 2


@dataclass(frozen=True, kw_only=True)
class _Flash:
    """The flash kernels of one device type: partial attention and its backward."""

    causal: bool
    scale: float

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
        """Output, log-sum-exp [batch, heads, queries], and what backward needs."""
        key, value = _repeated(query, key), _repeated(query, value)
        if query.device.type == "cpu":
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            output, lse = kernel(query, key, value, 0.0, self.causal, scale=self.scale)
            return output, lse, ()
        if query.dtype not in (torch.bfloat16, torch.float16):
            raise ExecutionError(
                f"ring attention on {query.device.type} computes in bfloat16, not "
                f"{query.dtype}; plan with precision.compute=bfloat16, or use the "
                f"all-to-all"
            )
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        output, lse, *rest = kernel(
            query, key, value, 0.0, self.causal, scale=self.scale
        )
        # cumulative lengths (2), longest (2), seed and offset of dropout
        return output, lse, tuple(rest[:6])

    def backward(
        self,
        grad: torch.Tensor,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        lse: torch.Tensor,
        rest: tuple[Any, ...],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Shares of the gradients of query, key and value."""
        query, key, value = inputs
        inputs = (query, _repeated(query, key), _repeated(query, value))
        if grad.device.type == "cpu":
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            shares = kernel(
                grad, *inputs, output, lse, 0.0, self.causal, scale=self.scale
            )
        else:
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
            lengths, (seed, offset) = rest[:4], rest[4:6]
            shares = kernel(
                grad,
                *inputs,
                output,
                lse,
                *lengths,
                0.0,
                self.causal,
                seed,
                offset,
                scale=self.scale,
            )
        return shares[0], _summed(shares[1], key), _summed(shares[2], value)


def _repeated(query: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Keys or values with as many heads as queries have."""
    times = query.shape[_HEADS] // shared.shape[_HEADS]
    return shared.repeat_interleave(times, dim=_HEADS) if times > 1 else shared


def _summed(share: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Gradient of keys or values, from those of their repeated heads."""
    heads = shared.shape[_HEADS]
    if share.shape[_HEADS] == heads:
        return share
    batch, _, length, features = share.shape
    return share.reshape(batch, heads, -1, length, features).sum(_HEADS + 1)


class _Transfer:
    """Transfer of tensors around the ring, one hop at a time."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        size, rank = group.size(), group.rank()
        after = dist.get_global_rank(group, (rank + 1) % size)
        before = dist.get_global_rank(group, (rank - 1) % size)
        self.sent = [tensor.contiguous() for tensor in tensors]
        self.arrived = [torch.empty_like(tensor) for tensor in self.sent]
        pairs = zip(self.sent, self.arrived, strict=True)
        self._works = dist.batch_isend_irecv(
            [
                operation
                for out, into in pairs
                for operation in (
                    dist.P2POp(dist.isend, out, after, group),
                    dist.P2POp(dist.irecv, into, before, group),
                )
            ]
        )

    def wait(self) -> list[torch.Tensor]:
        for work in self._works:
            work.wait()
        return self.arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hop:
    """Work of one hop: slices of queries and of keys, under a mask or not."""

    queries: slice
    keys: slice
    masked: bool


def _hop(causal: bool, rank: int, origin: int, length: int) -> _Hop:
    """Slices of this rank's queries and of the keys of rank ``origin`` that meet.

    Ranks hold chunks r and 2n-1-r of the sequence. All its queries see the first
    chunk of an earlier rank; its second chunk alone sees both chunks of a later one.
    """
    everything, half = slice(None), length // 2
    if not causal or origin == rank:
        return _Hop(queries=everything, keys=everything, masked=causal)
    if origin < rank:
        return _Hop(queries=everything, keys=slice(0, half), masked=False)
    return _Hop(queries=slice(half, None), keys=everything, masked=False)


def _part(tensor: torch.Tensor, which: slice) -> torch.Tensor:
    return tensor[:, :, which]


def _merge(
    output: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Put a partial result of any dtype into the running one in float32, in place."""
    total = torch.logaddexp(lse, part_lse)
    output.mul_((lse - total).exp().unsqueeze(-1))
    output.addcmul_(part, (part_lse - total).exp().unsqueeze(-1))
    lse.copy_(total)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: dist.ProcessGroup,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        size, rank, length = group.size(), group.rank(), query.shape[_SEQUENCE]
        output = torch.zeros_like(query, dtype=torch.float32)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
        held, rests = [key, value], []
        for hop in range(size):
            transfer = _Transfer(held, group) if hop < size - 1 else None
            plan = _hop(causal, rank, (rank - hop) % size, length)
            flash = _Flash(causal=plan.masked, scale=scale)
            part, part_lse, rest = flash.forward(
                _part(query, plan.queries),
                _part(held[0], plan.keys),
                _part(held[1], plan.keys),
            )
            rests.append(rest)
            _merge(
                _part(output, plan.queries),
                _part(lse, plan.queries),
                part,
                part_lse.float(),
            )
            held = transfer.wait() if transfer is not None else held
        result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.group, ctx.causal, ctx.scale, ctx.rests = group, causal, scale, rests
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, output, lse = ctx.saved_tensors
        size, rank, length = ctx.group.size(), ctx.group.rank(), query.shape[2]
        grad = grads[0].contiguous()
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        held, home = [key, value], _zeros(key, value)
        behind: _Transfer | None = None
        for hop in range(size):
            transfer = _Transfer(held, ctx.group) if hop < size - 1 else None
            plan = _hop(ctx.causal, rank, (rank - hop) % size, length)
            flash = _Flash(causal=plan.masked, scale=ctx.scale)
            shares = flash.backward(
                _part(grad, plan.queries),
                (
                    _part(query, plan.queries),
                    _part(held[0], plan.keys),
                    _part(held[1], plan.keys),
                ),
                _part(output, plan.queries),
                _part(lse, plan.queries).contiguous(),
                ctx.rests[hop],
            )
            _part(grad_query, plan.queries).add_(shares[0])
            # Those of a rank's own keys wait at home for what the others add.
            sums = _zeros(*held) if hop else home
            for into, share in zip(sums, shares[1:], strict=True):
                _part(into, plan.keys).add_(share)
            if hop:
                behind = _pass_on(sums, behind, key.dtype, ctx.group)
            held = transfer.wait() if transfer is not None else held
        _add(home, behind)
        return (
            grad_query.to(query.dtype),
            home[0].to(key.dtype),
            home[1].to(value.dtype),
            None,
            None,
            None,
        )


def _zeros(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor, dtype=torch.float32) for tensor in tensors]


def _add(sums: list[torch.Tensor], arriving: _Transfer | None) -> None:
    """Add what arrives, if anything does, in place."""
    if arriving is not None:
        for into, share in zip(sums, arriving.wait(), strict=True):
            into.add_(share)


def _pass_on(
    sums: list[torch.Tensor],
    arriving: _Transfer | None,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> _Transfer:
    """Send gradients after the keys that they are of, with what had come by then."""
    _add(sums, arriving)
    return _Transfer([tensor.to(dtype) for tensor in sums], group)


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    causal: bool,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention over a sequence that the ranks of a group share.

    Args:
        query: This rank's tokens, in the order of
            :func:`executors.strategies.context.local_positions`. Shape [batch,
            heads, local sequence, features].
        key: Likewise; its heads divide those of the queries.
        value: Likewise; its features may be others.
        group: Ranks that share the sequence.
        causal: Whether a token sees earlier ones alone.
        scale: Of the scores; 1 / sqrt(features) if None.

    Returns:
        Attention of this rank's tokens. Shape [batch, heads, local sequence,
        features of value].

    Raises:
        ExecutionError: If the device has no flash kernel for the dtype.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    width = value.shape[-1]
    # The flash kernels take one number of features; zeros change no score.
    most = max(width, query.shape[-1])
    parts = [nn.functional.pad(t, (0, most - t.shape[-1])) for t in (query, key, value)]
    result: torch.Tensor = _Ring.apply(  # type: ignore[no-untyped-call]
        *parts, group, causal, scale
    )
    return result[..., :width]
