"""Independent subnetwork training of quadratics: its rate, and its bias.

python -m benchmarks.subnetwork_theory [--seeds 3] [--steps 100000] [--out docs]

Worker i of n has f_i(x) = x^T L_i x / 2 - b_i^T x. Each step deals the d coordinates to
the workers by a random permutation, q = d / n to each, and worker i trains on its own:

x <- 1/n sum_i [C_i x - gamma S_i grad f_i(S_i x)]

where C_i = n P_i for the projection P_i on its coordinates, so that sum C_i / n = I.
Without preconditioning S_i is C_i; with it S_i = C_i (n D_i)^(-1/2), D_i = diag(L_i),
so that a step of q = 1 is x <- (1 - gamma) x + gamma 1/n sum S_i b_i. With b = 0 that
converges linearly. Else the expected iterate goes to

(1/sqrt n) mean(D_i^(-1/2) b_i)

and not to the optimum, whatever the learning rates: the bias is the method's. For q > 1
the same holds with a matrix in front, see :func:`limit`.
Source: Shulgin and Richtarik 2023, arXiv 2306.16484; the limit for q > 1 is our own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.tables import piped

__all__ = [
    "Quadratics",
    "drawn",
    "limit",
    "optimum",
    "rate_bound",
    "run",
    "step",
]

Array = NDArray[np.float64]

#: Workers, and coordinates of each.
CASES = ((2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (4, 2), (4, 4), (8, 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quadratics:
    """Functions f_i(x) = x^T L_i x / 2 - b_i^T x of n workers, and their sketches.

    Attributes:
        matrices: L_i, positive definite; between D_i^(-1/2) with preconditioning.
            Shape [n, d, d].
        vectors: b_i; times D_i^(-1/2) with preconditioning. Shape [n, d].
        scale: What sketches multiply by: n, or its root with preconditioning.
    """

    matrices: Array
    vectors: Array
    scale: float

    @property
    def workers(self) -> int:
        """Number of workers, n."""
        return len(self.vectors)

    @property
    def each(self) -> int:
        """Coordinates of a worker, q."""
        return int(self.vectors.shape[1]) // self.workers

    @property
    def curvature(self) -> Array:
        """Matrices times scale squared over n. Shape [n, d, d]."""
        return self.matrices * (self.scale**2 / self.workers)

    @property
    def pull(self) -> Array:
        """Vectors times scale over n. Shape [n, d]."""
        return self.vectors * (self.scale / self.workers)


def drawn(
    workers: int, each: int, seed: int, *, zero: bool = False, precondition: bool = True
) -> Quadratics:
    """Draw unlike quadratics with condition numbers of a few tens.

    Args:
        workers: n.
        each: Coordinates of a worker, q.
        seed: Of the draw.
        zero: Whether all b_i are 0.
        precondition: Whether sketches are divided by the roots of n diag(L_i).
    """
    rng = np.random.default_rng(seed)
    size = workers * each
    roots = rng.normal(size=(workers, size, 2 * size)) / np.sqrt(2 * size)
    units = np.exp(rng.normal(scale=0.5, size=(workers, size)))
    matrices = roots @ roots.transpose(0, 2, 1) * units[:, :, None] * units[:, None, :]
    vectors = rng.normal(1.0, 1.0, size=(workers, size)) * (not zero)
    if not precondition:
        return Quadratics(matrices=matrices, vectors=vectors, scale=float(workers))
    units = 1 / np.sqrt(np.diagonal(matrices, axis1=1, axis2=2))
    return Quadratics(
        matrices=units[:, :, None] * matrices * units[:, None, :],
        vectors=units * vectors,
        scale=workers**0.5,
    )


def _mean_curvature(problem: Quadratics) -> Array:
    """E[1/n sum S_i L_i S_i]: two coordinates meet by chance. Shape [d, d]."""
    mean = problem.curvature.mean(0)
    together = (problem.each - 1) / (len(mean) - 1)
    found = together * mean
    np.fill_diagonal(found, np.diagonal(mean))
    return np.asarray(found)


def limit(problem: Quadratics) -> Array:
    """Point that expected iterates go to. Shape [d].

    E[1/n sum S_i L_i S_i]^(-1) E[1/n sum S_i b_i]; with preconditioning that is
    (I + (q - 1)/(d - 1) (mean D_i^(-1/2) L_i D_i^(-1/2) - I))^(-1) times
    (1/sqrt n) mean(D_i^(-1/2) b_i), and the latter alone for q = 1.
    """
    return np.asarray(np.linalg.solve(_mean_curvature(problem), problem.pull.mean(0)))


def optimum(problem: Quadratics) -> Array:
    """Minimum of the mean of f_i. Shape [d].

    With preconditioning that of the mean of f_i(D_i^(-1/2) x), as steps are of.
    """
    return np.asarray(
        np.linalg.solve(problem.matrices.mean(0), problem.vectors.mean(0))
    )


def _eigenvalues(problem: Quadratics) -> Array:
    """Range of the eigenvalues of workers' blocks: those of the whole hold them."""
    if problem.each == 1:
        return np.asarray(np.diagonal(problem.curvature, axis1=1, axis2=2))
    return np.asarray(np.linalg.eigvalsh(problem.curvature))


