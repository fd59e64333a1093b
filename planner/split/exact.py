"""The best split of all: dynamic programming over ideals, with bounds.

Devices are filled one after the other; after each, what is placed is an ideal of the
graph. An ideal is kept, with the least bottleneck for the devices used, only if the
others could still do the rest within the best load known. That load comes from splits
along single orders, and is often the optimum: then all that is left is to find nothing.
The graph is searched from both ends by turns, and the first to end has the answer.
Source: Tarnawski et al. 2020, arXiv 2006.16423, section 5.1; the bounds are our own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from planner.split.board import Board, Problem, new_board
from planner.split.groups import Groups
from planner.split.ideals import (
    Reached,
    bytes_of,
    followers,
    grown,
    new_reached,
    put,
)
from planner.split.linear import Split, best_linear, order_by_priority
from planner.split.loads import max_load_ms
from planner.split.search import (
    DONE,
    FULL,
    NO_BETTER,
    expand,
)
from planner.split.task import Array, Index

__all__ = ["Outcome", "best_exact"]

_STEPS = 100_000  # at first, from one set, between looks at the clock
_SLICE = 50_000  # steps of a search before it is the other's turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a search ended.

    Attributes:
        split: The best split found; None if there is none.
        finished: Whether nothing is better.
        ideals: Sets kept, over all numbers of devices.
        steps: Sets met.
    """

    split: Split | None
    finished: bool
    ideals: int
    steps: int


def _problem(groups: Groups) -> Problem:
    order = order_by_priority(groups, np.zeros(len(groups)))
    return Problem(
        work=np.where(groups.supported, groups.accelerator_ms, 0.0),
        cpu=groups.cpu_ms,
        size=groups.size_bytes,
        supported=groups.supported,
        after_start=groups.after_start,
        after=groups.after,
        before_start=groups.before_start,
        flow_ms=groups.flow_ms,
        flow_from=groups.flow_from,
        flow_start=groups.flow_start,
        flow_to=groups.flow_to,
        touch_start=groups.touch_start,
        touch=groups.touch,
        give_start=groups.give_start,
        give=groups.give,
        reach=followers(groups, order),
    )


def _spared(gain: Array, cost: Array, room: float) -> float:
    """The most gain that fits into the room, parts of groups allowed."""
    free = cost <= 0
    gain, cost, total = gain[~free], cost[~free], float(gain[free].sum())
    order = np.argsort(-gain / cost, kind="stable")
    ends = np.cumsum(cost[order])
    whole = int(np.searchsorted(ends, room, side="right"))
    total += float(gain[order[:whole]].sum())
    if whole < len(order):
        used = ends[whole - 1] if whole else 0.0
        total += float((room - used) * (gain / cost)[order[whole]])
    return total


class _OutOfMemoryError(Exception):
    """The tables of a search became too large."""


