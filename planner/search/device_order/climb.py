"""Many arrangements improved side by side, by small changes that make them better."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.search.device_order.neighbours import neighbours
from planner.search.device_order.pricer import OrderPricer, Priced

__all__ = ["Limits", "best_of", "climb", "joined"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Arrangements priced at once: few enough for a clock to be kept.
_AT_ONCE = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Rounds and time after which a climb stops.

    Attributes:
        until: Of :func:`time.perf_counter`; None for no clock.
        rounds: Most rounds of :data:`_AT_ONCE` arrangements; None for no end.
    """

    until: float | None = None
    rounds: int | None = None

    def over(self, rounds: int) -> bool:
        """True if the climb stops after so many rounds."""
        if self.rounds is not None and rounds >= self.rounds:
            return True
        return self.until is not None and time.perf_counter() >= self.until


def joined(parts: list[Priced]) -> Priced:
    """Arrangements of several, one after the other."""
    return Priced(
        **{
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("layout", "sequence", "row", "score")
        }
    )


def best_of(priced: Priced, count: int, *, of_layout: int | None = None) -> Priced:
    """The best different arrangements, best first.

    Args:
        priced: Arrangements.
        count: Most to keep.
        of_layout: Of one layout at most so many; None for any number.
    """
    kept: list[int] = []
    seen: set[tuple[int, float]] = set()
    per: dict[int, int] = {}
    for at in np.argsort(priced.score, kind="stable").tolist():
        layout, score = int(priced.layout[at]), float(priced.score[at])
        if not np.isfinite(score) or len(kept) == count:
            break
        full = of_layout is not None and per.get(layout, 0) >= of_layout
        if full or (layout, score) in seen:
            continue
        seen.add((layout, score))
        per[layout] = per.get(layout, 0) + 1
        kept.append(at)
    return priced[np.array(kept, dtype=np.int64)]


def climb(
    pricer: OrderPricer,
    start: Priced,
    rng: np.random.Generator,
    limits: Limits,
    *,
    lineages: int = 12,
) -> Priced:
    """Improve the best of some arrangements until the limits are reached.

    Every round changes each of the current arrangements several times at random and
    keeps the best child where it is no worse. A lineage that falls behind is replaced
    by a copy of the best every now and then.

    Args:
        pricer: Prices them.
        start: Arrangements to begin with.
        rng: Of the changes.
        limits: When to stop; at least one round is done unless time is already up.
        lineages: Arrangements that are improved side by side.
    Returns:
        The current arrangements, best first.
    """
    current = best_of(start, lineages, of_layout=max(1, lineages // 4))
    if not len(current):
        return current
    usable = pricer.layouts.usable
    rounds = 0
    while not limits.over(rounds):
        many = -(-_AT_ONCE // len(current))
        parent = np.repeat(np.arange(len(current)), many)
        children = pricer.price(
            *neighbours(current.layout[parent], current.sequence[parent], usable, rng)
        )
        rounds += 1
        score = children.score.reshape(len(current), many)
        chosen = score.argmin(axis=1) + np.arange(len(current)) * many
        better = children.score[chosen] <= current.score
        at = np.where(better, len(current) + chosen, np.arange(len(current)))
        current = joined([current, children])[at]
        if rounds % 20 == 0:
            worst, best = int(current.score.argmax()), int(current.score.argmin())
            copy = np.arange(len(current))
            copy[worst] = best
            current = current[copy]
    return best_of(current, lineages)
