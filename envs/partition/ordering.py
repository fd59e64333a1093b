"""Put groups of devices in order, one after the other, many orders side by side.

A mesh sets the devices of a stage and of a block of replicas inside it; the groups fill
both in turn. At each step every remaining group has features of its place as the next
one: links to its stage, to the stage before, to its replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled, inner

__all__ = ["STEP_FEATURES", "Ordering"]

Array = NDArray[np.float32]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Number of features of each group at each step.
STEP_FEATURES = 16

#: Initial value of a minimum over links.
_NONE = np.float32(9.0)


class _Problem(NamedTuple):
    """Constants of the orders; G groups, n orders."""

    sizes: Index
    kinds: Index
    speed: Array
    memory: Array
    bandwidth: Array
    latency: Array
    devices: Index
    stage: Index
    block: Index
    inner: Index


class _State(NamedTuple):
    """Orders so far. Shapes [n, G], [n, devices] or [n]."""

    left: Mask
    sequence: Index
    length: Index
    position: Index
    owner: Index
    in_stage: Array
    in_block: Array
    before: Array
    speed: Array
    memory: Array


@inner
def _take(problem: _Problem, state: _State, row: int, group: int) -> None:
    """Put a group next in one order."""
    start, stage, block = state.position[row], problem.stage[row], problem.block[row]
    stop = min(start + problem.sizes[group], problem.devices[row])
    state.owner[row, start:stop] = group
    state.sequence[row, state.length[row]] = group
    state.length[row] += 1
    state.left[row, group] = False
    state.position[row] = stop
    links = problem.bandwidth[group]
    for other in range(len(links)):
        joined = min(state.in_stage[row, other], links[other])
        if start // stage == stop // stage:
            state.in_stage[row, other] = joined
        else:
            # A group that fills the stage before is alone in it.
            alone = start // stage < stop // stage - 1
            state.before[row, other] = links[other] if alone else joined
            state.in_stage[row, other] = links[other] if stop % stage else _NONE
        if start // block == stop // block:
            near = min(state.in_block[row, other], links[other])
            state.in_block[row, other] = near
        else:
            state.in_block[row, other] = links[other] if stop % block else _NONE
    fresh = start % stage == 0 or start // stage != stop // stage
    if fresh:
        state.speed[row] = problem.speed[group]
        state.memory[row] = problem.memory[group]
    else:
        state.speed[row] = min(state.speed[row], problem.speed[group])
        state.memory[row] = min(state.memory[row], problem.memory[group])


@inner
def _describe(problem: _Problem, state: _State, row: int, steps: Array) -> None:
    """Write features of the remaining groups; 0 for others. [G, STEP_FEATURES]."""
    at, count = state.position[row], problem.devices[row]
    stage, inner = problem.stage[row], problem.inner[row]
    offset = at % stage
    last = state.sequence[row, state.length[row] - 1] if state.length[row] else -1
    peer = state.owner[row, at - stage] if at >= stage else -1
    remaining = 0
    of_kind = np.zeros(problem.kinds.max() + 1)
    for group in range(len(problem.sizes)):
        if state.left[row, group]:
            remaining += problem.sizes[group]
            of_kind[problem.kinds[group]] += problem.sizes[group]
    for group in range(len(problem.sizes)):
        steps[group, :] = 0.0
        if not state.left[row, group]:
            continue
        size, seen = problem.sizes[group], steps[group]
        seen[0], seen[1] = at / count, offset / stage
        seen[2] = (at // stage) / max(count // stage, 1)
        seen[3] = offset + size <= stage
        seen[4] = offset + size == stage
        seen[5] = at % inner == 0 and (size % inner == 0 or inner % size == 0)
        seen[6] = offset > 0
        if offset > 0:
            seen[7] = state.in_stage[row, group]
            seen[12] = problem.speed[group] - state.speed[row]
            seen[13] = problem.memory[group] - state.memory[row]
        if at % problem.block[row]:
            seen[8] = state.in_block[row, group]
        if peer >= 0:
            seen[9] = problem.bandwidth[peer, group]
            seen[10] = problem.latency[peer, group]
            seen[11] = state.before[row, group]
        if last >= 0:
            seen[14] = problem.bandwidth[last, group]
        seen[15] = of_kind[problem.kinds[group]] / remaining


@compiled
def _describe_all(problem: _Problem, state: _State, steps: Array) -> None:
    for row in range(len(steps)):
        if state.position[row] < problem.devices[row]:
            _describe(problem, state, row, steps[row])
        else:
            steps[row] = 0.0


@compiled
def _take_all(problem: _Problem, state: _State, chosen: Index) -> None:
    for row in range(len(chosen)):
        if state.position[row] < problem.devices[row]:
            _take(problem, state, row, chosen[row])


@dataclass(frozen=True, eq=False, slots=True)
class Ordering:
    """Orders under construction, all over the same groups.

    Attributes:
        problem: Groups and meshes.
        state: The orders so far.
    """

    problem: _Problem
    state: _State = field(repr=False)

    @classmethod
    def start(
        cls,
        *,
        sizes: Index,
        kinds: Index,
        groups: Array,
        pairs: Array,
        mesh: Index,
        count: Index,
        usable: Mask,
    ) -> Ordering:
        """Begin empty orders.

        Args:
            sizes: Devices in each group. Shape [G].
            kinds: Device type of each group. Shape [G].
            groups: Features of the groups, see :mod:`envs.partition.features`.
            pairs: Features of pairs of groups. Shape [G, G, 2].
            mesh: Columns :data:`planner.space.MESH_COLUMNS` of each order. [n, 6].
            count: Devices that each order needs. Shape [n].
            usable: Groups that each may use. Shape [n, G].
        """
        pp, _, shard, cp, tp, _ = mesh.T
        many, number = usable.shape
        problem = _Problem(
            sizes=np.ascontiguousarray(sizes, dtype=np.int64),
            kinds=np.ascontiguousarray(kinds, dtype=np.int64),
            speed=np.ascontiguousarray(groups[:, 1]),
            memory=np.ascontiguousarray(groups[:, 2]),
            bandwidth=np.ascontiguousarray(pairs[:, :, 0]),
            latency=np.ascontiguousarray(pairs[:, :, 1]),
            devices=np.ascontiguousarray(count, dtype=np.int64),
            stage=np.ascontiguousarray(count // pp, dtype=np.int64),
            block=np.ascontiguousarray(shard * cp * tp, dtype=np.int64),
            inner=np.ascontiguousarray(cp * tp, dtype=np.int64),
        )
        state = _State(
            left=usable.copy(),
            sequence=np.full((many, number), -1, dtype=np.int64),
            length=np.zeros(many, dtype=np.int64),
            position=np.zeros(many, dtype=np.int64),
            owner=np.full((many, int(count.max(initial=1))), -1, dtype=np.int64),
            in_stage=np.full((many, number), _NONE, dtype=np.float32),
            in_block=np.full((many, number), _NONE, dtype=np.float32),
            before=np.zeros((many, number), dtype=np.float32),
            speed=np.zeros(many, dtype=np.float32),
            memory=np.zeros(many, dtype=np.float32),
        )
        return cls(problem, state)

    @property
    def going(self) -> Mask:
        """True for orders that need more devices. Shape [n]."""
        return np.asarray(self.state.position < self.problem.devices)

    @property
    def left(self) -> Mask:
        """True for groups that may come next. Shape [n, G]."""
        return self.state.left

    def describe(self) -> Array:
        """Return features of every group as the next one. [n, G, STEP_FEATURES]."""
        steps = np.empty((*self.state.left.shape, STEP_FEATURES), dtype=np.float32)
        _describe_all(self.problem, self.state, steps)
        return steps

    def take(self, chosen: Index) -> None:
        """Put a group next in each order that still needs one. Shape [n]."""
        _take_all(self.problem, self.state, np.ascontiguousarray(chosen))

    def sequences(self) -> Index:
        """Return the orders, then the remaining groups, then -1. Shape [n, G]."""
        made = self.state.sequence.copy()
        for row in range(len(made)):
            rest = np.flatnonzero(self.state.left[row])
            length = int(self.state.length[row])
            made[row, length : length + len(rest)] = rest
        return made