def rate_bound(problem: Quadratics, rate: float) -> float:
    """Largest factor of the length of x in a step with b = 0."""
    return float(np.abs(1 - rate * _eigenvalues(problem)).max())


def step(problem: Quadratics, x: Array, rate: float, own: NDArray[np.int64]) -> Array:
    """One step of independent subnetwork training. Shape [d].

    Args:
        problem: What is trained.
        x: Point of all workers. Shape [d].
        rate: Learning rate.
        own: Coordinates of each worker. Shape [n, q].
    """
    worker = np.arange(problem.workers)[:, None]
    blocks = problem.curvature[worker[:, :, None], own[:, :, None], own[:, None, :]]
    gradient = np.einsum("wij,wj->wi", blocks, x[own]) - problem.pull[worker, own]
    found = np.empty_like(x)
    found[own] = x[own] - rate * gradient
    return found


def run(
    problem: Quadratics,
    rates: Callable[[int], float],
    steps: int,
    seed: int,
    start: float = 0.0,
) -> Array:
    """Iterates of independent subnetwork training. Shape [steps + 1, d].

    Args:
        problem: What is trained.
        rates: Learning rate of each step, from 0.
        steps: Number of steps.
        seed: Of the permutations.
        start: Value of all coordinates at first.
    """
    rng = np.random.default_rng(seed)
    found = np.empty((steps + 1, problem.vectors.shape[1]))
    found[0] = start
    for index in range(steps):
        own = rng.permutation(found.shape[1]).reshape(problem.workers, -1)
        found[index + 1] = step(problem, found[index], rates(index), own)
    return found


def safe_rate(problem: Quadratics) -> float:
    """Half of the largest learning rate at which no step can lengthen x, with b = 0."""
    return 1.0 / float(_eigenvalues(problem).max())


def _constant(rate: float) -> Callable[[int], float]:
    return lambda _: rate


def _decayed(problem: Quadratics) -> Callable[[int], float]:
    """Learning rates that fall as the reciprocal of steps, slowly enough to arrive."""
    slowest = float(np.linalg.eigvalsh(_mean_curvature(problem)).min())
    first = safe_rate(problem)
    return lambda index: 1.0 / (1.0 / first + slowest * index / 2)


