"""Splits made better by moving one group at a time to another device.

Devices keep their order, and a group stays between those it depends on and those that
depend on it, so that every split on the way is contiguous. Moves that make the busiest
device busier are at times made too, ever more rarely (simulated annealing); in between
the best cut along the order found is taken.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from planner.simulate.compiled import compiled, copy_into, inlined
from planner.split.groups import Groups
from planner.split.linear import Split, best_along, best_linear, order_by_priority
from planner.split.task import Array, Index, Mask, summed

__all__ = ["refine"]

_MOVES_PER_GROUP = 400
_WARMEST = 0.03  # of the load: what a move may cost at first


class _Board(NamedTuple):
    """The groups, and how they lie.

    Attributes:
        level: Place of each group's device in the order. Shape [m].
        is_cpu: Whether the device at each place is a CPU. Shape [levels].
        load: Of each device. Shape [levels].
        held: Bytes likewise. Shape [levels].
        users: Consumers of each flow by place. Shape [f, levels].
    """

    work: Array
    cpu: Array
    size: Array
    supported: Mask
    after_start: Index
    after: Index
    before_start: Index
    before: Index
    flow_ms: Array
    flow_from: Index
    touch_start: Index
    touch: Index
    give_start: Index
    give: Index
    level: Index
    is_cpu: Mask
    load: Array
    held: Array
    users: Index


@inlined
def _pay(b: _Board, f: int, home: int, sign: float) -> None:
    """Add (or take back) what a flow costs each accelerator."""
    leaves = False
    for at in range(len(b.load)):
        if at != home and b.users[f, at] > 0:
            leaves = True
            if not b.is_cpu[at]:
                b.load[at] += sign * b.flow_ms[f]
    if leaves and not b.is_cpu[home]:
        b.load[home] += sign * b.flow_ms[f]


@inlined
def _move(b: _Board, g: int, to: int) -> None:
    old = b.level[g]
    b.load[old] -= b.cpu[g] if b.is_cpu[old] else b.work[g]
    b.held[old] -= b.size[g]
    for k in range(b.touch_start[g], b.touch_start[g + 1]):
        f = b.touch[k]
        home = b.level[b.flow_from[f]]
        _pay(b, f, home, -1.0)
        b.users[f, old] -= 1
        b.users[f, to] += 1
        _pay(b, f, home, 1.0)
    for k in range(b.give_start[g], b.give_start[g + 1]):
        _pay(b, b.give[k], old, -1.0)
        _pay(b, b.give[k], to, 1.0)
    b.load[to] += b.cpu[g] if b.is_cpu[to] else b.work[g]
    b.held[to] += b.size[g]
    b.level[g] = to


@inlined
def _range(b: _Board, g: int) -> tuple[int, int]:
    """The first and the last place a group may be at."""
    low, high = 0, len(b.load) - 1
    for k in range(b.before_start[g], b.before_start[g + 1]):
        low = max(low, b.level[b.before[k]])
    for k in range(b.after_start[g], b.after_start[g + 1]):
        high = min(high, b.level[b.after[k]])
    return low, high


@inlined
def _worth(b: _Board) -> float:
    """The largest load, and a little of how full the devices are on the whole."""
    most, squares = 0.0, 0.0
    for load in b.load:
        most = max(most, load)
        squares += load * load
    return float(most + 0.02 * np.sqrt(squares / len(b.load)))


@compiled
def _anneal(b: _Board, memory: float, warm: float, chance: Array, best: Index) -> None:
    """Move groups about; ``best`` is left with the places of the best split met.

    Args:
        b: The groups, and where they lie at first.
        memory: Of an accelerator.
        warm: What a move may cost at first, in ms.
        chance: For each move: which group, where to, and whether a worse split is
            taken. Shape [moves, 3], in [0, 1).
        best: Shape [m].
    """
    moves, m = len(chance), len(b.work)
    now, least = _worth(b), b.load.max()
    copy_into(best, b.level)
    for i in range(moves):
        g = int(chance[i, 0] * m)
        low, high = _range(b, g)
        if low == high:
            continue
        old = b.level[g]
        to = low + int(chance[i, 1] * (high - low))
        to += to >= old
        fits = b.supported[g] and b.held[to] + b.size[g] <= memory
        if not b.is_cpu[to] and not fits:
            continue
        _move(b, g, to)
        then = _worth(b)
        heat = warm * (1.0 - i / moves) ** 2 + 1e-12
        if then <= now or chance[i, 2] < np.exp((now - then) / heat):
            now = then
            if b.load.max() < least * (1 - 1e-9):
                least = b.load.max()
                copy_into(best, b.level)
        else:
            _move(b, g, old)


def _lay(groups: Groups, split: Split, order: Index) -> _Board:
    """The board of a split whose devices come in this order."""
    task = groups.task
    place = np.empty(task.devices, dtype=np.int64)
    place[order] = np.arange(task.devices)
    level = place[split.group_device]
    flows = len(groups.flow_ms)
    users = np.zeros((flows, task.devices), dtype=np.int64)
    flow_of = np.repeat(np.arange(flows), np.diff(groups.flow_start))
    np.add.at(users, (flow_of, level[groups.flow_to]), 1)
    is_cpu = order >= task.accelerators
    work = np.where(is_cpu[level], groups.cpu_ms, groups.accelerator_ms)
    load = summed(level, work, task.devices)
    home = level[groups.flow_from]
    for f in range(flows):
        to = np.flatnonzero(users[f])
        to = to[to != home[f]]
        load[to] += groups.flow_ms[f]
        load[home[f]] += groups.flow_ms[f] * bool(len(to))
    cpu_load = summed(level, groups.cpu_ms, task.devices)
    load[is_cpu] = cpu_load[is_cpu]
    return _Board(
        work=groups.accelerator_ms,
        cpu=groups.cpu_ms,
        size=groups.size_bytes,
        supported=groups.supported,
        after_start=groups.after_start,
        after=groups.after,
        before_start=groups.before_start,
        before=groups.before,
        flow_ms=groups.flow_ms,
        flow_from=groups.flow_from,
        touch_start=groups.touch_start,
        touch=groups.touch,
        give_start=groups.give_start,
        give=groups.give,
        level=level,
        is_cpu=is_cpu,
        load=load,
        held=summed(level, groups.size_bytes, task.devices),
        users=users,
    )


def _device_order(groups: Groups, split: Split, rng: np.random.Generator) -> Index:
    """Devices as the split runs through them; those it leaves empty come anywhere."""
    devices = groups.task.devices
    used = np.unique(split.group_device)
    place = np.full(devices, -1.0)
    rank = _ranks(groups, split)
    place[used] = rank[used]
    empty = np.flatnonzero(place < 0)
    place[empty] = rng.uniform(-0.5, max(len(used) - 0.5, 0.5), len(empty))
    return np.argsort(place, kind="stable")


def _ranks(groups: Groups, split: Split) -> Array:
    """Longest chain of devices before each device."""
    rank = np.zeros(groups.task.devices)
    owner = np.repeat(np.arange(len(groups)), np.diff(groups.after_start))
    device = split.group_device
    pairs = np.unique(np.stack([device[owner], device[groups.after]]), axis=1)
    pairs = pairs[:, pairs[0] != pairs[1]]
    for _ in range(groups.task.devices):
        np.maximum.at(rank, pairs[1], rank[pairs[0]] + 1)
    return rank


def refine(
    groups: Groups,
    split: Split | None = None,
    *,
    seed: int = 0,
    rounds: int = 12,
    time_limit_s: float = np.inf,
) -> Split | None:
    """Make a split better; the same for the same seed if the time is enough.

    Args:
        groups: What is split.
        split: To start from; by default the best along standard orders.
        seed: Of what is tried.
        rounds: How often it is warmed up again.
        time_limit_s: After which the best so far is returned.

    Returns:
        The best split met, no worse than the one to start from; None if there is none
        to start from.
    """
    ends = time.monotonic() + time_limit_s
    best = split or best_linear(groups)
    if best is None or groups.task.devices == 1:
        return best
    rng = np.random.default_rng(seed)
    moves = _MOVES_PER_GROUP * len(groups)
    place = np.empty(len(groups), dtype=np.int64)
    first = order_by_priority(groups, np.zeros(len(groups)))
    place[first] = np.arange(len(groups))
    for _ in range(rounds):
        if time.monotonic() > ends:
            break
        board = _lay(groups, best, _device_order(groups, best, rng))
        found = np.empty(len(groups), dtype=np.int64)
        warm = _WARMEST * best.load_ms * rng.random()
        memory = groups.task.memory_bytes
        _anneal(board, memory, warm, rng.random((moves, 3)), found)
        order = np.lexsort((place, found))
        best = best_along(groups, order, best.load_ms) or best
    return best
