"""Distance of closed forms from the simulator, on random feasible plans.

python -m benchmarks.fidelity [--plans 1000] [--seed 0] [--json]

Plans are drawn from the legal strategies of several models and clusters, every schedule
as often as every other. All have a pipeline, because without one both fidelities are
the same sum. A third is cut evenly by time, a third has each of these cuts moved by a
unit at random, a third is cut anywhere; half of those that may mix recomputation from
stage to stage do. Both fidelities price the very same stages. Rows that are cut evenly
are priced a third time as the search does it, in a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from planner.capture import capture, load_model
from planner.cluster import Cluster
from planner.cost import CostModel, PricingContext
from planner.cost.table.cuts import balanced_bounds
from planner.schema import (
    Optimizer,
    Precision,
    Recompute,
    Strategy,
)
from planner.schema.schedules import schedule_names, schedule_spec
from planner.space import (
    RECOMPUTE_NAMES,
    StrategyTable,
    build_strategy,
    enumerate_strategies,
    gather_facts,
    skeleton,
)

__all__ = ["CASES", "Case", "Difference", "compare", "summaries"]

#: What the mean difference may be.
TARGET = 0.02
_CUTS = ("even", "moved", "anywhere")
#: Draws until one fits in memory; after as many that do not, another cut is drawn.
_TRIES = 40

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Plans of one model on one cluster."""

    model: str
    cluster: str
    global_batch: int
    seq_len: int


