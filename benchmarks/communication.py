"""Own messages of sums over replicas: what they save, and where algorithms cross over.

python -m benchmarks.communication clusters [--clusters 200] [--uniform 40] [--seed 0]
    [--first 0] [--rows FILE] [--markdown FILE]
python -m benchmarks.communication clusters --read FILE... [--markdown FILE]

``clusters`` draws clusters with uneven links, plans a model on each with messages of
our own allowed and without (``--pin replicas=library``), and compares the predicted
steps of the two best plans. A third of the clusters has hosts with unlike network
interfaces, a third a rack that is slower than the others, a third two sites. Uniform
clusters follow, on which both plans must be the same. ``--rows`` keeps results as JSON
lines, so that several processes can share the clusters; ``--read`` puts them together.
Planning time is that of the processor, behind one call of each kind for the caches.
Ends with 1 if a step is longer with own messages, or a uniform cluster's plan changes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.tables import aligned, piped
from planner import Cluster, ModelGraph
from planner.api import plan_graph
from planner.capture import capture, load_model
from planner.cluster import device_type
from planner.errors import NoFeasiblePlanError
from planner.request import PlanOptions
from planner.schema import Plan
from planner.schema.cluster import ClusterDocument, HostGroup, Level, Link

__all__ = ["Drawn", "Result", "compare", "draw_cluster"]

_KINDS = ("interfaces", "slow rack", "two sites")
_DEVICES = ("v100-32", "a100-40", "a100-80", "h100-80")
#: Models, and tokens of a sample; images have their own.
_MODELS = (("gpt2", 512), ("gpt2-large", 512), ("vit-b", None), ("vit-l", None))
#: Gb/s of a host's network, and between two sites, in bytes/s.
_GBIT = 1.25e8
_HOST_GBIT = (10, 25, 50, 100, 200)
_SITE_GBIT = (1, 2, 5, 10)
#: NVLink and PCIe inside hosts, bytes/s.
_INSIDE = (12e9, 25e9, 150e9)
#: Samples a step on each device.
_EACH = (4, 16, 64)
_BUDGET = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A drawn cluster and what is trained on it.

    Attributes:
        kind: Of its unevenness; ``uniform`` if there is none.
        cluster: Devices and links.
        model: Name of the model.
        batch: Samples a step.
    """

    kind: str
    cluster: Cluster
    model: str
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Best plans with and without own messages on one cluster; 0 if none fits.

    Attributes:
        number: Number of the cluster.
        kind: As of :class:`Drawn`; likewise model.
        hosts: Number of hosts.
        devices: Number of devices.
        library_s: Predicted step by the library's sums.
        own_s: With messages of our own allowed.
        algorithm: That the plan with own messages uses.
        strategy: Label of that plan.
        same_bytes: Whether both plans send the same bytes.
        library_plan_s: Processor time of planning; likewise own_plan_s.
    """

    number: int
    kind: str
    model: str
    hosts: int
    devices: int
    library_s: float = 0.0
    own_s: float = 0.0
    algorithm: str = "none"
    strategy: str = ""
    same_bytes: bool = True
    library_plan_s: float = 0.0
    own_plan_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Step with own messages over that without; 1 if nothing fits."""
        return self.own_s / self.library_s if self.library_s else 1.0


