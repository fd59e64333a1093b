"""Time of the exchanges of tokens between experts, dispatch and combine.

    t = x + y + 2 pipelining sqrt(x y),  y = start
    x = tokens (hidden bytes (copies + own) / (B share) + token_s + copies copy_s)

A token goes once to each of the n ranks (or hosts) that has one of its k experts; of
n (1 - (1 - 1/n)^k) such ranks the share (n - 1) / n are others: ``copies``. ``own`` is
the time of what a rank does with its tokens' bytes whatever they meet. The root is that
of :mod:`planner.cost.surfaces.collectives`.

Source: DeepEP, README; copies as in :mod:`planner.cost.traffic.layers`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["DispatchConstants", "DispatchSurface", "copies_of"]

Array = NDArray[np.float64]


def copies_of(topk: ArrayLike, ranks: ArrayLike) -> Array:
    """Copies of a token that leave its rank, where experts are chosen evenly.

    Args:
        topk: Experts of a token.
        ranks: That the experts are spread over.
    """
    k, n = np.asarray(topk, float), np.maximum(np.asarray(ranks, float), 1.0)
    return np.asarray((n - 1) * (1 - (1 - 1 / n) ** k))


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConstants:
    """Constants of a device and an exchange.

    Attributes:
        start_s: Seconds of an exchange of nothing.
        share: Share of the link's bandwidth.
        pipelining: Share of the cost of cutting tokens into chunks.
        token_s: Seconds of a token, whatever its width.
        own: Copies that a token's work on its own rank takes the time of.
        copy_s: Seconds of a copy, whatever its width.
    """

    start_s: float
    share: float
    pipelining: float
    token_s: float
    own: float = 0.0
    copy_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSurface:
    """Seconds of a dispatch or a combine.

    Attributes:
        constants: Fitted.
        element_bytes: Of a number as it was measured: float8 with its scales, or 2.
    """

    constants: DispatchConstants
    element_bytes: float

    def seconds(
        self,
        tokens: ArrayLike,
        hidden: ArrayLike,
        topk: ArrayLike,
        ranks: ArrayLike,
        bandwidth_bytes_per_s: ArrayLike,
        *,
        element_bytes: float | None = None,
    ) -> Array:
        """Seconds until all tokens have come to their experts, or back.

        Args:
            tokens: Of one rank.
            hidden: Numbers of a token.
            topk: Its experts.
            ranks: That take part; between hosts, hosts.
            bandwidth_bytes_per_s: Of a rank's links in one direction. All of these
                broadcast to one shape.
            element_bytes: Of a number, if not as it was measured.
        Returns:
            Of that shape; 0 for one rank.
        """
        c = self.constants
        t, h, n, rate = (
            np.asarray(x, float) for x in (tokens, hidden, ranks, bandwidth_bytes_per_s)
        )
        width = self.element_bytes if element_bytes is None else element_bytes
        copies = copies_of(topk, n)
        each = h * width * (copies + c.own) / (rate * c.share)
        moved = t * (each + c.token_s + copies * c.copy_s)
        root = np.sqrt(c.start_s * moved)
        return np.asarray(
            np.where(n > 1, c.start_s + moved + 2 * c.pipelining * root, 0.0)
        )
