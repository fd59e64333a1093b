"""Halos: the edges of neighbouring shards of a sample, for convolutions to read.

Samples of shape [batch, channels, d1, d2, ...] are cut into equal shards along their
spatial dimensions. Shards are exchanged dimension after dimension, so that corners come
along; the transpose adds gradients up.

Source: Dryden et al. 2019; Oyama et al. 2020, arXiv 2007.12856.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from planner.errors import ExecutionError
from planner.schema.halo import Window, place_of

__all__ = [
    "FIRST_SPATIAL",
    "ShardGrid",
    "exchange_halo",
    "halo_conv",
    "halos_and_padding",
    "local_region",
]

#: First spatial dimension of [batch, channels, d1, ...].
FIRST_SPATIAL = 2
_ATEN = torch.ops.aten

#: Values of the shards before and behind, along each divided dimension.
Halos = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGrid:
    """Ranks that share samples, as a grid of shards; row-major, the last dim fastest.

    Attributes:
        group: The ranks.
        factors: Shards along each spatial dimension, from the first on; later
            dimensions are whole.
    """

    group: dist.ProcessGroup
    factors: tuple[int, ...]

    @property
    def place(self) -> tuple[int, ...]:
        """Coordinates of this rank's shard."""
        return place_of(self.group.rank(), self.factors)

    def neighbour(self, axis: int, step: int) -> int | None:
        """Global rank of the shard so far along an axis; None past the border."""
        there = self.place[axis] + step
        if not 0 <= there < self.factors[axis]:
            return None
        stride = 1
        for factor in self.factors[axis + 1 :]:
            stride *= factor
        return dist.get_global_rank(self.group, self.group.rank() + step * stride)


def local_region(
    sizes: Sequence[int], index: int, factors: Sequence[int]
) -> tuple[slice, ...]:
    """Part of a sample that one rank has, along each spatial dimension.

    Args:
        sizes: Spatial sizes of the whole sample.
        index: Place of the rank along cp.
        factors: Shards along each spatial dimension, from the first on.

    Raises:
        ExecutionError: If a dimension cannot be divided so.
    """
    place = place_of(index, factors)
    if len(factors) > len(sizes):
        raise ExecutionError(
            f"spatial={tuple(factors)} divides {len(factors)} dimensions, the sample "
            f"has {len(sizes)}; name at most that many"
        )
    region = [slice(0, size) for size in sizes]
    for dim, (factor, at) in enumerate(zip(factors, place, strict=True)):
        each, rest = divmod(sizes[dim], factor)
        if rest:
            raise ExecutionError(
                f"{factor} shards of a sample of {tuple(sizes)} values; use a split "
                f"that divides {sizes[dim]}"
            )
        region[dim] = slice(at * each, (at + 1) * each)
    return tuple(region)


# -- Exchange ----------------------------------------------------------------------


