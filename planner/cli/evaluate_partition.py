"""The command ``meshwright evaluate partition``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from planner.cli.learning import WeightsFolder, read_seeds, require_learning
from planner.cli.output import emit_json, emit_table, progress
from planner.errors import StrategyError

if TYPE_CHECKING:
    from policies.partition.evaluation import Compared, Pair

__all__ = ["EvaluatePartition"]


@dataclass(frozen=True, kw_only=True)
class EvaluatePartition:
    """Compare the learned partitioner with the others."""

    weights: WeightsFolder = None
    kinds: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KIND")] = (
        "uniform",
        "mixed",
        "uneven",
        "sites",
        "occupied",
        "transfer",
    )
    """Kinds of worlds."""
    split: Literal["train", "validation", "test"] = "validation"
    """Split of their models and clusters; transfer is never trained on."""
    seeds: Annotated[str, tyro.conf.arg(metavar="FIRST:COUNT")] = "0:4"
    """Seeds of the worlds of each kind. Training validates on seeds from 0 on."""
    budget_s: float = 1.0
    """Seconds of each partitioner for a world."""
    against: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = (
        "expert",
        "beam",
        "anneal",
        "evolutionary",
    )
    """Partitioners to compare with; the best of them counts."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Plan every world with all of them, and print."""
        require_learning()
        seeds = read_seeds(self.seeds)
        from envs.partition import GraphStore, WorldSampler, sample_world
        from planner.search import get_partitioner
        from policies.partition.evaluation import compare, summarise
        from policies.partition.network import load_network
        from policies.partition.partitioner import LearnedPartitioner

        # Wrong kinds, names and weights are refused before long work.
        WorldSampler(kinds=self.kinds, split=self.split)
        if not 0 <= self.budget_s < math.inf:
            raise StrategyError(
                f"--budget-s {self.budget_s} is not a number of seconds from 0 on"
            )
        others = [get_partitioner(name) for name in self.against]
        load_network(None if self.weights is None else Path(self.weights))
        judged = LearnedPartitioner(self.weights)
        graphs = GraphStore()
        drawn = (
            sample_world(kind, self.split, seed, graphs)
            for kind in self.kinds
            for seed in seeds
        )
        with progress(len(self.kinds) * len(seeds), "world") as bar:
            pairs = compare(
                drawn,
                judged,
                others,
                budget_s=self.budget_s,
                graphs=graphs,
                watch=lambda: bar.update(1),
            )
        if self.json:
            _emit_json(summarise(pairs), pairs)
        else:
            _emit_table(summarise(pairs))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _emit_json(found: Sequence[Compared], pairs: Sequence[Pair]) -> None:
    emit_json(
        {
            "kinds": [asdict(one) for one in found],
            "worlds": [
                {
                    "world": pair.world,
                    "kind": pair.kind,
                    "learned": _finite(pair.score),
                    **{name: _finite(v) for name, v in pair.others.items()},
                }
                for pair in pairs
            ],
        }
    )


def _emit_table(found: Sequence[Compared]) -> None:
    emit_table(
        ("kind", "worlds", "over the best other", "95 %", "won", "lost"),
        [
            (
                one.kind,
                str(one.worlds),
                "" if one.ratio is None else f"{one.ratio:.4f}",
                "" if one.low is None else f"{one.low:.4f} to {one.high:.4f}",
                str(one.wins),
                str(one.losses),
            )
            for one in found
        ],
        numbers=True,
    )
