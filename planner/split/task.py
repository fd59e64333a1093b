"""What is to be split: operators that are no chain, and the devices they go to.

Each operator runs on one device. Accelerators pay for what they compute and for every
output that crosses their border; CPUs, which hold the host memory that outputs pass
through, pay for computing alone. What is sought is the smallest largest load.
Source: Tarnawski et al. 2020, arXiv 2006.16423, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planner.errors import StrategyError

__all__ = [
    "Array",
    "Graph",
    "Index",
    "Mask",
    "NodeId",
    "Precedence",
    "SplitTask",
    "neighbours",
    "precedence",
    "summed",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]
NodeId = int | str


def neighbours(keys: Index, values: Index, size: int) -> tuple[Index, Index]:
    """Lists of values by key: those of key k are ``flat[start[k] : start[k + 1]]``.

    Args:
        keys: Of each pair. Shape [pairs], below ``size``.
        values: Of each pair. Shape [pairs].
        size: Number of keys.

    Returns:
        ``start``, shape [size + 1], and ``flat``, shape [pairs].
    """
    start = np.zeros(size + 1, dtype=np.int64)
    np.cumsum(np.bincount(keys, minlength=size), out=start[1:])
    return start, values[np.argsort(keys, kind="stable")]


class Precedence(Protocol):
    """What is put in an order: things, and those that come before and after each."""

    @property
    def before_start(self) -> Index:
        """Starts of those that must not come later. Shape [m + 1]."""

    @property
    def before(self) -> Index:
        """Those, one thing's after the other's."""

    @property
    def after_start(self) -> Index:
        """Starts of those that must not come earlier. Shape [m + 1]."""

    @property
    def after(self) -> Index:
        """Those, one thing's after the other's."""

    def __len__(self) -> int:
        """How many things there are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """A :class:`Precedence` and nothing else."""

    before_start: Index
    before: Index
    after_start: Index
    after: Index

    def __len__(self) -> int:
        return len(self.after_start) - 1


def precedence(source: Index, target: Index, size: int) -> Graph:
    """The order that edges ask for.

    Args:
        source: Producers. Shape [e].
        target: Consumers. Shape [e].
        size: Number of nodes.
    """
    before_start, before = neighbours(target, source, size)
    after_start, after = neighbours(source, target, size)
    return Graph(
        before_start=before_start, before=before, after_start=after_start, after=after
    )


def summed(keys: Index, values: Array, size: int) -> Array:
    """Sum of the values of each key. Shape [size]."""
    return np.bincount(keys, values, minlength=size).astype(np.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitTask:
    """Operators, what flows between them, and the devices there are.

    A device is a number: accelerators come first, then CPUs.

    Attributes:
        name: Of the instance.
        nodes: Ids of the operators. Length n.
        accelerator_ms: Time on an accelerator. Shape [n].
        cpu_ms: Time on a CPU. Shape [n].
        size_bytes: Memory held on an accelerator. Shape [n].
        colour: Class, dense from 0; one class lies on one device. A node without a
            class has one for itself. Shape [n].
        backward: Whether it belongs to the backward pass. Shape [n].
        supported: Whether an accelerator can run it. Shape [n].
        transfer_ms: Time to move its output between an accelerator and the host's
            memory, paid once by each accelerator on either side. Shape [n].
        edge_source: Producers. Shape [e].
        edge_target: Consumers. Shape [e].
        accelerators: How many there are.
        cpus: How many there are.
        memory_bytes: Of one accelerator.
    """

    name: str
    nodes: tuple[NodeId, ...]
    accelerator_ms: Array
    cpu_ms: Array
    size_bytes: Array
    colour: Index
    backward: Mask
    supported: Mask
    transfer_ms: Array
    edge_source: Index
    edge_target: Index
    accelerators: int
    cpus: int
    memory_bytes: float

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def devices(self) -> int:
        """Accelerators and CPUs together."""
        return self.accelerators + self.cpus

    @property
    def device_names(self) -> tuple[str, ...]:
        """``acc0`` to ``cpu0`` and on, by device number."""
        return tuple(f"acc{i}" for i in range(self.accelerators)) + tuple(
            f"cpu{i}" for i in range(self.cpus)
        )

    @cached_property
    def successors(self) -> tuple[Index, Index]:
        """Consumers by producer: starts [n + 1] and nodes [e]."""
        return neighbours(self.edge_source, self.edge_target, len(self))

    @cached_property
    def predecessors(self) -> tuple[Index, Index]:
        """Producers by consumer: starts [n + 1] and nodes [e]."""
        return neighbours(self.edge_target, self.edge_source, len(self))

    @cached_property
    def topological(self) -> Index:
        """Nodes with producers first, the lowest number first where free. Shape [n].

        Raises:
            StrategyError: If the edges form a cycle.
        """
        start, flat = self.successors
        waits = np.bincount(self.edge_target, minlength=len(self))
        order = [int(v) for v in np.flatnonzero(waits == 0)]
        for node in order:
            for after in flat[start[node] : start[node + 1]]:
                waits[after] -= 1
                if waits[after] == 0:
                    order.append(int(after))
        if len(order) < len(self):
            stuck = self.nodes[int(np.flatnonzero(waits > 0)[0])]
            raise StrategyError(
                f"{self.name}: node {stuck!r} lies on or behind a cycle of edges; "
                f"operators must form an acyclic graph: remove the edge back"
            )
        return np.array(order, dtype=np.int64)

    def named(self, assignment: Index) -> dict[NodeId, str]:
        """Device name by node id.

        Args:
            assignment: Device number of each node. Shape [n].
        """
        names = self.device_names
        return {
            node: names[device]
            for node, device in zip(self.nodes, assignment.tolist(), strict=True)
        }
