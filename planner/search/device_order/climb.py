"""Local search: arrangements improved side by side by small random changes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.search.device_order.pricer import OrderPricer, Priced
from planner.search.steps import Steps, completed
from planner.simulate.compiled import compiled, inner

__all__ = [
    "Limits",
    "best_of",
    "climb",
    "climb_in_steps",
    "joined",
    "random_neighbours",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Arrangements priced at once: few enough to keep to a time limit.
_AT_ONCE = 96
#: Rounds without a better arrangement after which a climb stops, besides a quarter of
#: the groups squared: with 12 lineages, eight children of each in a round.
_PATIENCE = 6
#: Cumulative shares of the changes: two groups swap, one moves, a run is reversed, two
#: runs of equal length swap, the layout changes.
_SHARES = np.cumsum([0.35, 0.25, 0.1, 0.1, 0.2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Rounds and time after which a climb stops.

    Attributes:
        until: ``time.perf_counter`` at which to stop; None for no limit.
        rounds: Most rounds of :data:`_AT_ONCE` arrangements; None for no limit.
    """

    until: float | None = None
    rounds: int | None = None

    def over(self, rounds: int) -> bool:
        """Return True if the climb stops after ``rounds`` rounds."""
        if self.rounds is not None and rounds >= self.rounds:
            return True
        return self.until is not None and time.perf_counter() >= self.until


def joined(parts: list[Priced]) -> Priced:
    """Concatenate arrangements."""
    return Priced(
        **{
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("layout", "sequence", "row", "score")
        }
    )


def best_of(priced: Priced, count: int, *, of_layout: int | None = None) -> Priced:
    """Return the best distinct arrangements, best first.

    Args:
        priced: Arrangements.
        count: Most to return.
        of_layout: Most with one layout; None for any number.
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
    """Improve the best arrangements until the limits are reached.

    Every round changes each of the current arrangements several times at random and
    keeps the best child where it is no worse. Every 20 rounds the worst lineage is
    replaced by a copy of the best. Few groups have few orders: after enough rounds
    without a better one, all that are near have been tried.

    Args:
        pricer: Prices the arrangements.
        start: Arrangements to begin with.
        rng: Generator of the changes.
        limits: Rounds and time; at least one round is done unless time is over.
        lineages: Arrangements that are improved side by side.
    Returns:
        The current arrangements, best first.
    """
    return completed(climb_in_steps(pricer, start, rng, limits, lineages=lineages))


def climb_in_steps(
    pricer: OrderPricer,
    start: Priced,
    rng: np.random.Generator,
    limits: Limits,
    *,
    lineages: int = 12,
) -> Steps[Priced]:
    """Do the same in steps; see :func:`climb`. Pauses after each round."""
    current = best_of(start, lineages, of_layout=max(1, lineages // 4))
    if not len(current):
        return current
    usable = pricer.layouts.usable
    patience = _PATIENCE + usable.shape[1] ** 2 // 4
    rounds = idle = 0
    while not limits.over(rounds) and idle < patience:
        many = -(-_AT_ONCE // len(current))
        parent = np.repeat(np.arange(len(current)), many)
        children = pricer.price(
            *random_neighbours(
                current.layout[parent], current.sequence[parent], usable, rng
            )
        )
        rounds += 1
        score = children.score.reshape(len(current), many)
        chosen = score.argmin(axis=1) + np.arange(len(current)) * many
        better = children.score[chosen] <= current.score
        improved = bool((children.score[chosen] < current.score).any())
        idle = 0 if improved else idle + 1
        at = np.where(better, len(current) + chosen, np.arange(len(current)))
        current = joined([current, children])[at]
        if rounds % 20 == 0:
            worst, best = int(current.score.argmax()), int(current.score.argmin())
            copy = np.arange(len(current))
            copy[worst] = best
            current = current[copy]
        yield
    return best_of(current, lineages)


# -- Random changes --------------------------------------------------------------


@inner
def _swap_runs(row: Index, first: int, second: int, length: int) -> None:
    for at in range(length):
        row[first + at], row[second + at] = row[second + at], row[first + at]


@inner
def _move(row: Index, source: int, target: int) -> None:
    group = row[source]
    step = 1 if target > source else -1
    for at in range(source, target, step):
        row[at] = row[at + step]
    row[target] = group


@inner
def _restrict(row: Index, usable: Mask) -> None:
    """Keep usable groups in their order, then append missing ones."""
    seen = np.zeros(len(usable), dtype=np.bool_)
    kept = 0
    for at in range(len(row)):
        group = row[at]
        if group >= 0 and usable[group]:
            row[kept] = group
            seen[group] = True
            kept += 1
    for group in range(len(usable)):
        if usable[group] and not seen[group]:
            row[kept] = group
            kept += 1
    row[kept:] = -1


@compiled
def _change(
    layout: Index,
    sequence: Index,
    usable: Mask,
    draws: NDArray[np.float64],
    shares: NDArray[np.float64],
) -> None:
    for row in range(len(layout)):
        groups = sequence[row]
        count = 0
        while count < len(groups) and groups[count] >= 0:
            count += 1
        kind, a, b, c = draws[row]
        first, second = int(a * count), int(b * count)
        if kind >= shares[3] or count < 2:
            layout[row] = int(c * len(usable))
            _restrict(groups, usable[layout[row]])
        elif kind < shares[0]:
            _swap_runs(groups, first, second, 1)
        elif kind < shares[1]:
            _move(groups, first, second)
        elif kind < shares[2]:
            low, high = min(first, second), max(first, second)
            groups[low : high + 1] = groups[low : high + 1][::-1].copy()
        else:
            low, high = min(first, second), max(first, second)
            length = min(high - low, count - high)
            _swap_runs(groups, low, high, min(length, 1 + int(c * length)))


def random_neighbours(
    layout: Index, sequence: Index, usable: Mask, rng: np.random.Generator
) -> tuple[Index, Index]:
    """Apply one random change to each arrangement.

    Args:
        layout: Layout of each arrangement. Shape [n].
        sequence: Its usable groups in order, -1 after the last. Shape [n, groups].
        usable: Groups that each layout may use. Shape [layouts, groups].
        rng: Generator of the changes.
    Returns:
        Changed layouts and sequences.
    """
    layout, sequence = layout.copy(), np.ascontiguousarray(sequence).copy()
    _change(layout, sequence, usable, rng.random((len(layout), 4)), _SHARES)
    return layout, sequence