def draw_cluster(seed: int, number: int, kind: str) -> Drawn:
    """Draw hosts, links, a model and a batch.

    Args:
        seed: Of all clusters.
        number: Of this one.
        kind: Of its unevenness.
    """
    random = np.random.default_rng([seed, number, (*_KINDS, "uniform").index(kind)])
    device = device_type(str(random.choice(_DEVICES)))
    each = int(random.choice([1, 2, 4, 8]))
    count = int(random.integers(2, 5)) * 2
    inside = Link(bandwidth_bytes_per_s=float(random.choice(_INSIDE)), latency_s=3e-6)
    if kind == "interfaces":
        speeds = random.choice(_HOST_GBIT, size=count).tolist()
        # The first host differs from the last, or the cluster would be uniform.
        speeds[0] = _HOST_GBIT[(_HOST_GBIT.index(speeds[-1]) + 1) % len(_HOST_GBIT)]
    else:
        speeds = [int(random.choice(_HOST_GBIT[2:]))] * count
    if kind == "slow rack":
        slow = int(random.integers(1, count // 2 + 1))
        speeds[-slow:] = [speeds[0] / float(random.choice([4, 8, 10]))] * slow
    latency = float(random.choice([5e-6, 2e-5, 1e-4]))
    hosts = tuple(
        HostGroup(
            name=f"host{host}",
            count=1,
            devices_per_host=each,
            device=device.name,
            link=inside,
            nic=Link(bandwidth_bytes_per_s=gbit * _GBIT / each, latency_s=latency),
        )
        for host, gbit in enumerate(speeds)
    )
    fastest = Link(
        bandwidth_bytes_per_s=max(_HOST_GBIT) * _GBIT / each, latency_s=latency
    )
    levels = [Level(name="network", link=fastest)]
    if kind == "two sites":
        first = int(random.integers(1, count))
        between = float(random.choice(_SITE_GBIT)) * _GBIT
        fewest = min(first, count - first) * each
        far = Link(
            bandwidth_bytes_per_s=between / fewest,
            latency_s=float(random.uniform(0.002, 0.03)),
        )
        levels = [
            Level(name="site", hosts=(first, count - first), link=fastest),
            Level(name="between sites", link=far),
        ]
    document = ClusterDocument(
        name=f"{kind} {number}",
        device_types=(device,),
        hosts=hosts,
        levels=tuple(levels),
        source="drawn",
    )
    model = _MODELS[int(random.integers(len(_MODELS)))][0]
    batch = int(random.choice(_EACH)) * each * count
    cluster = Cluster.from_document(document)
    return Drawn(kind=kind, cluster=cluster, model=model, batch=batch)


def compare(number: int, drawn: Drawn, graph: ModelGraph) -> Result:
    """Plan a model with and without messages of our own."""
    place = drawn.cluster.host_of_device
    facts = Result(
        number=number,
        kind=drawn.kind,
        model=drawn.model,
        hosts=int(place[-1]) + 1,
        devices=len(place),
    )
    try:
        library, library_plan_s = _planned(drawn, graph, {"replicas": "library"})
        own, own_plan_s = _planned(drawn, graph, {})
    except NoFeasiblePlanError:
        return facts
    return Result(
        number=number,
        kind=drawn.kind,
        model=drawn.model,
        hosts=facts.hosts,
        devices=facts.devices,
        library_s=library.prediction.step_time_s,
        own_s=own.prediction.step_time_s,
        algorithm=own.strategy.communication.replicas.algorithm,
        strategy=own.strategy.label(),
        same_bytes=dict(library.prediction.collective_bytes)
        == dict(own.prediction.collective_bytes),
        library_plan_s=library_plan_s,
        own_plan_s=own_plan_s,
    )


def _planned(
    drawn: Drawn, graph: ModelGraph, pin: dict[str, str]
) -> tuple[Plan, float]:
    started = time.process_time()
    options = PlanOptions(
        global_batch=drawn.batch, pin=pin, evaluation_budget=_BUDGET, seed=0
    )
    made = plan_graph(graph, drawn.cluster, options)
    return made, time.process_time() - started


_HEAD = (
    *("cluster", "kind", "hosts", "devices", "model", "library s", "own s"),
    *("ratio", "sums", "strategy"),
)


def _row(one: Result) -> tuple[str, ...]:
    return (
        str(one.number),
        one.kind,
        str(one.hosts),
        str(one.devices),
        one.model,
        f"{one.library_s:.3g}",
        f"{one.own_s:.3g}",
        f"{one.ratio:.3f}",
        one.algorithm,
        " ".join(part for part in one.strategy.split() if "," not in part),
    )


def summary(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Figures of each kind of cluster, and of all with uneven links."""
    kinds = [
        kind for kind in (*_KINDS, "uniform") if any(o.kind == kind for o in results)
    ]
    rows: list[tuple[str, ...]] = [
        ("clusters", "number", "mean", "worst", "best", "own sums", "planning time")
    ]
    for kind in ("all uneven", *kinds):
        chosen = [
            one
            for one in results
            if one.library_s
            and (one.kind == kind or (kind == "all uneven" and one.kind != "uniform"))
        ]
        if not chosen:
            continue
        ratios = [one.ratio for one in chosen]
        own = sum(one.algorithm != "library" for one in chosen)
        before = sum(one.library_plan_s for one in chosen)
        taken = sum(one.own_plan_s for one in chosen) / before
        rows.append(
            (
                kind,
                str(len(chosen)),
                f"{statistics.mean(ratios):.3f}",
                f"{max(ratios):.3f}",
                f"{min(ratios):.3f}",
                str(own),
                f"{taken - 1:+.1%}",
            )
        )
    return rows


def _compared(options: argparse.Namespace) -> list[Result]:
    graphs = {
        name: capture(load_model(name, seq_len=length)) for name, length in _MODELS
    }
    tasks = [
        (number, _KINDS[number % len(_KINDS)])
        for number in range(options.first, options.first + options.clusters)
    ]
    tasks += [(number, "uniform") for number in range(options.uniform)]
    warm = draw_cluster(options.seed + 1, 0, _KINDS[0])
    for pin in ({}, {"replicas": "library"}):
        _planned(warm, graphs[warm.model], pin)
    results = []
    for number, kind in tqdm(tasks, disable=not sys.stderr.isatty()):
        drawn = draw_cluster(options.seed, number, kind)
        results.append(compare(number, drawn, graphs[drawn.model]))
        if options.rows is not None:
            with options.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(results[-1])) + "\n")
    return results


def _clusters(options: argparse.Namespace) -> int:
    if options.read:
        lines = [line for path in options.read for line in path.open()]
        results = [Result(**json.loads(line)) for line in lines]
    else:
        results = _compared(options)
    results.sort(key=lambda one: (one.kind == "uniform", one.number))
    table, figures = [_HEAD, *map(_row, results)], summary(results)
    print(aligned(table), aligned(figures), sep="\n\n")
    if options.markdown is not None:
        text = f"{piped(figures)}\n\n{piped(table)}\n"
        options.markdown.write_text(text, encoding="utf-8")
    even = [one for one in results if one.kind == "uniform"]
    sound = all(one.ratio <= 1 for one in results) and all(
        one.ratio == 1 and one.same_bytes for one in even
    )
    return 0 if sound else 1


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.communication")
    commands = parser.add_subparsers(required=True)
    clusters = commands.add_parser("clusters")
    clusters.add_argument("--clusters", type=int, default=200)
    clusters.add_argument("--uniform", type=int, default=40)
    clusters.add_argument("--first", type=int, default=0)
    clusters.add_argument("--seed", type=int, default=0)
    clusters.add_argument("--rows", type=Path)
    clusters.add_argument("--read", type=Path, nargs="+")
    clusters.add_argument("--markdown", type=Path)
    clusters.set_defaults(run=_clusters)
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
