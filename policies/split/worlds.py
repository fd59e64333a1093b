"""Split tasks drawn by chance, for training and for validation.

Tasks are told apart by what they are for: a number names another task in each part, so
that no validation task is ever trained on. Published tasks are in none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.errors import NoFeasiblePlanError, StrategyError, UnknownNameError
from planner.split import Groups, SplitTask, group
from policies.split.graphs import Sketch, draw_sketch

__all__ = ["PARTS", "WorldConfig", "draw_groups", "draw_task"]

#: What tasks are drawn for.
PARTS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """What tasks are drawn from.

    Attributes:
        least: Fewest operators of a forward graph, about.
        most: Most of them.
    """

    least: int = 24
    most: int = 160

    def __post_init__(self) -> None:
        if not 12 <= self.least <= self.most:
            raise StrategyError(
                f"least={self.least}, most={self.most} operators; least is at least "
                f"12, most is not below it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ops:
    """Operators of a task, and the edges between them."""

    work: list[float]
    out: list[float]
    size: list[float]
    colour: list[int]
    backward: list[bool]
    edges: list[tuple[int, int]]


def _with_backward(sketch: Sketch, rng: np.random.Generator) -> _Ops:
    """Forward operators, and one that mirrors each; a few mirrors come in two steps."""
    n = len(sketch)
    work, out, size = list(sketch.work), list(sketch.out), list(sketch.size)
    colour = list(range(n))
    ratio = float(rng.uniform(1, 2.5))
    for v in range(n):
        work.append(sketch.work[v] * ratio * float(rng.uniform(0.7, 1.3)))
        out.append(sketch.out[v])
        size.append(sketch.size[v] * float(rng.uniform(0, 1)))
        colour.append(v)
    edges = list(sketch.edges)
    extra = float(rng.choice([0.0, 0.15]))
    for u, v in sketch.edges:
        edges.append((v, n + v))
        if rng.random() < extra:
            # A step of the backward pass that no forward operator goes with.
            step = len(work)
            work.append(0.2 * sketch.work[u])
            out.append(sketch.out[u])
            size.append(0.0)
            colour.append(step)
            edges += [(n + v, step), (step, n + u)]
        else:
            edges.append((n + v, n + u))
    return _Ops(
        work=work,
        out=out,
        size=size,
        colour=[int(c) for c in np.unique(colour, return_inverse=True)[1]],
        backward=[v >= n for v in range(len(work))],
        edges=list(dict.fromkeys(edges)),
    )


def _forward(sketch: Sketch) -> _Ops:
    n = len(sketch)
    return _Ops(
        work=sketch.work,
        out=sketch.out,
        size=sketch.size,
        colour=list(range(n)),
        backward=[False] * n,
        edges=sketch.edges,
    )


def draw_task(
    number: int, part: str = "train", config: WorldConfig | None = None
) -> SplitTask:
    """The task of this number; the same each time.

    Args:
        number: Not negative.
        part: One of :data:`PARTS`.
        config: What is drawn from.

    Raises:
        UnknownNameError: If there is no such part.
    """
    if part not in PARTS:
        raise UnknownNameError("part", part, PARTS)
    config = config or WorldConfig()
    seeds = np.random.SeedSequence(number, spawn_key=(PARTS.index(part),))
    rng = np.random.default_rng(seeds)
    room = int(np.exp(rng.uniform(np.log(config.least), np.log(config.most + 1))))
    family, sketch = draw_sketch(rng, room)
    training = bool(rng.random() < 0.5)
    ops = _with_backward(sketch, rng) if training else _forward(sketch)
    n = len(ops.work)
    work = np.array(ops.work) * rng.lognormal(0.0, rng.uniform(0, 0.4), n)
    out = np.array(ops.out) * rng.lognormal(0.0, rng.uniform(0, 0.4), n)
    # An output costs from nothing to some times what an operator computes.
    dear = float(np.exp(rng.uniform(np.log(5e-4), np.log(8.0))))
    size = np.array(ops.size)
    accelerators = int(rng.integers(2, 9))
    source, target = np.array(ops.edges, dtype=np.int64).reshape(-1, 2).T
    tight = float(rng.choice([0.05, 0.3, 0.6, 0.8]))
    room_bytes = size.sum() / (accelerators * tight)
    return SplitTask(
        name=f"{family}_{'training' if training else 'inference'}_{part}_{number}",
        nodes=tuple(range(n)),
        accelerator_ms=work,
        cpu_ms=work * float(rng.choice([5.0, 10.0, 23.0])),
        size_bytes=size,
        colour=np.array(ops.colour, dtype=np.int64),
        backward=np.array(ops.backward, dtype=bool),
        supported=np.ones(n, dtype=bool),
        transfer_ms=out * dear * float(work.mean() / out.mean()),
        edge_source=source,
        edge_target=target,
        accelerators=accelerators,
        cpus=int(rng.integers(0, 2)),
        memory_bytes=float(max(room_bytes, 1.2 * size.max(initial=0.0), 1e-6)),
    )


def draw_groups(
    first: int, count: int, part: str = "train", config: WorldConfig | None = None
) -> list[Groups]:
    """Groups of tasks that have an order to choose, from the first number on.

    Args:
        first: Number of the first task.
        count: How many tasks.
        part: One of :data:`PARTS`.
        config: What is drawn from.
    """
    found: list[Groups] = []
    number = first
    while len(found) < count:
        try:
            groups = group(draw_task(number, part, config))
        except NoFeasiblePlanError:
            groups = None
        if groups is not None and len(groups) > 8:
            found.append(groups)
        number += 1
    return found
