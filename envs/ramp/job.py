"""A job of the benchmark: a PipeDream profile and its mirror image, the backward pass.

Forward op ``i`` of ``n`` is mirrored by op ``2n + 1 - i`` with the same edges reversed;
one edge joins the last forward op to its mirror. Ops are kept in the order of the
profile's lines, because every tie of the benchmark is broken by that order.
"""

from __future__ import annotations

import math
import os
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.capture.pipedream import ProfileNode, parse_profile
from planner.errors import CaptureError

__all__ = ["NUM_TRAINING_STEPS", "RampJob"]

#: Training steps of every job. Source: as the package, section 4.
NUM_TRAINING_STEPS = 50
#: Least compute time of a sub-op, in the profile's unit.
_QUANTUM = 0.01

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class RampJob:
    """A model to train. All arrays are over forward ops, in the order of their lines.

    Attributes:
        name: Name of the model.
        position: Line of the op with each id, from 1. Shape [n + 1].
        ids: Ids of the ops, 1 to n. Shape [n].
        forward: Compute times, in the profile's unit. Shape [n].
        backward: Compute times of the mirrored ops. Shape [n].
        memory: Bytes of activations and parameters. Shape [n].
        activations: Bytes that an edge carries before the job is split. Shape [n].
        edges: Pairs of op positions, in the order of their lines. Shape [edges, 2].
        order: Positions in topological order, first in first out. Shape [n].
    """

    name: str
    position: Index
    ids: Index
    forward: Array
    backward: Array
    memory: Array
    activations: Array
    edges: Index
    order: Index

    @classmethod
    def from_profile(cls, path: str | os.PathLike[str]) -> RampJob:
        """Read a profile.

        Raises:
            CaptureError: If a line is malformed, or ids are not 1 to n.
        """
        file = Path(path)
        nodes, listed = parse_profile(file)
        ids = np.array([_number(node, file) for node in nodes.values()], dtype=np.int64)
        count = len(ids)
        if sorted(ids.tolist()) != list(range(1, count + 1)):
            raise CaptureError(
                f"{file.name} numbers its nodes {ids.min()} to {ids.max()} for {count} "
                f"of them; a job's mirror image needs node1 to node{count}"
            )
        position = np.zeros(count + 1, dtype=np.int64)
        position[ids] = np.arange(count)
        place = {name: index for index, name in enumerate(nodes)}
        edges = np.array(
            [(place[a], place[b]) for a, b, _ in listed], dtype=np.int64
        ).reshape(-1, 2)

        def column(*values: float) -> Array:
            return np.array(values, dtype=np.float64)

        made = list(nodes.values())
        activations = column(*(sum(node.activations) for node in made))
        return cls(
            name=file.stem,
            position=position,
            ids=ids,
            forward=column(*(node.forward_ms for node in made)),
            backward=column(*(node.backward_ms for node in made)),
            memory=activations + column(*(node.parameter_bytes for node in made)),
            activations=activations,
            edges=edges,
            order=_kahn(count, edges, file),
        )

    @cached_property
    def sequential_jct_s(self) -> float:
        """Completion time on one device.

        Summed forward in the order of the lines, then backward by id: the last bit
        decides whether a job of degree 1 meets a deadline of exactly this.
        """
        mirrored = self.backward[self.position[:0:-1]]
        # Not sum(): from Python 3.12 on it compensates for rounding.
        totals = np.add.accumulate(np.concatenate([self.forward, mirrored]))
        return NUM_TRAINING_STEPS * float(totals[-1])

    @cached_property
    def demand_bytes(self) -> float:
        """Memory of all ops and size of all edges, the unit of throughput."""
        sources, targets = self.edges[:, 0], self.edges[:, 1]
        last = self.activations[self.position[-1]]
        sent = self.activations[sources].sum() + self.activations[targets].sum() + last
        return float(2 * self.memory.sum() + sent)

    def splits(self, degree: int) -> Index:
        """Return the sub-ops of each op, equal for both of its passes. Shape [n].

        An op is split so far that no sub-op is shorter than the quantum, into an even
        number of at most ``degree``.
        """
        found = []
        for time in self.forward.tolist():
            pieces = 2 * math.ceil(math.ceil(time / _QUANTUM) / 2)
            found.append(1 if time == 0 else max(1, min(pieces, degree)))
        return np.array(found, dtype=np.int64)


def _number(node: ProfileNode, file: Path) -> int:
    digits = node.name.removeprefix("node")
    if not digits.isdigit():
        raise CaptureError(
            f"{file.name}: node {node.name!r} has no number; name nodes node1, node2, …"
        )
    return int(digits)


def _kahn(count: int, edges: Index, file: Path) -> Index:
    """Topological order: sources as listed, then ops in the order they become ready."""
    after: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for source, target in edges.tolist():
        after[source].append(target)
        waiting[target] += 1
    ready = deque(op for op in range(count) if not waiting[op])
    order: list[int] = []
    while ready:
        op = ready.popleft()
        order.append(op)
        for follower in after[op]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    if len(order) < count:
        raise CaptureError(f"{file.name}: its edges form a cycle; a job is acyclic")
    return np.array(order, dtype=np.int64)
