"""Worlds of the study and the solvers that answer each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.partitioner_solvers import ABLATIONS
from benchmarks.partitioner_worlds import FIRST, Arena
from envs.partition import World, WorldSampler
from envs.partition.models import Split
from planner.errors import StrategyError

__all__ = ["Study", "first_worlds", "run_study"]

#: Asked on uniform clusters without a clock.
_UNHURRIED = ("learned", "exhaustive")
#: Asked for a first plan, and how often.
_SOON = ("learned", "auto", "expert")
_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Worlds, budgets and solvers of a run.

    Attributes:
        kinds: Of worlds.
        budgets: Seconds of each solver.
        counts: Worlds of each kind, budget by budget.
        solvers: Who is asked.
        split: Of the worlds.
        seed: Of the worlds.
        ablate: Worlds of each kind on which parts of the learned partitioner are left
            out, at the budget with the most worlds.
        no_graphs: Whether there are weights without graphs.
    """

    kinds: tuple[str, ...]
    budgets: tuple[float, ...]
    counts: tuple[int, ...]
    solvers: tuple[str, ...]
    split: Split = "test"
    seed: int = 0
    ablate: int = 0
    no_graphs: bool = False

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.budgets) or min(self.counts, default=0) < 1:
            raise StrategyError(
                f"counts {list(self.counts)} for budgets {list(self.budgets)}; give "
                f"one count of at least 1 for all budgets, or one for each"
            )
        if not all(0 <= budget < float("inf") for budget in self.budgets):
            raise StrategyError(
                f"budgets {list(self.budgets)} are not all seconds; give 0 or more"
            )

    @property
    def main_budget_s(self) -> float:
        """That with the most worlds."""
        return self.budgets[self.counts.index(max(self.counts))]

    @property
    def ablations(self) -> list[str]:
        """Ablations that are run."""
        return [n for n in ABLATIONS if self.no_graphs or n != "learned:no-graphs"]


def run_study(study: Study, arena: Arena) -> None:
    """Ask all that has not been asked yet; answers are in the arena afterwards.

    Worlds of all kinds come in turn, so that a run that is stopped has as many of each.

    Raises:
        MeshwrightError: As of the sampler.
    """
    for world in first_worlds():
        arena.ask(world, 0.0, _SOON, 0)
    sampler = WorldSampler(
        kinds=study.kinds, split=study.split, seed=study.seed, graphs=arena.graphs
    )
    for index in range(max(study.counts) * len(study.kinds)):
        world, place = sampler.world(index), index // len(study.kinds)
        for budget_s, count in zip(study.budgets, study.counts, strict=True):
            if place < count:
                arena.ask(world, budget_s, study.solvers, place)
        if world.kind == "uniform":
            unhurried = [name for name in _UNHURRIED if name in study.solvers]
            arena.ask(world, None, unhurried, place)
        if place < study.ablate:
            arena.ask(world, study.main_budget_s, study.ablations, place)


def first_worlds() -> list[World]:
    """Large clusters of equal and of two kinds of hosts, each some times over."""
    return [
        World(
            name=f"{model} on {8 * hosts:,} GPUs, {what}, run {run}",
            kind=FIRST,
            model=model,
            seq_len=4096,
            cluster=cluster,
            global_batch=32 * hosts,
            devices="any",
        )
        for model, hosts in (("llama3-8b", 8), ("llama3-70b", 512))
        for what, cluster in (
            ("equal", f"dgx-h100:{hosts}"),
            ("two kinds of hosts", _two_kinds(hosts)),
        )
        for run in range(_RUNS)
    ]


def _two_kinds(hosts: int) -> dict[str, Any]:
    """H100 and A100 hosts in turn, in the presets' figures."""
    fast = {"bandwidth_bytes_per_s": 4.5e11, "latency_s": 3e-6}
    slow = {"bandwidth_bytes_per_s": 3e11, "latency_s": 3e-6}
    groups: Sequence[dict[str, Any]] = (
        {"name": "h100", "device": "h100-80", "link": fast},
        {"name": "a100", "device": "a100-80", "link": slow},
    )
    quarter = {"count": hosts // 4, "devices_per_host": 8}
    network = {"bandwidth_bytes_per_s": 2.5e10, "latency_s": 5e-6}
    return {
        "name": f"h100 + a100, {hosts} hosts",
        "device_types": ["h100-80", "a100-80"],
        "hosts": [{**group, **quarter} for group in (*groups, *groups)],
        "levels": [{"name": "network", "link": network}],
    }
