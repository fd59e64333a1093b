"""How many strategies and schedules a second, and how long a whole plan takes.

python -m benchmarks.search_speed

Everything runs on one core. The analytic rate counts legal strategies of the 405B
model on 16,384 devices, priced in one table; the simulated rates are those of
:mod:`benchmarks.simulator_speed`. The plan is timed in a fresh process, twice: imports
are left out, compiling numba's kernels (the first time on a machine) is in the first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

import numpy as np

from planner.capture import capture, load_model
from planner.cluster import Cluster
from planner.cost import CostModel, Setting
from planner.schema import Optimizer, Precision
from planner.space import StrategyTable, enumerate_strategies, gather_facts

_MODEL, _CLUSTER, _BATCH, _LENGTH = "llama3-405b", "dgx-h100:2048", 2048, 8192

_PLAN = """
import json, resource, time
import numba, numpy, pydantic, torch, transformers
import transformers.models.llama.modeling_llama
from planner.api import plan
import planner.capture, planner.search.exhaustive, planner.search.expert
start = time.perf_counter()
made = plan({model!r}, {cluster!r}, global_batch={batch}, seq_len={length})
print(json.dumps({{
    "seconds": time.perf_counter() - start,
    "timing_s": made.timing_s,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "label": made.strategy.label(),
    "step_time_s": made.prediction.step_time_s,
    "evaluations": made.provenance.evaluations,
}}))
"""


def _rows(setting: Setting, count: int) -> StrategyTable:
    facts = gather_facts(
        setting.graph,
        setting.cluster,
        global_batch=_BATCH,
        target="any",
        precision=setting.precision,
        optimizer=setting.optimizer,
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
    setting = Setting(
        graph=capture(load_model(_MODEL, seq_len=_LENGTH)),
        cluster=cluster,
        order=np.asarray(cluster.free),
        precision=Precision(),
        optimizer=Optimizer(),
    )
    table = _rows(setting, count)
    CostModel(setting).table(table[:2000])
    best = np.inf
    for _ in range(3):
        start = time.process_time()
        CostModel(setting).table(table)
        best = min(best, time.process_time() - start)
    return len(table), len(table) / best


def whole_plan() -> dict[str, object]:
    """One plan in a fresh process; imports are not in its seconds."""
    code = _PLAN.format(model=_MODEL, cluster=_CLUSTER, batch=_BATCH, length=_LENGTH)
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


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
    print(f"plan of {_MODEL} on {_CLUSTER}, batch {_BATCH} x {_LENGTH} tokens:")
    for label in ("first time (may compile)", "again"):
        made = whole_plan()
        timing = made["timing_s"]
        assert isinstance(timing, dict)
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in timing.items())
        print(
            f"  {label}: {made['seconds']:.2f} s ({parts}), "
            f"{made['peak_bytes'] / 1e9:.2f} GB peak, {made['evaluations']}"
        )
    print(f"  chosen: {made['label']}, predicted step {made['step_time_s']:.2f} s")


if __name__ == "__main__":
    main()