def _distance(found: Array, wanted: Array) -> Array:
    """Relative to what is wanted."""
    return np.asarray(np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Findings about one problem; relative distances.

    Attributes:
        workers: n.
        each: q.
        preconditioned: Whether sketches were.
        factor: By which x shrank in a mean step with b = 0.
        bound: Largest factor that a step may have.
        mean_error: Of the mean iterate at a constant learning rate from the limit.
        decayed_error: Of the last iterate at decayed learning rates from the limit.
        bias: Of the last iterate at decayed learning rates from the optimum.
    """

    workers: int
    each: int
    preconditioned: bool
    factor: float
    bound: float
    mean_error: float
    decayed_error: float
    bias: float


def measured(
    workers: int, each: int, seed: int, steps: int, *, precondition: bool = True
) -> Row:
    """Train one problem with b = 0, at a constant and at decayed learning rates.

    Args:
        workers: n.
        each: q.
        seed: Of the problem; permutations have others.
        steps: Of each run.
        precondition: Whether sketches are preconditioned.
    """
    flat = drawn(workers, each, seed, zero=True, precondition=precondition)
    rate = 0.5 * safe_rate(flat)
    short = 20
    lengths = np.linalg.norm(run(flat, _constant(rate), short, seed + 1, 1.0), axis=1)
    problem = drawn(workers, each, seed, precondition=precondition)
    iterates = run(problem, _constant(rate), steps, seed + 2)
    last = run(problem, _decayed(problem), steps, seed + 3)[-1]
    there = limit(problem)
    return Row(
        workers=workers,
        each=each,
        preconditioned=precondition,
        factor=float((lengths[-1] / lengths[0]) ** (1 / short)),
        bound=rate_bound(flat, rate),
        mean_error=float(_distance(iterates[steps // 10 :].mean(0), there)),
        decayed_error=float(_distance(last, there)),
        bias=float(_distance(last, optimum(problem))),
    )


# -- Table and figure ------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Return the table: a line a case, the worst of its seeds."""
    lines: list[tuple[str, ...]] = [
        (
            *("workers n", "coordinates each q", "preconditioned"),
            *("b = 0: factor a step", "bound"),
            *("mean iterate from the limit", "decayed, from the limit"),
            "decayed, from the optimum",
        )
    ]
    cases = dict.fromkeys((one.workers, one.each, one.preconditioned) for one in rows)
    for case in cases:
        own = [r for r in rows if (r.workers, r.each, r.preconditioned) == case]
        lines.append(
            (
                *(str(case[0]), str(case[1]), "yes" if case[2] else "no"),
                f"{max(one.factor for one in own):.3f}",
                f"{max(one.bound for one in own):.3f}",
                f"{max(one.mean_error for one in own):.2%}",
                f"{max(one.decayed_error for one in own):.2%}",
                f"{min(one.bias for one in own):.0%}",
            )
        )
    return piped(lines)


def draw(steps: int, path: Path) -> None:
    """Draw distances over steps: b = 0 beside b that is not, n = 8 and q = 1."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    flat, problem = drawn(8, 1, 0, zero=True), drawn(8, 1, 0)
    there, best = limit(problem), optimum(problem)
    figure = Figure(figsize=(9.4, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for rate, colour in ((0.1, "#56b4e9"), (0.3, "#0072b2")):
        lengths = np.linalg.norm(run(flat, _constant(rate), 60, 1, 1.0), axis=1)
        left.plot(lengths / lengths[0], color=colour, label=f"learning rate {rate}")
    left.set(yscale="log", title="b = 0", ylabel="distance from the optimum")
    shown = np.unique(np.geomspace(1, steps, 240).astype(int))
    ways = {"constant": _constant(0.1), "decayed": _decayed(problem)}
    for (name, rates), colour in zip(ways.items(), ("#56b4e9", "#d55e00"), strict=True):
        found = run(problem, rates, steps, 2)[shown]
        for target, style, point in (
            ("optimum", "-", best),
            ("limit", ":", there),
        ):
            right.plot(
                shown,
                _distance(found, point),
                style,
                color=colour,
                linewidth=1.2,
                label=f"{name}, from the {target}",
            )
    right.set(xscale="log", yscale="log", title="b not 0", ylabel="relative distance")
    for axis in (left, right):
        axis.set_xlabel("steps")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    with mpl.rc_context({"svg.hashsalt": "subnetworks", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def _page(text: str, seeds: int, steps: int) -> str:
    return f"""# Independent subnetwork training of quadratics

`python -m benchmarks.subnetwork_theory --seeds {seeds} --steps {steps} --out docs`,
{date.today()}. Training random parts of a model on their own and putting them together
does not end at the model's optimum: on quadratics x^T L_i x / 2 - b_i^T x the expected
iterate goes to (1/√n) mean(D_i^(-1/2) b_i), D_i = diag(L_i), and a learning rate that
decays takes it there as well. Only with b = 0, where all workers agree on the optimum,
does it converge to it, and then linearly (Shulgin and Richtárik 2023,
arXiv 2306.16484).

![Distances over steps](../figures/subnetwork_theory.svg)

{text}

Distances are relative; each line holds the worst of {seeds} problems, in the last
column the least. With b = 0 a mean step multiplies the length of x by the factor, and
no step by more than the bound. The limit for q > 1, and without preconditioning, is
E[1/n Σ S_i L_i S_i]^(-1) E[1/n Σ S_i b_i], where S_i is worker i's sketch.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases, print the table; write page and figure if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--out", type=Path, help="folder of the documentation")
    args = parser.parse_args(argv)
    rows = [
        measured(workers, each, 10 * seed, args.steps, precondition=precondition)
        for precondition in (True, False)
        for workers, each in (CASES if precondition else CASES[2:3])
        for seed in range(args.seeds)
    ]
    text = table(rows)
    print(text)
    if args.out is not None:
        draw(min(args.steps, 20_000), args.out / "figures" / "subnetwork_theory.svg")
        page = args.out / "results" / f"subnetwork_theory_{date.today()}.md"
        page.write_text(_page(text, args.seeds, args.steps), encoding="utf-8")
        print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
