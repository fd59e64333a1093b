"""Plans of large mixed fleets: step times that searches reach in 1 and in 15 seconds.

python -m benchmarks.fleet_planning [--devices 1024 4096 16384] [--kinds 3 8]
    [--budgets 1 15] [--seeds 1] [--solvers auto learned exhaustive evolutionary]

A fleet has racks of equal hosts with eight devices, numbered in random order within
their site, and sites joined by slow links. One seed draws one fleet of each size and
number of device types. Seconds are of the processor, for budgets and answers alike, so
that other programs on the machine do not count. Each answer comes from a fresh request
in one process on one thread; a small fleet is planned before, to load compiled code.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from benchmarks.partitioner_solvers import Answer, attempt
from envs.partition.machines import KNOWN, UNSEEN, Machine
from planner.capture import capture, load_model
from planner.cluster import Cluster, device_type
from planner.graph import ModelGraph
from planner.request import PlanOptions, make_request
from planner.schema.cluster import ClusterDocument, Level, Link
from planner.search import Request

__all__ = ["draw_fleet"]

Rng = np.random.Generator

#: Machines of data centres whose devices multiply bfloat16, by device type.
_MACHINES: Mapping[str, Machine] = {
    one.device: one
    for one in (*KNOWN.values(), *UNSEEN.values())
    if not one.name.endswith("-server")
    and "bfloat16" in device_type(one.device).peak_flops_per_s
    and device_type(one.device).backend == "nccl"
}
#: Hosts of a rack, and devices of a host.
_RACK, _HOST = 16, 8
#: Solvers that are compared; those but ``auto`` and ``learned`` learn nothing.
_SOLVERS = ("auto", "learned", "exhaustive", "evolutionary")
#: Model, samples of a step and tokens of a sample, by the most devices they are for.
_JOBS = {
    1024: ("llama3-70b", 1024, 4096),
    4096: ("llama3-70b", 2048, 4096),
    1 << 30: ("llama3-405b", 2048, 8192),
}


def draw_fleet(rng: Rng, devices: int, kinds: int) -> Cluster:
    """Draw a fleet of several sites.

    Args:
        rng: Generator of all random draws.
        devices: Number of devices, a multiple of 128 and at least 128 a kind.
        kinds: Number of device types, at most 9.
    """
    racks = devices // (_RACK * _HOST)
    machines = rng.permutation(sorted(_MACHINES))[:kinds].tolist()
    share = rng.dirichlet([2.0] * kinds)
    picks = rng.permutation([*range(kinds), *rng.choice(kinds, racks - kinds, p=share)])
    sites = min(int(rng.integers(2, 6)), racks)
    cuts = np.sort(rng.choice(np.arange(1, racks), sites - 1, replace=False))
    sizes = np.diff([0, *cuts.tolist(), racks]) * _RACK
    wide_bytes_per_s, wide_s = rng.uniform(0.2e9, 2e9), rng.uniform(5e-3, 60e-3)
    levels = (
        Level(name="rack", hosts=_RACK, link=_link(50e9, 5e-6)),
        Level(name="site", hosts=tuple(sizes.tolist()), link=_link(12.5e9, 20e-6)),
        Level(name="wide area", link=_link(wide_bytes_per_s, wide_s)),
    )
    used = [_MACHINES[machines[pick]] for pick in picks.tolist()]
    document = ClusterDocument(
        name=f"fleet of {devices:,} devices of {kinds} types on {sites} sites",
        device_types=tuple(device_type(name) for name in machines),
        hosts=tuple(machine.host(_HOST, _RACK) for machine in used),
        levels=levels,
    )
    return Cluster.from_document(document)


def _link(bytes_per_s: float, latency_s: float) -> Link:
    return Link(bandwidth_bytes_per_s=float(bytes_per_s), latency_s=float(latency_s))


@contextmanager
def _processor_clock() -> Iterator[None]:
    """While open, clocks of searches count seconds of the processor."""
    wall = time.perf_counter
    time.perf_counter = time.process_time
    try:
        yield
    finally:
        time.perf_counter = wall


def ask(
    graph: ModelGraph, fleet: Cluster, batch: int, solver: str, budget_s: float
) -> Answer:
    """Ask a solver for a plan, on the clock of the processor.

    Args:
        graph: The model.
        fleet: The devices.
        batch: Samples of a step.
        solver: Name of a partitioner, or ``auto``.
        budget_s: Seconds that it may take.
    """
    options = PlanOptions(global_batch=batch, time_budget_s=budget_s, risk="none")

    def ask_anew() -> Request:
        return make_request(graph, fleet, options)

    with _processor_clock():
        return attempt(solver, ask_anew, patient=True)


def main() -> None:
    """Print one line an answer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--devices", type=int, nargs="*", default=[1024, 4096, 16384])
    parser.add_argument("--kinds", type=int, nargs="*", default=[3, 8])
    parser.add_argument("--budgets", type=float, nargs="*", default=[1.0, 15.0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--solvers", nargs="*", default=list(_SOLVERS))
    options = parser.parse_args()
    for solver in options.solvers:
        small = draw_fleet(np.random.default_rng(0), 256, 2)
        ask(_graph("gpt2", 1024), small, 256, solver, 1.0)
    for seed, devices, kinds in itertools.product(
        options.seeds, options.devices, options.kinds
    ):
        fleet = draw_fleet(
            np.random.default_rng([seed, devices, kinds]), devices, kinds
        )
        name, batch, length = next(
            job for most, job in _JOBS.items() if devices <= most
        )
        print(f"\n{name}, batch {batch:,} x {length:,}, {fleet.name}, seed {seed}")
        graph = _graph(name, length)
        for budget_s, solver in itertools.product(options.budgets, options.solvers):
            found = ask(graph, fleet, batch, solver, budget_s)
            print(
                f"{budget_s:4g} s {solver:12} step {found.step_time_s or np.inf:8.3f} "
                f"s, took {found.seconds:6.2f} s: {found.strategy or found.why}",
                flush=True,
            )


@functools.cache
def _graph(name: str, length: int) -> ModelGraph:
    return capture(load_model(name, seq_len=length))


if __name__ == "__main__":
    main()
