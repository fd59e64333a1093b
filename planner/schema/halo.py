"""Arithmetic of convolutions over samples that ranks share: windows and halos.

A sample of N values along a dimension is cut into p shards of n = N / p. A window of
reach k = dilation (kernel - 1) + 1 at stride s, after a padding of b values before and
a values behind, makes N / s outputs if (N + b + a - k) div s + 1 = N / s. Each rank
then makes n / s of them of its own values, of b values of the shard before and of
max(0, k - s - b) of the shard behind: its *halo*.

Source: Dryden et al. 2019, Improving Strong-Scaling of CNN Training by Exploiting
Finer-Grained Parallelism, section III; Oyama et al. 2020, arXiv 2007.12856.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "SpatialLayer",
    "Window",
    "best_split",
    "factorisations",
    "halo_values",
    "place_of",
    "split_violation",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Window of a convolution or of a pooling along one dimension.

    Attributes:
        kernel: Values that it reads.
        stride: Distance between neighbouring windows.
        before: Padding before the first value.
        behind: Padding behind the last value.
        dilation: Distance between neighbouring values that it reads.
    """

    kernel: int
    stride: int = 1
    before: int = 0
    behind: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Values from the first that it reads to the last."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def halo(self) -> tuple[int, int]:
        """Values that a rank needs of the shard before its own, and of that behind."""
        return self.before, max(0, self.reach - self.stride - self.before)

    def outputs(self, size: int) -> int:
        """Outputs along a dimension of so many values."""
        return (size + self.before + self.behind - self.reach) // self.stride + 1

    def violation(self, size: int, parts: int) -> str | None:
        """Reason why ranks cannot compute the window on shards; None if they can.

        Args:
            size: Values along the dimension.
            parts: Shards that it is cut into.

        Returns:
            Value, rule and remedy.
        """
        if parts == 1:
            return None
        if size % (parts * self.stride):
            return (
                f"{parts} shards of {size} values at stride {self.stride}; each shard "
                f"must hold as many whole strides, use a split that divides "
                f"{size // self.stride}"
            )
        if self.outputs(size) * self.stride != size:
            return (
                f"kernel {self.kernel} at stride {self.stride} with padding "
                f"{self.before} makes {self.outputs(size)} of {size} values; shards "
                f"need {size // self.stride}, use an odd kernel with padding "
                f"(kernel - 1) / 2, or an even one whose stride is its size"
            )
        if max(self.halo) > size // parts:
            return (
                f"kernel {self.kernel} with dilation {self.dilation} reaches "
                f"{max(self.halo)} values into the next shard, which has "
                f"{size // parts}; use fewer shards than {parts}"
            )
        return None


def factorisations(number: int, dims: int) -> tuple[tuple[int, ...], ...]:
    """Ways to write a number as a product of so many factors, in order.

    Args:
        number: At least 1.
        dims: Factors of each product, at least 1.
    """
    if dims == 1:
        return ((number,),)
    return tuple(
        (first, *rest)
        for first in range(number, 0, -1)
        if number % first == 0
        for rest in factorisations(number // first, dims - 1)
    )


def place_of(index: int, factors: Sequence[int]) -> tuple[int, ...]:
    """Coordinates of a rank's shard; row-major, the last dimension fastest.

    Args:
        index: Place of the rank along cp.
        factors: Shards along each spatial dimension.
    """
    place = []
    for factor in reversed(factors):
        index, at = divmod(index, factor)
        place.append(at)
    return tuple(reversed(place))


def halo_values(
    windows: Sequence[Window],
    sizes: Sequence[int],
    factors: Sequence[int],
    index: int | None = None,
) -> int:
    """Values of a channel and a sample that a rank sends for a window in forward.

    Shards exchange dimension after dimension, with the halo of those before. Backward
    sends as many, summed over all ranks.

    Args:
        windows: Along each spatial dimension.
        sizes: Of the whole sample.
        factors: Shards along each spatial dimension, from the first on.
        index: Place of the rank along cp; None for one with neighbours on all sides.
    """
    local = [size // part for size, part in zip(sizes, factors, strict=False)]
    local += list(sizes[len(factors) :])
    place = None if index is None else place_of(index, factors)
    total = 0
    for axis, factor in enumerate(factors):
        if factor == 1:
            continue
        before, behind = windows[axis].halo
        at = 1 if place is None else place[axis]
        last = factor > 2 if place is None else at < factor - 1
        face = math.prod(local[:axis]) * math.prod(local[axis + 1 :])
        if place is None and factor == 2:
            # One neighbour: the larger side is the most.
            total += max(before, behind) * face
        else:
            total += (behind * (at > 0) + before * last) * face
        local[axis] += before + behind
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class SpatialLayer:
    """Convolution or pooling of a model, as shards of its samples compute it.

    Attributes:
        name: FQN of its module.
        sizes: Spatial sizes of its input.
        windows: Along each spatial dimension.
        channels: Of its input, times the samples of the traced batch.
        trained: Whether its input has a gradient, which backward sends back.
    """

    name: str
    sizes: tuple[int, ...]
    windows: tuple[Window, ...]
    channels: int
    trained: bool = True

    def violation(self, factors: Sequence[int]) -> str | None:
        """Reason why shards cannot compute it; None if they can.

        Args:
            factors: Shards along each spatial dimension, from the first on.
        """
        for window, size, parts in zip(self.windows, self.sizes, factors, strict=False):
            reason = window.violation(size, parts)
            if reason is not None:
                return f"{self.name}: {reason}"
        return None


@functools.lru_cache(maxsize=4096)
def best_split(layers: tuple[SpatialLayer, ...], parts: int) -> tuple[int, ...] | None:
    """Shards along each dimension whose halos are fewest; None if no split divides.

    Args:
        layers: Of the model, not empty.
        parts: Shards of a sample.
    """
    found = [
        factors
        for factors in factorisations(parts, len(layers[0].sizes))
        if all(layer.violation(factors) is None for layer in layers)
    ]
    if not found:
        return None

    def values(factors: tuple[int, ...]) -> int:
        return sum(
            layer.channels * halo_values(layer.windows, layer.sizes, factors)
            for layer in layers
        )

    # Of equal ones the first: it divides the first dimension most, whose parts lie
    # together in memory.
    return min(found, key=values)


def split_violation(layers: tuple[SpatialLayer, ...], parts: int) -> str:
    """Reason why no split of a sample serves every layer, by the one that gets far.

    Args:
        layers: Of the model, not empty.
        parts: Shards of a sample.
    """
    reasons = {}
    for factors in factorisations(parts, len(layers[0].sizes)):
        for index, layer in enumerate(layers):
            reason = layer.violation(factors)
            if reason is not None:
                reasons[factors] = (index, reason)
                break
    furthest = max(reasons, key=lambda factors: reasons[factors][0])
    shown = " x ".join(map(str, furthest))
    return f"cp={parts} as {shown} shards of a sample: {reasons[furthest][1]}"
