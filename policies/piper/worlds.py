"""Piper tasks drawn by chance, for training and for validation.

Tasks are told apart by what they are for: a number names another task in each part, so
that no validation task is ever trained on. Published tasks are in none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.errors import StrategyError, UnknownNameError
from planner.split import PiperTask
from planner.split.task import Array
from policies.split.graphs import Sketch, draw_sketch

__all__ = ["PARTS", "PiperWorld", "draw_piper", "draw_tasks"]

#: What tasks are drawn for.
PARTS = ("train", "validation", "test")

_MICROBATCHES = (32, 64, 96, 128, 256, 480, 512, 768, 1024, 1920, 2048, 4096, 7680)
_OPTIONS = ("vanilla", "activation recomp")


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperWorld:
    """What tasks are drawn from.

    Attributes:
        least: Fewest layers, about.
        most: Most of them.
        devices: Most devices.
    """

    least: int = 12
    most: int = 200
    devices: int = 512

    def __post_init__(self) -> None:
        if not 12 <= self.least <= self.most or self.devices < 4:
            raise StrategyError(
                f"least={self.least}, most={self.most} layers, devices={self.devices}; "
                f"least is at least 12, most is not below it, devices are 4 or more"
            )


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _chain(rng: np.random.Generator, room: int) -> Sketch:
    """Layers one after the other, blocks of a kind, with or without a common input."""
    sketch = Sketch()
    mask = sketch.op(work=0.0, out=float(rng.uniform(0.1, 2)), size=0.0)
    at = sketch.op(work=float(rng.uniform(0, 0.5)), size=float(rng.uniform(0, 8)))
    shared = rng.random() < 0.5
    block = rng.lognormal(0.0, 0.6, int(rng.integers(1, 4)))
    while len(sketch) < room - 2:
        for work in block:
            before = (at, mask) if shared else (at,)
            at = sketch.op(*before, work=float(work * rng.lognormal(0.0, 0.02)))
    at = sketch.op(at, work=float(rng.uniform(0, 4)), size=float(rng.uniform(0, 8)))
    if not shared:
        sketch.edges.append((mask, 1))
    return sketch


def _sketch(rng: np.random.Generator, room: int) -> tuple[str, Sketch]:
    if rng.random() < 0.4:
        return "chain", _chain(rng, room)
    return draw_sketch(rng, room)


def _columns(
    sketch: Sketch, degrees: Array, rng: np.random.Generator
) -> tuple[Array, Array, Array, Array, Array]:
    """Time, bytes to synchronise, each, once, and outputs. Shapes [n, t, 2] and [n]."""
    n = len(sketch)
    work = np.array(sketch.work) * rng.lognormal(0.0, rng.uniform(0, 0.3), n)
    out = np.array(sketch.out) * rng.lognormal(0.0, rng.uniform(0, 0.3), n)
    weight = np.array(sketch.size) * _log_uniform(rng, 0.05, 20)
    # Of what a layer keeps for its backward pass some is its input alone.
    kept = out * rng.uniform(0.02, 0.5, n)
    full = kept + (out + work) * _log_uniform(rng, 0.3, 10)
    slower = 1 + rng.uniform(0.1, 0.45) * rng.uniform(0.8, 1.1, n)
    speed = degrees ** rng.uniform(0.5, 0.95)
    split = degrees ** rng.uniform(0.6, 1.0)
    time = (work[:, None] / speed)[:, :, None] * np.stack([np.ones(n), slower], 1)[
        :, None
    ]
    each = np.stack(
        [
            np.maximum(full[:, None] / split, kept[:, None]),
            np.tile(kept[:, None], len(degrees)),
        ],
        axis=2,
    )
    held = weight[:, None] / degrees
    once = held[:, :, None] * float(rng.choice([1.0, 2.0, 4.0])) + each[:, :, :1] - each
    both = np.repeat(held[:, :, None], 2, axis=2)
    return time, both, each, once, out


def draw_piper(
    number: int, part: str = "train", world: PiperWorld | None = None
) -> PiperTask:
    """The task of this number; the same each time. It may be that nothing fits.

    Args:
        number: Not negative.
        part: One of :data:`PARTS`.
        world: What is drawn from.

    Raises:
        UnknownNameError: If there is no such part.
    """
    if part not in PARTS:
        raise UnknownNameError("part", part, PARTS)
    world = world or PiperWorld()
    seeds = np.random.SeedSequence(number, spawn_key=(7, PARTS.index(part)))
    rng = np.random.default_rng(seeds)
    family, sketch = _sketch(rng, int(_log_uniform(rng, world.least, world.most + 1)))
    n = len(sketch)
    degrees = np.array([1, 2, 4, 8][: int(rng.choice([1, 1, 3, 4]))], dtype=np.int64)
    time, weight, each, once, out = _columns(sketch, degrees.astype(float), rng)
    edges = list(dict.fromkeys(sketch.edges))
    source, target = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    moved = out[source]
    sync = moved[:, None] * (degrees > 1) * float(rng.uniform(0, 1))
    sync = np.repeat(sync[:, :, None], 2, axis=2)
    devices = int(2 ** rng.integers(2, np.log2(world.devices) + 1)) * int(
        rng.choice([1, 1, 1, 3])
    )
    devices = min(devices, world.devices)
    # From what no way of sharing fits into to what one device has room for.
    alone = float((once[:, 0, 0] + each[:, 0, 0]).sum())
    least = float((once[:, -1].min(axis=1) + each[:, -1].min(axis=1)).max())
    fair = alone / min(devices, n)
    memory = max(fair, least) * _log_uniform(rng, 0.7, 4 * min(devices, n))
    dear = _log_uniform(rng, 3e-4, 0.3)
    return PiperTask(
        name=f"{family}_{part}_{number}",
        nodes=tuple(range(n)),
        degrees=degrees,
        option_names=((_OPTIONS,) * len(degrees),) * n,
        time=time,
        weight_bytes=weight,
        memory_each=each,
        memory_once=once,
        edge_source=source,
        edge_target=target,
        edge_bytes=moved,
        sync_in=sync,
        sync_out=sync,
        devices=devices,
        memory_bytes=memory,
        bandwidth=float(moved.sum() / time[:, 0, 0].sum() / dear),
        microbatches=int(rng.choice(_MICROBATCHES)),
    )


def draw_tasks(
    first: int, part: str = "train", world: PiperWorld | None = None
) -> Iterator[PiperTask]:
    """Tasks from a number on, without end."""
    while True:
        yield draw_piper(first, part, world)
        first += 1
