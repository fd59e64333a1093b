"""Forward graphs drawn by chance, in the shapes that real networks have.

Work, outputs and sizes are relative; :mod:`policies.split.worlds` gives them units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

__all__ = ["FAMILIES", "Sketch", "draw_sketch"]

_Chance = np.random.Generator


@dataclass(slots=True, kw_only=True)
class Sketch:
    """A graph while it is drawn; producers come before consumers.

    Attributes:
        work: Of each operator.
        out: Size of its output.
        size: Memory it holds.
        edges: Producers and consumers.
    """

    work: list[float] = field(default_factory=list)
    out: list[float] = field(default_factory=list)
    size: list[float] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.work)

    def op(
        self, *before: int, work: float, out: float = 1.0, size: float | None = None
    ) -> int:
        """Put in an operator that reads others' outputs, and return its number."""
        at = len(self.work)
        self.work.append(work)
        self.out.append(out)
        self.size.append(work if size is None else size)
        self.edges += [(u, at) for u in dict.fromkeys(before)]
        return at

    def run(self, start: int, works: Sequence[float], out: float = 1.0) -> int:
        """Put in operators one after the other, and return the last."""
        for work in works:
            start = self.op(start, work=work, out=out)
        return start


def _few(rng: _Chance, count: int, spread: float = 0.8) -> list[float]:
    return [float(w) for w in rng.lognormal(0.0, spread, count)]


def _residual(rng: _Chance, room: int) -> Sketch:
    """Blocks of a few operators with a way around each, as in ResNet."""
    sketch = Sketch()
    at = sketch.op(work=float(rng.uniform(0.1, 4)), out=4.0)
    inner = int(rng.integers(2, 8))
    out = 4.0
    while len(sketch) + inner + 2 < room:
        shrinks = rng.random() < 0.2
        end = sketch.run(at, _few(rng, inner), out * float(rng.uniform(0.3, 1)))
        out = max(out / 2, 0.2) if shrinks else out
        if shrinks:
            at = sketch.op(at, work=float(rng.uniform(0.2, 1)), out=out)
        at = sketch.op(at, end, work=float(rng.uniform(0, 0.3)), out=out)
    return sketch


def _branching(rng: _Chance, room: int) -> Sketch:
    """Modules of parallel branches that are put together again, as in Inception."""
    sketch = Sketch()
    at = sketch.run(sketch.op(work=1.0, out=3.0), _few(rng, 3), 3.0)
    widest, longest = int(rng.integers(2, 9)), int(rng.integers(2, 9))
    out = 2.0
    while len(sketch) + widest * longest // 2 + 1 < room:
        ends = []
        for _ in range(int(rng.integers(2, widest + 1))):
            length = int(rng.integers(1, longest + 1))
            part = out * float(rng.uniform(0.1, 0.6))
            ends.append(sketch.run(at, _few(rng, length, 1.0), part))
            if length > 2 and rng.random() < 0.2:
                ends.append(sketch.op(ends[-1] - 1, work=_few(rng, 1)[0], out=part))
        at = sketch.op(*ends, work=float(rng.uniform(0, 0.2)), out=out)
        out = max(out * float(rng.choice([1.0, 1.0, 0.6])), 0.2)
    return sketch


def _attend(
    sketch: Sketch, rng: _Chance, x: int, memory: int, mask: int | None, heads: int
) -> int:
    """Attention of x to memory, head by head."""
    q, k, v = (
        sketch.op(source, work=float(rng.uniform(0.8, 1.2)))
        for source in (x, memory, memory)
    )
    mixed = []
    for _ in range(heads):
        wide = float(rng.uniform(0.5, 2))
        score = sketch.op(q, k, work=0.5 / heads, out=wide, size=0.0)
        if mask is not None:
            score = sketch.op(score, mask, work=0.05 / heads, out=wide, size=0.0)
        soft = sketch.op(score, work=0.2 / heads, out=wide, size=0.0)
        mixed.append(sketch.op(soft, v, work=0.5 / heads, out=1 / heads, size=0.0))
    joined = sketch.op(*mixed, work=float(rng.uniform(0.8, 1.2)))
    return sketch.op(x, joined, work=0.1, size=0.0)


