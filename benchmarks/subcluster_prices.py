"""Plans of sub-clusters for schedulers: time of each, and distance from a search.

python -m benchmarks.subcluster_prices --prices prices.json.gz

Every job of the job streams, with MESHWRIGHT_DATA also PipeDream's graphs, is planned
by :mod:`planner.search.subclusters` on all shapes of a cluster in one batch, and on a
host of each kind of the mixed one. A plan is cut exactly and priced by the simulator;
its step time over that of an exhaustive search with 12 simulations, which also tries
other orders of devices, is the ratio. Milliseconds are of the processor, for each part:
of the first call for a job on a cluster, and of the fastest of three later ones.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.tables import piped
from envs.stream.jobs import JobType, built_in_jobs, profiled_jobs
from envs.stream.network import Shape, StreamNetwork
from envs.stream.prices import PriceBook
from planner.cluster import Cluster
from planner.cost import CostModel, PricingContext
from planner.measurements.store import calibrated_recipe, choose_calibration
from planner.schema import Precision
from planner.search import Request, get_partitioner
from planner.search.refine import ExactPricer
from planner.search.subclusters import plan_subclusters

_CLUSTERS = ("dgx-a100:4", "dgx-h100:4", "a40-pcie:4", "mixed")
_MIXED = ("dgx-a100:2", "a40-pcie:2")


def make_cluster(name: str) -> Cluster:
    """Make a preset as job streams see it, or two hosts of A100 and two of A40."""
    mixed = name == "mixed"
    made = [Cluster.parse(one).document for one in (_MIXED if mixed else (name,))]
    hosts, types = [], []
    for one in made:
        nic = {"nic": one.levels[-1].link} if mixed else {}
        hosts += [group.model_copy(update={"nics": None, **nic}) for group in one.hosts]
        types += one.device_types
    update = {"name": name, "device_types": tuple(types), "hosts": tuple(hosts)}
    return Cluster(made[0].model_copy(update=update))


def list_parts(network: StreamNetwork) -> list[tuple[NDArray[np.int64], Shape | None]]:
    """List the shapes of a cluster with their devices, and parts of two kinds."""
    of_host = np.arange(network.num_devices).reshape(network.num_hosts, -1)
    parts: list[tuple[NDArray[np.int64], Shape | None]] = []
    for shape in network.shapes(min(32, network.num_devices), spread=1):
        hosts = np.flatnonzero(network.kind_of_host == shape.kind)[: shape.hosts]
        parts.append((of_host[hosts, : shape.per_host].reshape(-1), shape))
    if len(network.kinds) > 1:
        firsts = np.unique(network.kind_of_host, return_index=True)[1]
        parts += [(of_host[firsts, :each].reshape(-1), None) for each in (1, 2, 4, 8)]
    return parts


def make_request(job: JobType, cluster: Cluster, order: Any, **budget: int) -> Request:
    """Ask what a price book asks, of some devices of the whole cluster."""
    graph, fitted = job.read_graph(), choose_calibration(None, cluster)
    kind = {"float32": Precision(compute="float32")}
    context = PricingContext(
        graph=graph,
        cluster=cluster,
        order=np.asarray(order),
        precision=kind.get(graph.dtype, Precision()),
        recipe=calibrated_recipe("torch", fitted),
        calibration=fitted,
    )
    return Request(context=context, global_batch=job.global_batch, **budget)  # type: ignore[arg-type]


def measure(name: str, job: JobType, book: PriceBook) -> list[dict[str, Any]]:
    """Plan a job on all parts of a cluster; one entry for each part."""
    cluster = make_cluster(name)
    network, took, found = StreamNetwork(cluster), [], []
    parts, request = list_parts(network), make_request(job, cluster, cluster.free)
    for _ in range(4):
        start = time.process_time()
        found = plan_subclusters(request, [devices for devices, _ in parts])
        took.append(1e3 * (time.process_time() - start) / len(parts))
    exact = ExactPricer(request=request, model=CostModel(request.context))
    entries = []
    for (devices, shape), plan in zip(parts, found, strict=True):
        row = None if plan is None else plan.solution.row
        cuts = [] if row is None else exact.candidates(row, devices, cuts=2)
        if shape is not None:
            kind, link = network.kinds[shape.kind], network.levels[-1]
            price = book.price(job, kind, shape, None if shape.hosts == 1 else link)
            searched = [] if price is None else [price.step_s[0]]
        else:
            ask = make_request(job, cluster, devices, evaluation_budget=12)
            every = get_partitioner("exhaustive").search(ask).candidates
            whole = [c for c in every if c.strategy.mesh.num_devices == len(devices)]
            searched = [one.cost.step_time_s for one in whole]
        simulated = [one.cost.step_time_s for one in cuts if one.cost.fits]
        entry = {"cluster": name, "job": job.name, "devices": devices.tolist()}
        entry |= {"across": shape is None, "first_ms": took[0], "ms": min(took[1:])}
        entry["promised_s"] = None if plan is None else plan.step_time_s
        entry["simulated_s"] = min(simulated, default=None)
        entry["searched_s"] = min(searched, default=None)
        entries.append(entry)
    return entries


def table(entries: list[dict[str, Any]]) -> str:
    """Sum entries up by cluster and kind of jobs."""
    head = ["cluster", "jobs", "parts", "ms", "most", "first call", "ratio", "97th"]
    lines = [[*head, "worst", "within 3 %", "no plan"]]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in entries:
        kind = "graphs" if entry["job"].startswith("pipedream") else "models"
        cluster = "both kinds" if entry["across"] else entry["cluster"]
        groups.setdefault((cluster, kind), []).append(entry)
    for names, mine in groups.items():
        fit = [one for one in mine if one["searched_s"]]
        both = [one for one in fit if one["simulated_s"]]
        ratio = np.array([one["simulated_s"] / one["searched_s"] for one in both])
        ms, first = (np.array([one[key] for one in mine]) for key in ("ms", "first_ms"))
        figures = [ms.mean(), ms.max(), first.mean(), np.exp(np.log(ratio).mean())]
        figures += [np.quantile(ratio, 0.97), ratio.max(), 100 * (ratio <= 1.03).mean()]
        cells = [f"{figure:.4g}" for figure in figures]
        lines.append([*names, str(len(mine)), *cells, str(len(fit) - len(both))])
    return piped(lines)


def main() -> None:
    """Print the table, or with --json every part."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--clusters", nargs="+", default=_CLUSTERS)
    parser.add_argument("--prices", help="file that keeps the prices of searches")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    profiles = profiled_jobs() if os.environ.get("MESHWRIGHT_DATA") else ()
    book, entries = PriceBook(options.prices), []
    for name in options.clusters:
        for job in (*built_in_jobs(), *profiles):
            entries += measure(name, job, book)
        book.save()
    print(json.dumps(entries) if options.json else table(entries))


if __name__ == "__main__":
    main()
