"""Strategies priced and schedules simulated in a second.

python -m benchmarks.search_speed

Everything runs on one core. The analytic rate counts legal strategies of the 405B
model on 16,384 devices, priced in one table; the simulated rates are those of
:mod:`benchmarks.simulator_speed`; a whole plan is timed by
:mod:`benchmarks.planning_time`.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from planner.capture import capture, load_model
from planner.cluster import Cluster
from planner.cost import CostModel, PricingContext
from planner.schema import Optimizer, Precision
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


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--skip-simulator", action="store_true")
    options = parser.parse_args()
    count, rate = analytic_rate()
    print(f"analytic: {rate:,.0f} strategies/s ({count:,} of {_MODEL} on {_CLUSTER})")
    if not options.skip_simulator:
        from benchmarks.simulator_speed import simulator_speed

        for entry in simulator_speed():
            print(entry)


if __name__ == "__main__":
    main()