def _transformer(rng: _Chance, room: int) -> Sketch:
    """Encoder, or encoder and decoder, operator by operator."""
    sketch = Sketch()
    heads = int(rng.choice([1, 2, 4, 8, 12]))
    masked = rng.random() < 0.6
    mask = sketch.op(work=0.01, out=float(rng.uniform(0.5, 20))) if masked else None
    ffn = float(rng.uniform(1, 4))
    layer = 4 + heads * (4 if masked else 3) + 5
    layers = max((room - 4) // layer, 1)
    decoder = rng.random() < 0.35 and layers >= 3
    first = layers // 3 if decoder else layers

    def feed(x: int) -> int:
        up = sketch.op(x, work=ffn, out=4.0)
        down = sketch.op(up, work=ffn)
        return sketch.op(x, down, work=0.1, size=0.0)

    x = sketch.op(work=float(rng.uniform(0, 1)), size=float(rng.uniform(1, 6)))
    for _ in range(first):
        x = feed(_attend(sketch, rng, x, x, mask, heads))
    if decoder:
        memory = x
        x = sketch.op(work=float(rng.uniform(0, 1)))
        for _ in range((layers - first) // 2):
            x = _attend(sketch, rng, x, x, mask, heads)
            x = feed(_attend(sketch, rng, x, memory, None, heads))
    sketch.op(x, work=float(rng.uniform(0.5, 10)), out=float(rng.uniform(1, 20)))
    return sketch


def _grid(rng: _Chance, room: int) -> Sketch:
    """Recurrent layers unrolled over time, at times read by a second stack."""
    sketch = Sketch()
    stacks = int(rng.integers(1, 3))
    layers = int(rng.integers(2, 7))
    times = max(room // (stacks * layers) - 1, 2)
    heavy = float(rng.uniform(0.2, 3))
    read: list[int] = []
    for _ in range(stacks):
        below = [sketch.op(work=heavy / 5) for _ in range(times)]
        if read:
            join = sketch.op(*read, work=heavy, out=2.0)
            below = [sketch.op(at, join, work=heavy / 2) for at in below]
        for _ in range(layers - 1):
            row: list[int] = []
            cost = heavy * float(rng.uniform(0.5, 2))
            for at in below:
                row.append(sketch.op(*row[-1:], at, work=cost, size=cost / times))
            below = row
        read = below
    sketch.op(*read, work=1.0)
    return sketch


def _series_parallel(rng: _Chance, room: int) -> Sketch:
    """Runs, and branches of runs and branches."""
    sketch = Sketch()
    spread = float(rng.uniform(0.3, 1.3))

    def draw(at: int, left: int) -> int:
        if left <= 3:
            outs = rng.lognormal(0.0, spread, left)
            for work, out in zip(_few(rng, left, spread), outs, strict=True):
                at = sketch.op(at, work=work, out=float(out))
            return at
        parts = int(rng.integers(2, min(left, 5) + 1))
        sizes = rng.multinomial(left - 1, rng.dirichlet(np.ones(parts)))
        if rng.random() < 0.5:
            for size in sizes:
                at = draw(at, int(size))
            return sketch.op(at, work=_few(rng, 1, spread)[0])
        ends = [draw(at, int(size)) for size in sizes]
        return sketch.op(*ends, work=_few(rng, 1, spread)[0])

    draw(sketch.op(work=0.5), room - 1)
    return sketch


def _towers(rng: _Chance, room: int) -> Sketch:
    """Several inputs with a run each that meet, with a few cross links."""
    sketch = Sketch()
    count = int(rng.integers(2, 7))
    length = max((room - 6) // count, 2)
    rows: list[list[int]] = []
    for _ in range(count):
        out = float(rng.lognormal(0.0, 1.0))
        row = [sketch.op(work=_few(rng, 1)[0], out=out)]
        for work in _few(rng, int(rng.integers(1, length)), 0.7):
            others = [r[len(r) * len(row) // length] for r in rows if r]
            also = [int(rng.choice(others))] if others and rng.random() < 0.08 else []
            row.append(sketch.op(row[-1], *also, work=work, out=out))
        rows.append(row)
    at = sketch.op(*(row[-1] for row in rows), work=0.5, out=2.0)
    sketch.run(at, _few(rng, 5))
    return sketch


#: By name: draws a graph of about so many operators.
FAMILIES: dict[str, Callable[[_Chance, int], Sketch]] = {
    "residual": _residual,
    "branching": _branching,
    "transformer": _transformer,
    "grid": _grid,
    "series_parallel": _series_parallel,
    "towers": _towers,
}


def draw_sketch(rng: _Chance, room: int) -> tuple[str, Sketch]:
    """A graph of any family.

    Args:
        rng: What is left to chance.
        room: About how many operators.

    Returns:
        Its family and the graph.
    """
    family = str(rng.choice(list(FAMILIES)))
    return family, FAMILIES[family](rng, room)
