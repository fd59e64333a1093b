"""DT-FM's scheduling beside ``auto``: on its five networks and on irregular clusters.

MESHWRIGHT_DATA=FOLDER python -m benchmarks.dtfm [--worlds 3] [--simulations 48]
    [--markdown FILE]

GPT-3 XL of the paper (24 layers of 2048, 1024 samples of 2048 tokens) on ``dtfm-1`` to
``dtfm-5`` with the published grid of 8 stages and 8 replicas; then worlds of the test
split that are drawn with uneven hosts, several sites and mixed devices, with any grid.
Both partitioners may simulate equally many strategies, without a clock, so that every
run finds the same. Times are predicted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.partitioner_solvers import attempt
from benchmarks.tables import aligned, piped
from envs.partition import GraphStore, World
from envs.partition.sampler import sample_world
from planner.search import Request

__all__ = ["Row", "questions", "summary"]

_SOLVERS = ("dtfm", "auto")
#: The paper's model, with the fields of transformers.
_MODEL = {
    "model_type": "gpt2",
    "n_embd": 2048,
    "n_layer": 24,
    "n_head": 16,
    "n_positions": 2048,
}
_SEQ_LEN, _BATCH = 2048, 1024
_GRID = {"pp": 8, "tp": 1, "cp": 1, "ep": 1}
_KINDS = ("uneven", "sites", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Answers to a question.

    Attributes:
        name: Of the question.
        devices: That are free.
        score: Step time, or step time per device used, by solver; infinite for none.
        strategy: By solver.
    """

    name: str
    devices: int
    score: dict[str, float]
    strategy: dict[str, str]

    @property
    def ratio(self) -> float:
        """Value of ``auto`` over that of ``dtfm``; below 1 ``auto`` is faster."""
        return self.score["auto"] / self.score["dtfm"]


def questions(worlds: int) -> Iterator[tuple[str, World, dict[str, int]]]:
    """Yield the name, the world and the pins of each question.

    Args:
        worlds: Number of irregular worlds of each kind.
    """
    for number in range(1, 6):
        network = World(
            name=f"dtfm-{number}",
            model=_MODEL,
            seq_len=_SEQ_LEN,
            cluster=f"dtfm-{number}",
            global_batch=_BATCH,
        )
        yield f"dtfm-{number}", network, _GRID
    for kind in _KINDS:
        for seed in range(worlds):
            yield f"{kind} {seed}", sample_world(kind, "test", seed), {}


def _answered(
    name: str,
    world: World,
    pins: dict[str, int],
    simulations: int,
    graphs: GraphStore,
) -> Row:
    def ask() -> Request:
        asked = world.request(graphs)
        return replace(
            asked, pins={**asked.pins, **pins}, evaluation_budget=simulations
        )

    answers = {one: attempt(one, ask) for one in _SOLVERS}
    return Row(
        name=name,
        devices=int(ask().context.cluster.num_free),
        score={
            one: math.inf if answer.score is None else answer.score
            for one, answer in answers.items()
        },
        strategy={
            one: (answer.strategy or answer.why or "").split(" devices ")[0]
            for one, answer in answers.items()
        },
    )


def summary(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Figures over the networks and over the irregular worlds."""
    groups = {
        "networks": [r for r in rows if r.name.startswith("dtfm")],
        "irregular": [r for r in rows if not r.name.startswith("dtfm")],
    }
    figures = []
    for name, group in groups.items():
        both = [r for r in group if all(map(math.isfinite, r.score.values()))]
        if both:
            mean = float(np.exp(statistics.mean(math.log(r.ratio) for r in both)))
            figures += [
                (f"{name}: auto over dtfm, geometric mean", f"{mean:.2f}"),
                (
                    f"{name}: auto faster, equal within 0.1 %, slower",
                    f"{sum(r.ratio < 0.999 for r in both)}, "
                    f"{sum(0.999 <= r.ratio <= 1.001 for r in both)}, "
                    f"{sum(r.ratio > 1.001 for r in both)}",
                ),
            ]
        for one in _SOLVERS:
            none = sum(math.isinf(r.score[one]) for r in group)
            if none:
                figures.append((f"{name}: without a plan by {one}", str(none)))
    return figures


_HEAD = ("question", "devices", "dtfm s", "auto s", "ratio", "dtfm", "auto")


def _cells(row: Row) -> tuple[str, ...]:
    def seconds(value: float) -> str:
        return f"{value:.4g}" if math.isfinite(value) else "none"

    both = all(map(math.isfinite, row.score.values()))
    return (
        row.name,
        str(row.devices),
        *(seconds(row.score[one]) for one in _SOLVERS),
        f"{row.ratio:.2f}" if both else "",
        *(row.strategy[one] for one in _SOLVERS),
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", type=int, default=3, help="irregular ones a kind")
    parser.add_argument("--simulations", type=int, default=48, help="of each solver")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    graphs = GraphStore()
    asked = list(questions(options.worlds))
    rows = []
    for name, world, pins in tqdm(asked, disable=not sys.stderr.isatty()):
        rows.append(_answered(name, world, pins, options.simulations, graphs))
        print(*_cells(rows[-1]), sep=" | ", file=sys.stderr, flush=True)
    table, figures = [_HEAD, *map(_cells, rows)], summary(rows)
    print(aligned(table), aligned(figures), sep="\n\n")
    if options.markdown is not None:
        text = f"{piped([('', ''), *figures])}\n\n{piped(table)}\n"
        options.markdown.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
