"""Worlds asked twice: by exact training alone, and with methods that evidence admits.

python -m benchmarks.inexact_choice [--worlds 200] [--seed 0] [--partitioner exhaustive]

Worlds are drawn as for the learned partitioner's validation: equal devices, several
sites, uneven hosts. Printed are, by kind, how often an inexact method was chosen, the
time to the same loss beside exact training's, and the time of planning. Ends with 1 if
a choice is predicted slower than the exact plan, or an exact plan changed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from benchmarks.tables import aligned
from envs.partition import GraphStore, World, WorldSampler
from planner.api import plan_graph
from planner.errors import NoFeasiblePlanError
from planner.schema import Plan

__all__ = ["KINDS", "Asked", "ask"]

#: Kinds of worlds that are drawn.
KINDS = ("uniform", "sites", "uneven")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Answers to one world.

    Attributes:
        kind: Of the world.
        inexact: Whether an inexact method was chosen.
        ratio: Predicted time to the same loss over the exact plan's.
        kept: Whether an exact choice is the plan that is made without asking.
        slower: Time of planning over that without asking.
    """

    kind: str
    inexact: bool
    ratio: float
    kept: bool
    slower: float


def ask(world: World, graphs: GraphStore, partitioner: str) -> Asked:
    """Plan a world twice.

    Args:
        world: Asked for throughput, whatever its objective is.
        graphs: Of models.
        partitioner: Who plans.

    Raises:
        NoFeasiblePlanError: If no exact plan fits.
    """
    graph, cluster = world.read(graphs)

    def planned(asked: bool) -> tuple[Plan, float]:
        # By throughput, whatever was drawn.
        options = replace(
            world.options(), objective="throughput", allow_approximate=asked
        )
        started = time.perf_counter()
        made = plan_graph(graph, cluster, options, partitioner=partitioner)
        return made, time.perf_counter() - started

    (exact, exact_s), (found, found_s) = planned(False), planned(True)
    eta = found.prediction.efficiency.eta if found.prediction.efficiency else 1.0
    inexact = found.strategy.semantics != exact.strategy.semantics
    return Asked(
        kind=world.kind,
        inexact=inexact,
        ratio=found.prediction.step_time_s / eta / exact.prediction.step_time_s,
        kept=inexact or found.strategy == exact.strategy,
        slower=found_s / exact_s,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Ask all worlds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--partitioner", default="exhaustive")
    args = parser.parse_args(argv)
    graphs, found = GraphStore(), defaultdict(list)
    sampler = WorldSampler(kinds=KINDS, split="validation", seed=args.seed)
    none = 0
    for world in tqdm(sampler.take(args.worlds), disable=None):
        try:
            one = ask(world, graphs, args.partitioner)
        except NoFeasiblePlanError:
            none += 1
            continue
        found[one.kind].append(one)
    head = ("worlds", "number", "inexact", "their time", "worst of all", "planning")
    lines = [head]
    every = [one for ones in found.values() for one in ones]
    for kind, ones in {**found, "all": every}.items():
        ratios = [one.ratio for one in ones if one.inexact]
        lines.append(
            (
                kind,
                str(len(ones)),
                str(len(ratios)),
                f"{statistics.geometric_mean(ratios):.2f}" if ratios else "-",
                f"{max(one.ratio for one in ones):.3f}",
                f"{statistics.median(one.slower for one in ones):.1f} x",
            )
        )
    print(aligned(lines))
    print(f"\n{none} worlds have no exact plan that fits")
    wrong = [one for one in every if one.ratio > 1 or not one.kept]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