def _swap(
    grid: ShardGrid, axis: int, down: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Send to the neighbours of an axis, and receive of both.

    Args:
        grid: The shards.
        axis: Along which.
        down: For the shard before; may be empty.
        up: For the shard behind; may be empty.

    Returns:
        What the shards before and behind sent, of the shapes of ``up`` and ``down``;
        None past the border.
    """
    operations: list[dist.P2POp] = []
    arrived: list[torch.Tensor | None] = []
    for step, sent, like in ((-1, down, up), (1, up, down)):
        there = grid.neighbour(axis, step)
        into = None if there is None else torch.empty_like(like)
        arrived.append(into)
        if there is None or into is None:
            continue
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, there, grid.group))
        if into.numel():
            operations.append(dist.P2POp(dist.irecv, into, there, grid.group))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return arrived[0], arrived[1]


def _strips(
    wide: torch.Tensor, halos: Halos, axis: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Halo before, own values and halo behind along an axis: views of a wide shard.

    Halos of earlier axes are among them, those of later ones are not.
    """
    for later in range(len(halos) - 1, axis, -1):
        before, behind = halos[later]
        size = wide.shape[FIRST_SPATIAL + later] - before - behind
        wide = wide.narrow(FIRST_SPATIAL + later, before, size)
    dim, (before, behind) = FIRST_SPATIAL + axis, halos[axis]
    size = wide.shape[dim] - before - behind
    return (
        wide.narrow(dim, 0, before),
        wide.narrow(dim, before, size),
        wide.narrow(dim, before + size, behind),
    )


def _empty_wide(value: torch.Tensor, halos: Halos) -> torch.Tensor:
    """Tensor with room for a shard and its halo, and the shard in it."""
    sizes = list(value.shape)
    for axis, (before, behind) in enumerate(halos):
        sizes[FIRST_SPATIAL + axis] += before + behind
    wide = value.new_empty(sizes)
    if halos:
        own = _strips(wide, halos, 0)[1]
        own.copy_(value)
    else:
        wide.copy_(value)
    return wide


def _widened(
    value: torch.Tensor, grid: ShardGrid, halos: Halos, fill: float
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Put its halo round a shard.

    Args:
        value: The shard. Shape [batch, channels, d1, ...].
        grid: The shards.
        halos: Values before and behind, along each dimension that is divided.
        fill: Stands past the border.

    Returns:
        The shard with the halo; and the halo before and behind along each dimension,
        None past the border, of which :func:`_rebuilt` makes the same again.
    """
    wide = _empty_wide(value, halos)
    kept: list[torch.Tensor | None] = []
    for axis, (before, behind) in enumerate(halos):
        first, own, last = _strips(wide, halos, axis)
        dim, size = FIRST_SPATIAL + axis, own.shape[FIRST_SPATIAL + axis]
        if not before + behind:
            continue
        down = own.narrow(dim, 0, behind).contiguous()
        up = own.narrow(dim, size - before, before).contiguous()
        arrived = _swap(grid, axis, down, up)
        for strip, edge in zip((first, last), arrived, strict=True):
            _fill_strip(strip, edge, fill)
            kept.append(edge)
    return wide, kept


def _fill_strip(strip: torch.Tensor, edge: torch.Tensor | None, fill: float) -> None:
    """Write a halo, or what stands past the border, to where it belongs."""
    if edge is None:
        strip.fill_(fill)
    else:
        strip.copy_(edge)


def _rebuilt(
    value: torch.Tensor, edges: Sequence[torch.Tensor | None], halos: Halos
) -> torch.Tensor:
    """Put a halo that was kept round a shard, zeros past the border."""
    wide, left = _empty_wide(value, halos), list(edges)
    for axis, (before, behind) in enumerate(halos):
        if before + behind:
            first, _, last = _strips(wide, halos, axis)
            _fill_strip(first, left.pop(0), 0.0)
            _fill_strip(last, left.pop(0), 0.0)
    return wide


def _returned(wide: torch.Tensor, grid: ShardGrid, halos: Halos) -> torch.Tensor:
    """Gradient of a shard, from that of the shard with its halo: the transpose.

    Args:
        wide: Is written to.
        grid: The shards.
        halos: As they were put round.

    Returns:
        A view.
    """
    own = wide
    for axis, (before, behind) in reversed(list(enumerate(halos))):
        first, own, last = _strips(wide, halos, axis)
        dim, size = FIRST_SPATIAL + axis, own.shape[FIRST_SPATIAL + axis]
        if not before + behind:
            continue
        arrived = _swap(grid, axis, first.contiguous(), last.contiguous())
        if arrived[0] is not None:
            own.narrow(dim, 0, behind).add_(arrived[0])
        if arrived[1] is not None:
            own.narrow(dim, size - before, before).add_(arrived[1])
    return _strips(wide, halos, 0)[1] if halos else own


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        grid: ShardGrid,
        halos: Halos,
        fill: float,
    ) -> torch.Tensor:
        ctx.grid, ctx.halos = grid, halos
        return _widened(value, grid, halos, fill)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wide = grads[0].clone(memory_format=torch.contiguous_format)
        return _returned(wide, ctx.grid, ctx.halos), None, None, None


def exchange_halo(
    value: torch.Tensor,
    grid: ShardGrid,
    halos: Halos,
    *,
    fill: float = 0.0,
) -> torch.Tensor:
    """Put the edges of neighbouring shards round a shard; gradients are added up.

    Args:
        value: Shard of this rank. Shape [batch, channels, d1, ...].
        grid: The shards.
        halos: Values of the shards before and behind, along each divided dimension.
        fill: Stands past the border of the sample.
    """
    made: torch.Tensor = _Halo.apply(  # type: ignore[no-untyped-call]
        value, grid, halos, fill
    )
    return made


class _HaloConv(torch.autograd.Function):
    """Convolution that keeps its shard and the halo apart for backward.

    The shard is often kept already, by the activation that made it; a copy with the
    halo round it would be kept a second time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        grid: ShardGrid,
        halos: Halos,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
    ) -> torch.Tensor:
        if any(map(any, halos)):
            wide, edges = _widened(value, grid, halos, 0.0)
        else:
            wide, edges = value, []
        ctx.save_for_backward(value, weight, *edges)
        ctx.bias = None if bias is None else list(bias.shape)
        ctx.grid, ctx.halos = grid, halos
        ctx.rest = (stride, padding, dilation, False, [0] * len(stride), groups)
        made: torch.Tensor = _ATEN.convolution.default(wide, weight, bias, *ctx.rest)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        value, weight, *edges = ctx.saved_tensors
        wide = _rebuilt(value, edges, ctx.halos) if edges else value
        wanted = list(ctx.needs_input_grad[:3])
        of_wide, of_weight, of_bias = _ATEN.convolution_backward.default(
            grads[0].contiguous(),
            wide,
            weight,
            ctx.bias,
            *ctx.rest,
            wanted,
        )
        del wide
        of_value = of_wide
        if wanted[0] and edges:
            of_value = _returned(of_wide, ctx.grid, ctx.halos)
        return of_value, of_weight, of_bias, *[None] * 6


def halo_conv(
    value: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    grid: ShardGrid,
    windows: Sequence[Window],
    groups: int = 1,
) -> torch.Tensor:
    """Convolution of a sample that ranks share: this rank's shard of the result.

    Args:
        value: Shard of this rank. Shape [batch, channels, d1, ...].
        weight: Whole. Shape [out channels, channels / groups, k1, ...].
        bias: Whole; None for none.
        grid: The shards.
        windows: Along each spatial dimension.
        groups: Of channels.
    """
    halos, padding, value = halos_and_padding(value, grid, windows, 0.0)
    made: torch.Tensor = _HaloConv.apply(  # type: ignore[no-untyped-call]
        value,
        weight,
        bias,
        grid,
        halos,
        [window.stride for window in windows],
        padding,
        [window.dilation for window in windows],
        groups,
    )
    return made


def halos_and_padding(
    value: torch.Tensor, grid: ShardGrid, windows: Sequence[Window], fill: float
) -> tuple[Halos, list[int], torch.Tensor]:
    """Halo of divided dimensions, padding of the others, and the padded value."""
    divided = len(grid.factors)
    halos, padding, extra = [], [], [0, 0] * (value.ndim - FIRST_SPATIAL)
    for axis, window in enumerate(windows):
        split = axis < divided and grid.factors[axis] > 1
        if axis < divided:
            halos.append(window.halo if split else (0, 0))
        even = window.before == window.behind
        padding.append(window.before if not split and even else 0)
        if not split and not even:
            # torch counts dimensions of padding from the last.
            at = 2 * (len(windows) - 1 - axis)
            extra[at : at + 2] = [window.before, window.behind]
    if any(extra):
        value = nn.functional.pad(value, extra, value=fill)
    return tuple(halos), padding, value