class _Search:
    """One search; ``run`` is to be called once."""

    def __init__(self, groups: Groups, known: Split | None, memory_bytes: int) -> None:
        self.groups, self.memory_bytes = groups, memory_bytes
        self.problem = _problem(groups)
        self.board: Board = new_board(groups)
        task = groups.task
        self.wide = task.cpus + 1
        words = self.problem.reach.shape[1]
        self.reached: Reached = new_reached(words, (task.accelerators + 1) * self.wide)
        put(self.reached, np.zeros(words, dtype=np.uint64), 0, 0.0, -1)
        bound = np.inf if known is None else known.load_ms * (1 - NO_BETTER)
        self.best = np.array([bound, -1.0])
        self.steps = 0
        moved = np.zeros(len(groups))
        ends = np.repeat(np.arange(len(groups)), np.diff(groups.touch_start))
        np.add.at(moved, ends, groups.flow_ms[groups.touch])
        np.add.at(moved, groups.flow_from, groups.flow_ms)
        self.gains = (self.problem.work, self.problem.work + moved)

    def _rest(self, row: int, accelerators: int, cpus: int) -> Array:
        """See ``rest`` of :func:`expand`, for so many devices left."""
        bound = float(self.best[0])
        bits = np.unpackbits(self.reached.bits[row].view(np.uint8), bitorder="little")[
            : len(self.groups)
        ].astype(bool)
        # Sums in another order differ in their last digits.
        slack = NO_BETTER * float(self.problem.work.sum())
        rest = [float(self.problem.work[~bits].sum()) - slack]
        for gain in self.gains:
            room = cpus * bound
            spared = _spared(gain, self.problem.cpu, room) if cpus else 0.0
            rest.append((accelerators * bound if accelerators else 0.0) + spared)
        return np.array(rest)

    def _from(self, row: int, left: tuple[int, int]) -> Iterator[None]:
        """Go on from a set with each kind of device."""
        task = self.groups.task
        for on_cpu in (False, True):
            accelerators, cpus = left[0] - (not on_cpu), left[1] - on_cpu
            if accelerators < 0 or cpus < 0:
                continue
            state = (task.accelerators - accelerators) * self.wide + task.cpus - cpus
            steps, outcome = _STEPS, FULL
            while outcome != DONE:
                budget = np.array([steps], dtype=np.int64)
                outcome = expand(
                    self.problem,
                    self.board,
                    self.reached,
                    row,
                    state,
                    on_cpu,
                    self._rest(row, accelerators, cpus),
                    task.memory_bytes,
                    self.best,
                    budget,
                )
                self.steps += steps - max(int(budget[0]), 0)
                if outcome == FULL:
                    if 3 * bytes_of(self.reached) > self.memory_bytes:
                        raise _OutOfMemoryError
                    self.reached = grown(self.reached)
                elif outcome != DONE:
                    steps *= 2
                    yield

    def run(self) -> Iterator[None]:
        """Search until done, with a break after every so many steps.

        Raises:
            _OutOfMemoryError: If the tables become too large.
        """
        task, pause = self.groups.task, _SLICE
        for state in range(len(self.reached.first)):
            used = divmod(state, self.wide)
            left = (task.accelerators - used[0], task.cpus - used[1])
            row = int(self.reached.first[state])
            while row >= 0:
                if self.reached.value[row] < self.best[0]:
                    yield from self._from(row, left)
                if self.steps >= pause:
                    pause = self.steps + _SLICE
                    yield
                row = int(self.reached.onward[row])

    def split(self) -> Split | None:
        """The best split found; None if none is better than the one known."""
        row, task = int(self.best[1]), self.groups.task
        if row < 0:
            return None
        device: Index = np.empty(len(self.groups), dtype=np.int64)
        while (parent := int(self.reached.parent[row])) >= 0:
            added = self.reached.bits[row] ^ self.reached.bits[parent]
            bits = np.unpackbits(added.view(np.uint8), bitorder="little")
            a, c = divmod(int(self.reached.state[parent]), self.wide)
            on_cpu = int(self.reached.state[row]) % self.wide > c
            device[np.flatnonzero(bits)] = task.accelerators + c if on_cpu else a
            row = parent
        assignment = self.groups.spread(device)
        return Split(
            load_ms=max_load_ms(task, assignment),
            assignment=assignment,
            group_device=device,
        )


def best_exact(
    groups: Groups,
    known: Split | None = None,
    *,
    time_limit_s: float = np.inf,
    memory_bytes: int = 1_000_000_000,
) -> Outcome:
    """The best split there is.

    Args:
        groups: What is split.
        known: A split to start from; by default the best along standard orders. The
            better it is the faster the search.
        time_limit_s: After which the search is given up.
        memory_bytes: Of tables, at which it is given up.

    Returns:
        The outcome. Where the search was given up, its split is the best one seen.
    """
    ends = time.monotonic() + time_limit_s
    known = known or best_linear(groups)
    searches = [
        _Search(turned, known, memory_bytes // 2)
        for turned in (groups, _turned(groups))
    ]
    finished = _race(searches, ends)
    splits = [search.split() for search in searches] + [known]
    return Outcome(
        split=min(filter(None, splits), key=lambda s: s.load_ms, default=None),
        finished=finished,
        ideals=sum(int(search.reached.used[0]) for search in searches),
        steps=sum(search.steps for search in searches),
    )


def _turned(groups: Groups) -> Groups:
    """The same task seen from its end: loads do not depend on which way data flow."""
    return replace(
        groups,
        after_start=groups.before_start,
        after=groups.before,
        before_start=groups.after_start,
        before=groups.after,
    )


def _race(searches: list[_Search], ends: float) -> bool:
    """Run searches by turns until one ends; whether one did.

    From one end of a graph there may be a thousand times as many sets as from the
    other, and it is hard to know beforehand which one that is.
    """
    running = {search: search.run() for search in searches}
    while running:
        search = min(running, key=lambda s: s.steps)
        try:
            next(running[search])
        except StopIteration:
            return True
        except _OutOfMemoryError:
            del running[search]
        bound = min(float(s.best[0]) for s in searches)
        for each in searches:
            each.best[0] = bound
        if time.monotonic() > ends:
            return False
    return False
