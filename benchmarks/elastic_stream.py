"""Elastic jobs of published traces: schedulers beside their published figures.

python -m benchmarks.elastic_stream
python -m benchmarks.elastic_stream --full --out docs/results
python -m benchmarks.elastic_stream --only plans [--prices FILE]
python -m benchmarks.elastic_stream --only decisions
python -m benchmarks.elastic_stream --only mixed

The first prints, within five minutes: the share of jobs that each scheduler blocks on
ElasticFlow's traces beside the figures of its authors' own simulation; the same
schedulers at one cost of a resize, at three loads; the share of openb's GPUs that each
placement rule allocates beside the published; schedulers for mixed types on Arena's
jobs; and how fast the world is. --full adds seeds and traces. The traces are in
MESHWRIGHT_DATA. ``plans`` prints what parallelism besides data parallelism is worth, on
plans that it prices first, in about five minutes; a file of --prices keeps the prices,
for other runs of the same version of the cost model. ``decisions`` prints how long
decisions take on three traces, in about two minutes. ``mixed`` prints the table of
mixed types alone, with a second trace.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not __package__:
    # Run as a file, Python looks for modules beside it and not in the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from benchmarks.intervals import bootstrap
from benchmarks.tables import cpu_name
from envs.elastic.costs import FreeResize, MeasuredOverheads, ReshardCost, ResizeCost
from envs.elastic.env import ElasticStreamEnv
from envs.elastic.pods import PodRoom, at_demand, read_nodes, read_pods
from envs.elastic.pools import HostPool, Pools
from envs.elastic.priced import (
    PLAN_LIMITS,
    PricedHosts,
    PricedPlans,
    plan_throughputs,
    priced_hosts,
    stand_in_job,
)
from envs.elastic.session import ElasticConfig, ElasticSession, ElasticSummary
from envs.elastic.throughput import (
    ThroughputSource,
    ThroughputTable,
    arena_throughputs,
    check_one_source,
    elasticflow_throughputs,
)
from envs.elastic.traces import JobTrace, at_load, read_trace, retimed, window
from envs.stream.prices import PriceBook
from planner.cluster import Cluster
from planner.errors import MeshwrightError, StrategyError
from policies.elastic.placement import PLACEMENT_RULES, fill, make_placement
from policies.elastic.registry import ELASTIC_RULES, make_rule, play
from policies.elastic.training import fitting_hosts

__all__ = ["main"]

#: Blocked, in per cent, in ElasticFlow's own simulation, commit 04a0109 run as its
#: run_fig8b.sh does; None where it did not end within 40 minutes.
_PUBLISHED: Mapping[str, Mapping[str, float | None]] = {
    "philly_103959.csv": {
        "elasticflow-published": 9.0,
        "edf+admission": 18.5,
        "edf": 56.4,
        "tiresias": 53.4,
        "gandiva": 58.7,
    },
    "cluster01.csv.gz": {
        "elasticflow-published": None,
        "edf+admission": 62.5,
        "edf": 81.3,
        "tiresias": 50.7,
        "gandiva": 83.8,
    },
}
_HOSTS = {"philly_103959.csv": 32, "cluster01.csv.gz": 64}
#: What that simulation charges each scheduler.
_CHARGED: Mapping[str, ResizeCost] = {
    "edf": FreeResize(),
    "tiresias": MeasuredOverheads(unchanged="nothing"),
    "gandiva": MeasuredOverheads(unchanged="all"),
}
#: openb's pods; those with types asked for, and those with more GPUs each.
_PODS = ("default", "gpuspec33", "multigpu50")
#: Types that Arena's users asked for, by the pool of ours that takes their jobs.
_ASKED = {"a100": ("a100", "a40"), "v100": ("v100", "a10")}
_LOADS = (0.5, 1.0, 1.5)
#: Traces that windows are taken of, the last for tests alone; schedulers in which jobs
#: may wait for their promise.
_WINDOWED = ("cluster01", "cluster02", "cluster04", "cluster03", "cluster05")
_WAITING = ("cheapest-first", "learned")
#: Traces that decisions are timed on, the first in the whole run.
_TIMED = ("cluster04", "cluster01", "cluster05")
_SINGLE = tuple(
    name for name, rule in ELASTIC_RULES.items() if rule.promises or not rule.mixed
)
_MIXED = tuple(name for name, rule in ELASTIC_RULES.items() if rule.mixed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="more seeds and traces")
    parser.add_argument(
        "--only", choices=("plans", "decisions", "mixed"), help="one table"
    )
    parser.add_argument("--prices", type=Path, help="file that keeps prices of plans")
    parser.add_argument("--out", type=Path, help="folder for a results file")
    options = parser.parse_args(arguments)
    try:
        lines = []
        folder = _folder()
        if options.only == "plans":
            tables = _by_plans(folder, options.prices)
        elif options.only == "decisions":
            tables = _decision_times(folder / "elasticflow", _TIMED)
        elif options.only == "mixed":
            tables = _mixed(folder / "arena", full=True)
        else:
            tables = _tables(folder, full=options.full)
        for line in itertools.chain(_head(), tables):
            print(line, flush=True)
            lines.append(line)
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.out:
        name = f"elastic_{options.only or 'stream'}"
        file = options.out / f"{name}_{date.today()}.md"
        file.write_text("\n".join(lines) + "\n")
    return 0


def _folder() -> Path:
    folder = Path(os.environ.get("MESHWRIGHT_DATA", "none")) / "traces"
    if not folder.is_dir():
        raise StrategyError(
            "MESHWRIGHT_DATA has no folder traces; set it to the folder of the data"
        )
    return folder


def _head() -> Iterator[str]:
    yield "# Elastic jobs of published traces"
    yield f"\n{cpu_name()}, {date.today()}."


def _tables(folder: Path, *, full: bool) -> Iterator[str]:
    source = elasticflow_throughputs(folder / "elasticflow" / "throughputs_A100")
    yield from _reproduced(folder / "elasticflow", source)
    yield from _by_load(folder / "elasticflow", source)
    if full:
        yield from _whole(folder / "elasticflow", source)
    yield from _promised(folder / "elasticflow", source, full=full)
    yield from _placed(folder / "openb", full=full)
    yield from _mixed(folder / "arena", full=full)
    yield from _speed(folder / "elasticflow", source)


def _played(
    trace: JobTrace,
    source: ThroughputSource,
    cluster: Pools,
    rule: str,
    cost: ResizeCost,
    slot_s: float,
) -> tuple[ElasticSummary, float]:
    """Play an episode; return its figures and its CPU time in seconds."""
    session = ElasticSession(
        ElasticConfig(
            trace=trace, source=source, cluster=cluster, cost=cost, slot_s=slot_s
        )
    )
    begun = time.process_time()
    play(session, make_rule(rule))
    return session.summary(), time.process_time() - begun


def _reproduced(folder: Path, source: ThroughputSource) -> Iterator[str]:
    yield "\n## Blocked, in per cent, beside ElasticFlow's own simulation\n"
    yield "| trace | scheduler | published | here | declined | late | broken | CPU s |"
    yield "|---|---|---|---|---|---|---|---|"
    lost = []
    for name, hosts in _HOSTS.items():
        trace = read_trace(folder / name, "elasticflow", source)
        cluster = (HostPool(kind="a100", hosts=hosts, devices=8),)
        for rule in ("elasticflow", "elasticflow-published"):
            # What is compiled at its first call is not to be timed.
            few = window(trace, 0, 20)
            _played(few, source, cluster, rule, FreeResize(), 60.0)
        for rule in ("elasticflow", *_PUBLISHED[name]):
            cost = _CHARGED.get(rule, MeasuredOverheads())
            summary, spent_s = _played(trace, source, cluster, rule, cost, 60.0)
            published = _PUBLISHED[name].get(rule)
            yield (
                f"| {trace.name}, {8 * hosts} GPUs | {rule} | "
                f"{'' if published is None else f'{published:.1f}'} | "
                f"{100 * summary.blocked:.1f} | {summary.declined} | {summary.late} | "
                f"{len(summary.broken)} | {spent_s:.1f} |"
            )
        best = source.rates().max(axis=(1, 2, 3))[trace.model]
        slack_s = trace.deadline_s - trace.submit_s
        beyond = int((trace.iterations / best > slack_s).sum())
        lost.append(
            f"{trace.name}: {beyond} of {len(trace)} jobs "
            f"({100 * beyond / len(trace):.1f} %)"
        )
    yield f"\nDeadlines that no number of GPUs could meet: {'; '.join(lost)}."


def _by_load(folder: Path, source: ThroughputSource) -> Iterator[str]:
    yield "\n## Blocked, in per cent, with one cost of a resize for all\n"
    yield (
        "philly_103959 on 256 GPUs, times between submissions divided by the load, "
        "decisions at once, a resize costs 30 s + 4 GB at 2 GB/s a device.\n"
    )
    yield "| scheduler | " + " | ".join(f"load {load:g}" for load in _LOADS) + " |"
    yield "|---|" + "---|" * len(_LOADS)
    trace = read_trace(folder / "philly_103959.csv", "elasticflow", source)
    cluster = (HostPool(kind="a100", hosts=32, devices=8),)
    check_one_source([source])
    for rule in _SINGLE:
        found = [
            _played(at_load(trace, load), source, cluster, rule, ReshardCost(), 0.0)[0]
            for load in _LOADS
        ]
        yield (
            f"| {rule} | " + " | ".join(f"{100 * s.blocked:.1f}" for s in found) + " |"
        )


def _whole(folder: Path, source: ThroughputSource) -> Iterator[str]:
    yield "\n## Blocked, in per cent, on whole traces\n"
    yield (
        "Clusters of the published figures, slots of 60 s, times between submissions "
        "divided by the load, a resize costs 30 s + 4 GB at 2 GB/s a device. In "
        "brackets: promises that were broken.\n"
    )
    names = ("elasticflow", "elasticflow-published", *_WAITING)
    yield "| trace | load | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 2) + "|"
    for name, hosts in _HOSTS.items():
        trace = read_trace(folder / name, "elasticflow", source)
        cluster = (HostPool(kind="a100", hosts=hosts, devices=8),)
        for load in _LOADS:
            stream, cells = at_load(trace, load), []
            for rule in names:
                found, _ = _played(stream, source, cluster, rule, ReshardCost(), 60.0)
                cells.append(f"{100 * found.blocked:.1f} ({len(found.broken)})")
            label = f"{trace.name}, {8 * hosts} GPUs | {load:g}"
            yield f"| {label} | {' | '.join(cells)} |"


def _promised(folder: Path, source: ThroughputTable, *, full: bool) -> Iterator[str]:
    yield "\n## Blocked, in per cent, where jobs may wait for their promise\n"
    jobs, count = 100, 10
    yield (
        f"{count} windows of {jobs} jobs of each trace, each on the smallest of 64 to "
        "2,048 GPUs that is not crowded more than twice; slots of 60 s; a resize costs "
        "30 s + 4 GB at 2 GB/s a device. Differences in points are means over windows, "
        "with 95 % intervals of pairs. Traces 01, 02 and 04 were looked at while the "
        "rule was written.\n"
    )
    names = ("elasticflow", *_WAITING)
    pairs = [(one, other) for at, one in enumerate(names) for other in names[:at]]
    heads = ["trace", "load", "GPUs", *names]
    heads += [f"{one} - {other}" for one, other in pairs]
    yield "| " + " | ".join([*heads, "promises broken"]) + " |"
    yield "|---" * (len(heads) + 1) + "|"
    for name in _WINDOWED if full else _WINDOWED[-1:]:
        trace = read_trace(folder / f"{name}.csv.gz", "elasticflow", source)
        last = len(trace) - jobs
        parts = [window(trace, at * last // (count - 1), jobs) for at in range(count)]
        for load in (0.5, 1.0, 1.5):
            streams = [at_load(part, load) for part in parts]
            yield _compared(f"{trace.name} | {load:g}", streams, source, names)
    yield from _decision_times(folder, _TIMED[:1])


def _compared(
    label: str,
    streams: Sequence[JobTrace],
    source: ThroughputTable,
    names: Sequence[str],
) -> str:
    """Return a row: what each scheduler blocks, and the differences of pairs.

    Args:
        label: Trace and load.
        streams: Windows, which all schedulers play.
        source: Throughputs.
        names: Schedulers.
    """
    hosts = [fitting_hosts(one, source, 2.0) for one in streams]
    found = [
        [
            _played(
                one,
                source,
                (HostPool(kind="a100", hosts=size, devices=8),),
                rule,
                ReshardCost(),
                60.0,
            )[0]
            for one, size in zip(streams, hosts, strict=True)
        ]
        for rule in names
    ]
    blocked = 100 * np.array([[one.blocked for one in row] for row in found])
    changes = [
        bootstrap(blocked[at] - blocked[other], np.mean).plain(1)
        for at in range(len(names))
        for other in range(at)
    ]
    sizes = f"{8 * min(hosts)} to {8 * max(hosts)}"
    return (
        f"| {label} | {sizes} | "
        + " | ".join(f"{value:.1f}" for value in blocked.mean(axis=1))
        + " | "
        + " | ".join(changes)
        + " | "
        + ", ".join(str(sum(len(one.broken) for one in row)) for row in found)
        + " |"
    )


def _decision_times(folder: Path, names: Sequence[str]) -> Iterator[str]:
    source = elasticflow_throughputs(folder / "throughputs_A100")
    yield (
        "\nA decision on 2,048 GPUs while 400 to 600 jobs are alive, in ms of CPU, and "
        "the first, about 700 new jobs:\n"
    )
    yield "| trace | scheduler | mean | 99th percentile | most | decisions | first |"
    yield "|---|---|---|---|---|---|---|"
    for trace, rule in itertools.product(names, ("elasticflow", *_WAITING)):
        jobs = read_trace(folder / f"{trace}.csv.gz", "elasticflow", source)
        yield _decision_time(window(jobs, 0, 700), source, trace, rule)


def _decision_time(
    part: JobTrace, source: ThroughputTable, trace: str, name: str
) -> str:
    """Return a row: times of decisions on jobs that all come at once."""
    burst = part.take(np.arange(len(part)), np.zeros(len(part)))
    cluster = (HostPool(kind="a100", hosts=256, devices=8),)
    config = ElasticConfig(trace=burst, source=source, cluster=cluster)
    # The first of two episodes begins without compiled code.
    for _ in range(2):
        session, rule = ElasticSession(config), make_rule(name)
        session.begin()
        spent_s: list[tuple[int, float]] = []
        while (alive := len(session.alive)) >= 400:
            begun = time.process_time()
            decision = rule.decide(session)
            spent_s.append((alive, time.process_time() - begun))
            session.apply(decision)
    found = [spent for alive, spent in spent_s if alive <= 600]
    return (
        f"| {trace} | {name} | {1e3 * np.mean(found):.1f} | "
        f"{1e3 * np.quantile(found, 0.99):.1f} | {1e3 * max(found):.1f} | "
        f"{len(found)} | {1e3 * spent_s[0][1]:.0f} |"
    )


def _placed(folder: Path, *, full: bool) -> Iterator[str]:
    yield "\n## Allocated GPUs of openb's cluster at 130 % demand, in per cent\n"
    nodes = read_nodes(folder / "openb_node_list_gpu_node.csv.gz")
    seeds = range(42, 52) if full else range(42, 44)
    yield f"Means of {len(seeds)} seeds.\n"
    yield "| pods | rule | published | here |"
    yield "|---|---|---|---|"
    for workload in _PODS if full else ("default",):
        pods = read_pods(folder / f"openb_pod_list_{workload}.csv.gz", nodes.kinds)
        published = _published_shares(folder, workload)
        for rule in PLACEMENT_RULES:
            shares = []
            for seed in seeds:
                room = PodRoom(nodes)
                asked = at_demand(pods, nodes, 1.3, seed)
                fill(room, asked, make_placement(rule, nodes, pods, seed))
                shares.append(100.0 * room.share)
            yield (
                f"| {workload} | {rule} | {published[rule]:.1f} | "
                f"{np.mean(shares):.1f} |"
            )


def _published_shares(folder: Path, workload: str) -> Mapping[str, float]:
    """Mean share at 130 % demand over the published seeds, by our names of rules."""
    names = {"01-Random": "random", "05-BestFit": "best_fit", "06-FGD": "fgd"}
    found: dict[str, list[float]] = {name: [] for name in names.values()}
    with gzip.open(folder / "fgd_expected_allocation.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            if row["workload"] != f"openb_pod_list_{workload}":
                continue
            if row["sc_policy"] in names:
                found[names[row["sc_policy"]]].append(float(row["130"]))
    return {name: float(np.mean(shares)) for name, shares in found.items()}


def _mixed(folder: Path, *, full: bool) -> Iterator[str]:
    yield "\n## Arena's jobs on 80 A100 and 80 V100\n"
    yield (
        "Mean times from submission to end are of the jobs that ended with a scheduler "
        "and of those that ended with all of them. Jobs that are late run on; declined "
        "ones do not run.\n"
    )
    yield (
        "| trace | scheduler | blocked, % | declined | late | broken | mean JCT, s | "
        "of the same jobs, s | used, % | ms a decision |"
    )
    yield "|---" * 10 + "|"
    source = arena_throughputs(folder / "optimal_iter_time_s.csv")
    cluster = (
        HostPool(kind="a100", hosts=20, devices=4),
        HostPool(kind="v100", hosts=5, devices=16),
    )
    for name in ("pai", "venus") if full else ("pai",):
        trace = read_trace(folder / f"simulate_trace_{name}.csv", "arena", source)
        config = ElasticConfig(trace=trace, source=source, cluster=cluster)
        rows, took_s = [], []
        for rule in _MIXED:
            session = ElasticSession(config)
            begun = time.process_time()
            play(session, make_rule(rule))
            rows.append((rule, session.summary(), time.process_time() - begun))
            took_s.append(session.end_s - trace.submit_s)
        ended = np.isfinite(took_s).all(axis=0)
        for (rule, found, spent_s), times_s in zip(rows, took_s, strict=True):
            same = times_s[ended].mean()
            yield (
                f"| {name} | {rule} | {100 * found.blocked:.1f} | {found.declined} | "
                f"{found.late} | {len(found.broken)} | {found.mean_jct_s:.0f} | "
                f"{same:.0f} | {100 * found.utilisation:.1f} | "
                f"{1e3 * spent_s / found.decisions:.1f} |"
            )


def _by_plans(folder: Path, prices: Path | None) -> Iterator[str]:
    yield "\n## Blocked, in per cent, by the plans that jobs may have\n"
    yield (
        "All throughputs are the planner's prices; with its best plan a job takes as "
        "long as in the trace on the devices asked for. A job that no plan fits is "
        "blocked, and counted in brackets. A resize costs 30 s + 4 GB at 2 GB/s a "
        "device. elasticflow knows one type: jobs that asked for A100 or A40 are on "
        "the A100, the others on the V100.\n"
    )
    yield "| jobs | scheduler | load | whole replicas | ZeRO, too | all plans |"
    yield "|---|---|---|---|---|---|"
    book = PriceBook(prices, shipped=False)
    source = elasticflow_throughputs(folder / "elasticflow" / "throughputs_A100")
    trace = read_trace(
        folder / "elasticflow" / "philly_103959.csv", "elasticflow", source
    )
    hosts = {"a100": priced_hosts(Cluster.from_preset("dgx-a100-40", 8), kind="a100")}
    for number in (32, 8):
        pools = {"a100": HostPool(kind="a100", hosts=number, devices=8)}
        name = f"{trace.name}, {8 * number} A100"
        yield from _plan_rows(name, trace, source, hosts, pools, "elasticflow", book)
    source = arena_throughputs(folder / "arena" / "optimal_iter_time_s.csv")
    trace = read_trace(folder / "arena" / "simulate_trace_pai.csv", "arena", source)
    hosts = {
        "a100": priced_hosts(
            Cluster.from_preset("dgx-a100-40", 8), kind="a100", devices=4
        ),
        "v100": priced_hosts(Cluster.from_preset("dgx2-v100", 8), kind="v100"),
    }
    pools = {
        "a100": HostPool(kind="a100", hosts=20, devices=4),
        "v100": HostPool(kind="v100", hosts=5, devices=16),
    }
    for rule in ("elasticflow", "sia-like", "cheapest-first"):
        name = "Arena's pai, 80 A100 + 80 V100"
        yield from _plan_rows(name, trace, source, hosts, pools, rule, book)
    book.save()


def _plan_rows(
    name: str,
    trace: JobTrace,
    measured: ThroughputSource,
    hosts: Mapping[str, tuple[PricedHosts, ...]],
    pools: Mapping[str, HostPool],
    rule: str,
    book: PriceBook,
) -> Iterator[str]:
    """Yield a row a load: jobs blocked with each limit of plans.

    A scheduler of one type has each pool, and the jobs that asked for it, for itself.
    """
    asked = [trace.models[model] for model in sorted(set(trace.model.tolist()))]
    degrees = [degree for degree in measured.degrees if degree <= 64]
    every = [host for kind in hosts.values() for host in kind]
    jobs = [stand_in_job(key) for key in asked]
    priced = plan_throughputs(jobs, every, degrees, book=book)
    longs = retimed(trace, measured, priced)
    apart = len(pools) > 1 and not ELASTIC_RULES[rule].mixed
    groups = [(kind,) for kind in pools] if apart else [tuple(pools)]
    for load in _LOADS:
        cells = []
        for limit in PLAN_LIMITS:
            blocked = unfit = 0
            for kinds in groups:
                mine = [host for kind in kinds for host in hosts[kind]]
                source = plan_throughputs(jobs, mine, degrees, plans=limit, book=book)
                cluster = tuple(pools[kind] for kind in kinds)
                here = at_load(longs, load)
                here = _asking(here, kinds) if apart else here
                lost, unable = _blocked(here, source, cluster, rule)
                blocked, unfit = blocked + lost + unable, unfit + unable
            cells.append(f"{100 * blocked / len(trace):.1f} ({unfit})")
        yield f"| {name} | {rule} | {load:g} | " + " | ".join(cells) + " |"


def _asking(trace: JobTrace, kinds: Sequence[str]) -> JobTrace:
    """Jobs whose users asked for one of some types, or for what they stand for."""
    wanted = {asked for kind in kinds for asked in _ASKED[kind]}
    return trace.take(
        np.array([job for job in range(len(trace)) if trace.kind[job] in wanted])
    )


def _blocked(
    trace: JobTrace, source: PricedPlans, cluster: Pools, rule: str
) -> tuple[int, int]:
    """Jobs that a scheduler blocks, and further jobs that no plan fits."""
    able = (source.rates().max(axis=(1, 2, 3)) > 0.0)[trace.model]
    fitting = trace.take(np.flatnonzero(able))
    summary, _ = _played(fitting, source, cluster, rule, ReshardCost(), 0.0)
    return summary.declined + summary.late, int((~able).sum())


def _speed(folder: Path, source: ThroughputSource) -> Iterator[str]:
    yield "\n## Speed, one core\n"
    trace = read_trace(folder / "philly_103959.csv", "elasticflow", source)
    cluster = (HostPool(kind="a100", hosts=32, devices=8),)
    config = ElasticConfig(trace=trace, source=source, cluster=cluster)
    yield "| | CPU s | decisions/s |"
    yield "|---|---|---|"
    for rule in _SINGLE:
        session = ElasticSession(config)
        begun = time.process_time()
        play(session, make_rule(rule))
        spent_s = time.process_time() - begun
        rate = session.decisions / spent_s
        yield f"| {len(trace)} jobs, {rule} | {spent_s:.2f} | {rate:.0f} |"
    for observe in (False, True):
        env = ElasticStreamEnv(config, observe=observe)
        begun = time.process_time()
        steps = _first_come(env)
        spent_s = time.process_time() - begun
        yield (
            f"| environment, {'with' if observe else 'without'} observations | "
            f"{spent_s:.2f} | {steps / spent_s:.0f} |"
        )


def _first_come(env: ElasticStreamEnv) -> int:
    """Run each job on the devices asked for, where they are free; return the steps."""
    env.reset(seed=0)
    session, steps = env.session, 0
    place = np.searchsorted(session.degrees, session.config.trace.gpus)
    while not session.over:
        free = int(session.capacity[0] - session.degree.sum())
        for slot, job in enumerate(env.view.tolist()):
            asked = int(session.config.trace.gpus[job])
            if session.degree[job] == 0 and asked <= free:
                env.step(np.int64(1 + slot * env.moves + 3 + place[job]))
                free -= asked
                steps += 1
        env.step(np.int64(0))
        steps += 1
    return steps


if __name__ == "__main__":
    sys.exit(main())