CASES = (
    Case(model="gpt2-xl", cluster="dgx-v100:2", global_batch=64, seq_len=1024),
    Case(model="llama3-8b", cluster="dgx-h100:4", global_batch=128, seq_len=4096),
    Case(model="llama2-13b", cluster="dgx-a100:8", global_batch=256, seq_len=4096),
    Case(model="mixtral-8x7b", cluster="dgx-a100:8", global_batch=256, seq_len=4096),
    Case(model="llama3-70b", cluster="dgx-h100:32", global_batch=512, seq_len=8192),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One plan by both fidelities.

    Attributes:
        case: Where it was drawn.
        schedule: torch's name.
        cut: How its stages were made.
        label: Of the strategy.
        units: In each stage.
        simulated_s: Step time by the exact order of actions.
        analytic_s: By closed forms, from the same stages.
        table_s: As the search prices the row, if the stages are those that it assumes.
    """

    case: Case
    schedule: str
    cut: str
    label: str
    units: tuple[int, ...]
    simulated_s: float
    analytic_s: float
    table_s: float | None

    @property
    def relative(self) -> float:
        """Relative error of the analytic time to the simulated, signed."""
        return self.analytic_s / self.simulated_s - 1

    @property
    def relative_table(self) -> float | None:
        """Relative error of the table's time to the simulated, signed."""
        return None if self.table_s is None else self.table_s / self.simulated_s - 1


def _context(case: Case) -> PricingContext:
    cluster = Cluster.parse(case.cluster)
    return PricingContext(
        graph=capture(load_model(case.model, seq_len=case.seq_len)),
        cluster=cluster,
        order=np.asarray(cluster.free),
        precision=Precision(),
        optimizer=Optimizer(),
    )


def _rows(context: PricingContext, case: Case, schedule: str) -> StrategyTable | None:
    """Legal rows of a schedule that have a pipeline."""
    facts = gather_facts(
        context.graph,
        context.cluster,
        global_batch=case.global_batch,
        target="any",
        precision=context.precision,
        optimizer=context.optimizer,
    )
    pins = {"schedule": schedule_spec(schedule).code}
    tables = [
        table[np.flatnonzero(table.pp > 1)]
        for table in enumerate_strategies(facts, pins=pins)
    ]
    return StrategyTable.concatenate(tables) if tables else None


def _even(context: PricingContext, row: Mapping[str, int], rank: Index) -> Index:
    costs = CostModel(context).unit_costs(
        tp=row["tp"],
        cp=row["cp"],
        ep=row["ep"],
        microbatch=row["microbatch_size"],
        sequence_parallel=bool(row["sequence_parallel"]),
    )
    shared = 2 * costs.tp_s + costs.cp_s + 2 * costs.ep_s
    work = costs.forward_s + costs.backward_s + shared
    types = context.types_of_ranks(row["pp"])[rank]
    stages = np.array([len(rank)])
    bounds = balanced_bounds(work, np.zeros(1, np.int64), types[None], stages)[0]
    return np.asarray(bounds[: len(rank) + 1], dtype=np.int64)


def _cut(even: Index, how: str, random: np.random.Generator) -> Index:
    units, stages = int(even[-1]), len(even) - 1
    if how == "even":
        return even
    if how == "anywhere":
        inner = random.choice(np.arange(1, units), stages - 1, replace=False)
        return np.concatenate([[0], np.sort(inner), [units]])
    moved = even.copy()
    for stage in random.permutation(np.arange(1, stages)):
        place = moved[stage] + random.integers(-1, 2)
        if moved[stage - 1] < place < moved[stage + 1]:
            moved[stage] = place
    return moved


def _strategy(
    context: PricingContext, row: dict[str, int], how: str, random: np.random.Generator
) -> Strategy:
    bare = skeleton(row)
    stages = row["pp"] * row["virtual_stages"]
    rank = np.array([bare.rank_of_stage(stage) for stage in range(stages)])
    bounds = _cut(_even(context, row, rank), how, random)
    kinds = [row["recompute"]] * stages
    mixed = not schedule_spec(bare.schedule).splits_backward and random.random() < 0.5
    if mixed and how != "even":
        kinds = random.integers(0, len(RECOMPUTE_NAMES), stages).tolist()
    return build_strategy(
        row,
        unit_names=context.graph.unit_names,
        bounds=bounds.tolist(),
        recompute=[cast("Recompute", RECOMPUTE_NAMES[kind]) for kind in kinds],
        sharding=context.graph.sharding,
        precision=context.precision,
        optimizer=context.optimizer,
    )


def _drawn(
    case: Case, context: PricingContext, schedule: str, random: np.random.Generator
) -> Iterator[Difference]:
    """Feasible plans of a schedule, endlessly; none if it has no feasible row."""
    table = _rows(context, case, schedule)
    if table is None:
        return
    model = CostModel(context)
    priced = model.table(table)
    fitting = np.flatnonzero(priced.excess_bytes <= 0)
    if not len(fitting):
        return
    misses = 0
    for how in itertools.cycle(_CUTS):
        for _ in range(_TRIES):
            index = int(random.choice(fitting))
            strategy = _strategy(context, table.row(index), how, random)
            if model.cost(strategy).fits:
                break
        else:
            misses += 1
            if misses == len(_CUTS):
                return
            continue
        misses = 0
        yield Difference(
            case=case,
            schedule=schedule,
            cut=how,
            label=strategy.label(),
            units=tuple(len(stage.modules) for stage in strategy.stages),
            simulated_s=model.cost(strategy).step_time_s,
            analytic_s=model.cost(strategy, "analytic").step_time_s,
            table_s=float(priced.step_time_s[index]) if how == "even" else None,
        )


def compare(
    plans: int, seed: int, schedules: Sequence[str] | None = None
) -> list[Difference]:
    """Draw plans, one of each case and schedule in turn, and price each.

    Args:
        plans: How many.
        seed: Of the draw.
        schedules: All if None.
    """
    sources = [
        _drawn(case, context, schedule, np.random.default_rng([seed, number, code]))
        for number, case in enumerate(CASES)
        for context in [_context(case)]
        for code, schedule in enumerate(schedules or schedule_names())
    ]
    found: list[Difference] = []
    while sources and len(found) < plans:
        for source in list(sources):
            drawn = next(source, None)
            if drawn is None:
                sources.remove(source)
            elif len(found) < plans:
                found.append(drawn)
    return found


def _summary(values: Sequence[float]) -> dict[str, float]:
    size = np.abs(values)
    return {
        "plans": len(size),
        "mean": float(size.mean()),
        "percentile_95": float(np.percentile(size, 95)),
        "worst": float(size.max()),
        "bias": float(np.mean(values)),
    }


def summaries(found: Sequence[Difference]) -> dict[str, dict[str, float]]:
    """Differences of all plans, and by schedule, cut and case; then of the table."""
    groups: dict[str, list[float]] = {"all": [entry.relative for entry in found]}
    for name_of in (
        lambda d: d.schedule,
        lambda d: f"cut {d.cut}",
        lambda d: f"{d.case.model} on {d.case.cluster}",
    ):
        for entry in found:
            groups.setdefault(name_of(entry), []).append(entry.relative)
    for entry in found:
        if entry.relative_table is not None:
            for name in ("all rows of a table", f"rows of a table, {entry.schedule}"):
                groups.setdefault(name, []).append(entry.relative_table)
    return {name: _summary(values) for name, values in groups.items()}


def _worst(found: Sequence[Difference]) -> str:
    worst = max(found, key=lambda entry: abs(entry.relative))
    return (
        f"worst: {worst.relative:+.1%} ({worst.analytic_s:.4g} s analytic, "
        f"{worst.simulated_s:.4g} s simulated), {worst.case.model} on "
        f"{worst.case.cluster}, {worst.label}, cut {worst.cut}: units "
        f"{' '.join(map(str, worst.units))}"
    )


def main() -> None:
    """Print the differences."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = compare(options.plans, options.seed)
    groups = summaries(found)
    if options.json:
        plans = [{**asdict(entry), "relative": entry.relative} for entry in found]
        print(json.dumps({"summaries": groups, "plans": plans}))
        return
    print(f"analytic against simulated step time (goal: mean {TARGET:.0%})")
    for name, group in groups.items():
        print(
            f"  {name:42s} {group['plans']:5d} plans  mean {group['mean']:6.2%}  "
            f"95th {group['percentile_95']:6.2%}  worst {group['worst']:6.1%}  "
            f"bias {group['bias']:+6.2%}"
        )
    print(_worst(found))


if __name__ == "__main__":
    main()
