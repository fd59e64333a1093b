"""Strategies priced and schedules simulated in a second.

python -m benchmarks.search_speed

Everything runs on one core. The analytic rate counts legal strategies of the 405B
model on 16,384 devices, priced in one table; the simulated rates are those of
:mod:`benchmarks.simulator_speed`; a whole plan is timed by
:mod:`benchmarks.planning_time`. Parts of a cluster are planned together
(:mod:`planner.search.subclusters`), and one by one by exhaustive search with 12
simulations; plans of both are simulated.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np

from planner.capture import capture, load_model
from planner.cluster import Cluster
from planner.cost import CostModel, PricingContext
from planner.schema import Optimizer, Precision
from planner.search import Request, get_partitioner
from planner.search.refine import ExactPricer
from planner.search.subclusters import plan_subclusters
from planner.space import StrategyTable, enumerate_strategies, gather_facts

_MODEL, _CLUSTER, _BATCH, _LENGTH = "llama3-405b", "dgx-h100:2048", 2048, 8192


def _rows(context: PricingContext, count: int) -> StrategyTable:
    facts = gather_facts(
        context.graph,
        context.cluster,
        global_batch=_BATCH,
        target="any",
        precision=context.precision,
        optimizer=context.optimizer,
    )
    tables, total = [], 0
    for table in enumerate_strategies(facts):
        tables.append(table)
        total += len(table)
        if total >= count:
            break
    return StrategyTable.concatenate(tables)


def analytic_rate(count: int = 500_000) -> tuple[int, float]:
    """Rows priced, and rows per second of processor time."""
    cluster = Cluster.parse(_CLUSTER)
    context = PricingContext(
        graph=capture(load_model(_MODEL, seq_len=_LENGTH)),
        cluster=cluster,
        order=np.asarray(cluster.free),
        precision=Precision(),
        optimizer=Optimizer(),
    )
    table = _rows(context, count)
    CostModel(context).table(table[:2000])
    best = np.inf
    for _ in range(3):
        start = time.process_time()
        CostModel(context).table(table)
        best = min(best, time.process_time() - start)
    return len(table), len(table) / best


def parts_speed() -> str:
    """Plan a model on every packed and spread shape of eight hosts; say how fast."""
    cluster = Cluster.parse("dgx-a100:8")
    context = PricingContext(
        graph=capture(load_model("gpt2-xl")),
        cluster=cluster,
        order=np.asarray(cluster.free),
        precision=Precision(),
        optimizer=Optimizer(),
    )
    request = Request(context=context, global_batch=512)
    parts = [
        np.concatenate([8 * host + np.arange(each) for host in range(hosts)])
        for hosts in range(1, 9)
        for each in range(1, 9)
    ]
    plan_subclusters(request, parts)
    start = time.process_time()
    found = plan_subclusters(request, parts)
    together = (time.process_time() - start) / len(parts)
    start, ratios = time.process_time(), []
    best = [_exhaustive(replace(context, order=part)) for part in parts]
    alone = (time.process_time() - start) / len(parts)
    exact = ExactPricer(request=request, model=CostModel(context))
    for one, least in zip(found, best, strict=True):
        if one is not None:
            cut = exact.candidates(one.solution.row, one.solution.order, cuts=1)
            ratios.append(min(made.cost.step_time_s for made in cut) / least)
    mean = np.exp(np.mean(np.log(ratios)))
    return (
        f"{len(parts)} parts of {cluster.name}, gpt2-xl: {1e3 * together:.2f} ms each "
        f"together, {1e3 * alone:.0f} ms by exhaustive search; step time over its: "
        f"{mean:.4f} on average, {max(ratios):.3f} at most ({len(ratios)} parts)"
    )


def _exhaustive(context: PricingContext) -> float:
    """Least step time on all devices; infinite if no plan was found."""
    request = Request(context=context, global_batch=512, evaluation_budget=12)
    found = get_partitioner("exhaustive").search(request).candidates
    every = len(context.order)
    times = [c.cost.step_time_s for c in found if c.strategy.mesh.num_devices == every]
    return min(times, default=np.inf)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--skip-simulator", action="store_true")
    options = parser.parse_args()
    count, rate = analytic_rate()
    print(f"analytic: {rate:,.0f} strategies/s ({count:,} of {_MODEL} on {_CLUSTER})")
    print(parts_speed())
    if not options.skip_simulator:
        from benchmarks.simulator_speed import simulator_speed

        for entry in simulator_speed():
            print(entry)


if __name__ == "__main__":
    main()
