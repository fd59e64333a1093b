"""Drawn fleets of home PCs and spot machines, divided by several rules.

python -m benchmarks.federation [--fleets 50] [--seed 0] [--first 0] [--rows FILE]
                                [--hosts 5 10] [--models gpt2-large llama3.2-1b]
python -m benchmarks.federation --read FILE... [--markdown FILE]

``--rows`` keeps results as JSON lines, so that several processes can share the fleets;
``--read`` puts them together.

Each fleet has 5 to 10 hosts: PCs with one GPU of 8 to 32 GB on lines of 10 Mb/s to 1
Gb/s, and spot machines with 1 to 4 GPUs of 16 to 80 GB on 1 to 10 Gb/s. It trains
GPT-2 large or Llama 3.2 1B, which small PCs hold together alone. Weights are exchanged
every 500 steps under every rule, so that progress a sample is alike and the predicted
mean step counts:

- federation: ``planner.federate``, the best of the next two;
- rules: orders of hosts by rules, then by changes, cut by the exact dynamic program;
- pointer: orders that the learned partitioner's pointer draws, cut alike, and no
  changes;
- random: as many random orders, cut alike;
- single: the best single member, some or all of the fleet;
- equal parts: DiLoCo on members of equally many hosts (or on the hosts that hold the
  model alone) with equal shares of the batch, over the best number of members;
- genetic: Ravnest's clusters, with shares of the batch by speed.

The spread is that of the paper's fitness, seconds in which clusters send their memory:
of the genetic search's clusters, of as many that ``balance`` forms, and of as many that
an exact dynamic program cuts the pointer's orders into, -1 if no cut of any holds the
model in every cluster. Ends with 1 if
a member of a federation does not fit, or a balanced spread is larger.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.tables import aligned, piped
from planner import Cluster, ModelGraph
from planner.capture import capture, load_model
from planner.cluster import device_type
from planner.errors import NoFeasiblePlanError
from planner.federations import (
    FleetPlanner,
    PlannedDivision,
    plan_divisions,
    segment_pricer,
)
from planner.request import PlanOptions
from planner.schema.methods.local_steps import LocalSteps
from planner.search.base import GroupOrderer, get_partitioner
from planner.search.federation import (
    Nodes,
    SegmentPricer,
    balance,
    cut_evenly,
    genetic_search,
    spread_of,
)

__all__ = ["Fleet", "Result", "compare", "draw_fleet"]

#: GPUs of home PCs, and of spot machines.
_HOME = ("rtx2080-8", "rtx3080-10", "rtx4080-16", "rtx3090-24", "rtx4090-24")
_HOME = (*_HOME, "rtx5090-32")
_SPOT = ("t4-16", "l4-24", "a40-48", "l40s-48", "a100-80")
_HOME_MBIT = (10, 20, 50, 100, 250, 500, 1000)
_SPOT_MBIT = (1000, 2500, 10_000)
#: PCIe 4.0 x16 between the GPUs of a spot machine, bytes/s; its latency, seconds.
_INSIDE, _INSIDE_S = 20e9, 1e-5
_MODELS, _TOKENS = ("gpt2-large", "llama3.2-1b"), 512
_BATCH, _PERIOD, _MOST = 256, 500, 8
#: Orders that the pointer draws, and as many random ones.
_DRAWN = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A drawn fleet.

    Attributes:
        cluster: Its devices and links.
        memory_bytes: Of each host, all devices. Length hosts.
        mbit: Of each host's connection, Mb/s. Length hosts.
    """

    cluster: Cluster
    memory_bytes: tuple[float, ...]
    mbit: tuple[int, ...]

    @property
    def nodes(self) -> Nodes:
        """Hosts as the genetic algorithm sees them."""
        return Nodes(
            ram_mb=np.array([int(one / 2**20) for one in self.memory_bytes]),
            bandwidth_mbit_per_s=np.array(self.mbit),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Mean steps of one fleet under each rule, in seconds; infinite if none fits.

    Attributes:
        fleet: Number of the fleet.
        model: Name of the model.
        hosts: Number of hosts.
        members: Of the federation.
        fits: Whether every member of it fits in memory.
        federation_s: Mean step; likewise rules_s, pointer_s, random_s, single_s,
            equal_s and genetic_s.
        genetic_spread: Of the paper's clusters, in seconds.
        balanced_spread: Of as many clusters by moves and swaps.
        pointer_spread: Of as many clusters that are cut from the pointer's orders.
    """

    fleet: int
    model: str
    hosts: int
    members: int
    fits: bool
    federation_s: float
    rules_s: float
    pointer_s: float
    random_s: float
    single_s: float
    equal_s: float
    genetic_s: float
    genetic_spread: int
    balanced_spread: int
    pointer_spread: int


def draw_fleet(seed: int, fewest: int = 5, most: int = 10) -> Fleet:
    """Draw hosts, lines and latencies.

    Args:
        seed: Of all draws.
        fewest: Smallest number of hosts.
        most: Largest number of hosts.
    """
    random = np.random.default_rng(seed)
    kinds, hosts, mbit, memory = [], [], [], []
    for host in range(int(random.integers(fewest, most + 1))):
        home = random.random() < 0.7
        kind = device_type(str(random.choice(_HOME if home else _SPOT)))
        count = 1 if home else int(random.choice([1, 1, 2, 4]))
        kinds += [kind] * count
        hosts += [host] * count
        mbit.append(int(random.choice(_HOME_MBIT if home else _SPOT_MBIT)))
        memory.append(count * kind.memory_bytes)
    place = np.array(hosts)
    # The devices of a host share its line.
    share = np.array(mbit)[place] * 1.25e5 / np.bincount(place)[place]
    speed = np.minimum.outer(share, share)
    wait = random.uniform(0.005, 0.04, size=len(mbit))[place]
    latency = wait[:, None] + wait[None, :]
    same = place[:, None] == place[None, :]
    speed, latency = np.where(same, _INSIDE, speed), np.where(same, _INSIDE_S, latency)
    cluster = Cluster.from_matrices(speed, latency, kinds, hosts, name=f"fleet{seed}")
    return Fleet(cluster=cluster, memory_bytes=tuple(memory), mbit=tuple(mbit))


def compare(number: int, graph: ModelGraph, fleet: Fleet, seed: int) -> Result:
    """Divide a fleet by each rule."""
    options = PlanOptions(global_batch=_BATCH, seed=seed, any_dtype=True)
    planner = FleetPlanner(
        graph=graph,
        fleet=fleet.cluster,
        options=options,
        exchange=LocalSteps(period=_PERIOD),
    )
    pricer = segment_pricer(planner)
    drawn = _pointers_orders(pricer)
    count = len(pricer.groups)
    random = np.random.default_rng(seed)
    shuffled = [random.permutation(count) for _ in range(_DRAWN)]
    found = _divided(planner, pricer)
    rules = _divided(replace(planner, orderer=None), pricer)
    hosts = _hosts(fleet.cluster)
    nodes, model_mb = fleet.nodes, int(16 * graph.num_parameters / 2**20)
    paper = genetic_search(nodes, model_mb, seed=seed)
    mine = balance(nodes, model_mb, len(paper.clusters), seed=seed)
    return Result(
        fleet=number,
        model=graph.name,
        hosts=len(hosts),
        members=len(found[0].devices) if found else 0,
        fits=all(_fits(one) for one in found[:1]),
        federation_s=_least(found),
        rules_s=_least(rules),
        pointer_s=_least(_divided(planner, pricer, drawn)),
        random_s=_least(_divided(planner, pricer, shuffled)),
        single_s=_single(planner, pricer, found),
        equal_s=_equal(planner, pricer, hosts),
        genetic_s=_balanced(planner, pricer, paper.clusters, hosts),
        genetic_spread=spread_of(paper.cluster, nodes),
        balanced_spread=spread_of(mine, nodes),
        pointer_spread=_cut_spread(drawn, nodes, model_mb, len(paper.clusters)),
    )


def _divided(
    planner: FleetPlanner,
    pricer: SegmentPricer,
    orders: Sequence[NDArray[np.int64]] | None = None,
) -> list[PlannedDivision]:
    """Divisions by the planner's search, or by cuts of orders; none if none fits."""
    try:
        return plan_divisions(planner, _MOST, pricer, orders=orders)[0]
    except NoFeasiblePlanError:
        return []


def _least(found: Sequence[PlannedDivision]) -> float:
    return found[0].step_time_s if found else math.inf


def _pointers_orders(pricer: SegmentPricer) -> Sequence[NDArray[np.int64]]:
    learned = get_partitioner("learned")
    assert isinstance(learned, GroupOrderer)
    return learned.group_orders(pricer.request, _DRAWN)


def _cut_spread(
    orders: Sequence[NDArray[np.int64]], nodes: Nodes, model_mb: int, clusters: int
) -> int:
    """Least spread of clusters that are cut from orders; -1 if none hold the model."""
    cut = [cut_evenly(order, nodes, model_mb, clusters) for order in orders]
    return min((spread_of(one, nodes) for one in cut if one is not None), default=-1)


def _hosts(cluster: Cluster) -> list[list[int]]:
    place = cluster.host_of_device
    return [np.flatnonzero(place == one).tolist() for one in range(place[-1] + 1)]


def _fits(division: PlannedDivision) -> bool:
    return all(
        entry.total_bytes <= entry.limit_bytes
        for plan in division.plans
        for entry in plan.prediction.memory
    )


def _single(
    planner: FleetPlanner, pricer: SegmentPricer, found: Sequence[PlannedDivision]
) -> float:
    """Mean step of the best single member."""
    alone = [one.step_time_s for one in found if len(one.devices) == 1]
    with contextlib.suppress(NoFeasiblePlanError):
        alone += [one.step_time_s for one in plan_divisions(planner, 1, pricer)[0]]
    return min(alone, default=math.inf)


def _devices(
    members: Sequence[Sequence[int]], hosts: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Devices of members, which are given by their hosts."""
    return tuple(
        tuple(sorted(device for host in one for device in hosts[host]))
        for one in members
    )


def _balanced(
    planner: FleetPlanner,
    pricer: SegmentPricer,
    members: Sequence[Sequence[int]],
    hosts: Sequence[Sequence[int]],
) -> float:
    """Mean step of given members with shares of the batch by speed."""
    rates = [pricer.of(tuple(sorted(one)))[0] for one in members]
    try:
        given = _devices(members, hosts)
        return planner.balanced(given, rates if all(rates) else None).step_time_s
    except NoFeasiblePlanError:
        return math.inf


def _equal(
    planner: FleetPlanner, pricer: SegmentPricer, hosts: Sequence[Sequence[int]]
) -> float:
    """Mean step of the best DiLoCo on equal parts with equal shares.

    Those are planned that closed forms find the fastest two.
    """
    candidates = sorted(
        _equal_parts(planner, pricer, hosts),
        key=lambda members: _estimate(pricer, members),
    )
    batch, least = planner.options.global_batch, math.inf
    for members in candidates[:2]:
        size = batch // len(members)
        try:
            made = planner.planned(_devices(members, hosts), [size] * len(members))
        except NoFeasiblePlanError:
            # It stays at infinity if neither has a plan, which the table counts.
            continue
        # Fewer samples a step where the batch does not divide.
        least = min(least, made.step_time_s * batch / (size * len(members)))
    return least


def _estimate(pricer: SegmentPricer, members: Sequence[Sequence[int]]) -> float:
    """Mean step of members with equal shares, by closed forms."""
    found = [pricer.of(tuple(sorted(one))) for one in members]
    count = len(members)
    slowest = min(rate for rate, _ in found)
    if not slowest:
        return math.inf
    share = 2 * (count - 1) / count / _PERIOD
    return pricer.batch / count / slowest + share * max(part for _, part in found)


def _equal_parts(
    planner: FleetPlanner, pricer: SegmentPricer, hosts: Sequence[Sequence[int]]
) -> Iterator[list[list[int]]]:
    """Divisions into members of equally many hosts, in the order of their numbers.

    Also some of the hosts that hold the model alone: those with the fastest lines, and
    those that compute fastest.
    """
    numbers = range(len(hosts))
    for count in range(2, min(_MOST, len(hosts)) + 1):
        if len(hosts) % count == 0:
            each = len(hosts) // count
            yield [list(range(first, first + each)) for first in numbers[::each]]
    able = [one for one in numbers if pricer.of((one,))[0]]
    orders = (
        sorted(able, key=lambda one: -_line(planner.fleet, hosts[one])),
        sorted(able, key=lambda one: -pricer.of((one,))[0]),
    )
    for order in orders:
        for count in range(2, min(_MOST, len(able)) + 1):
            yield [[one] for one in order[:count]]


def _line(cluster: Cluster, devices: Sequence[int]) -> float:
    others = [d for d in range(cluster.num_devices) if d not in devices]
    return max((cluster.link(devices[0], other)[0] for other in others), default=0.0)


def _row(one: Result) -> tuple[str, ...]:
    def seconds(value: float) -> str:
        return f"{value:.3g}" if math.isfinite(value) else "none"

    return (
        str(one.fleet),
        one.model,
        str(one.hosts),
        str(one.members),
        seconds(one.federation_s),
        seconds(one.rules_s),
        seconds(one.pointer_s),
        seconds(one.random_s),
        seconds(one.single_s),
        seconds(one.equal_s),
        seconds(one.genetic_s),
        str(one.genetic_spread),
        str(one.balanced_spread),
        str(one.pointer_spread),
    )


_HEAD = (
    *("fleet", "model", "hosts", "members", "federation s", "rules s", "pointer s"),
    *("random s", "single s", "equal parts s", "genetic s"),
    *("GA spread", "own spread", "pointer spread"),
)


def _gains(results: Sequence[Result], name: str) -> list[tuple[str, str]]:
    """Summary of the time beside that of another rule."""
    finite = [one for one in results if math.isfinite(getattr(one, name))]
    ratios = [one.federation_s / getattr(one, name) for one in finite]
    if not ratios:
        return []
    saved = 1 - statistics.mean(ratios)
    return [
        (f"time saved on average beside {name[:-2]}", f"{saved:.1%}"),
        (f"worst ratio beside {name[:-2]}", f"{max(ratios):.3f}"),
        (f"fleets where {name[:-2]} has none", str(len(results) - len(finite))),
    ]


def _pointer_against(results: Sequence[Result], name: str) -> tuple[str, str]:
    """Mean ratio of the pointer to another, wins, ties within 0.1 % and losses."""
    pairs = [(one.pointer_s, getattr(one, name)) for one in results]
    wins = sum(mine < 0.999 * other for mine, other in pairs)
    losses = sum(mine > 1.001 * other for mine, other in pairs)
    ratios = [math.log(a / b) for a, b in pairs if math.isfinite(a + b)]
    mean = math.exp(statistics.mean(ratios)) if ratios else math.nan
    return (
        f"pointer over {name[:-2]}: mean ratio, wins/ties/losses",
        f"{mean:.4f}, {wins}/{len(pairs) - wins - losses}/{losses}",
    )


def summary(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Figures over all fleets that some part of holds the model."""
    able = [one for one in results if one.members]
    rows = [
        ("fleets", str(len(results))),
        ("of which hold the model", str(len(able))),
        ("federations whose every member fits", str(sum(one.fits for one in able))),
        ("members on average", f"{statistics.mean(o.members for o in able):.1f}"),
    ]
    for name in ("single_s", "equal_s", "genetic_s"):
        rows += _gains(able, name)
    for name in ("rules_s", "random_s", "genetic_s"):
        rows.append(_pointer_against(able, name))
    cut = [one for one in results if one.pointer_spread >= 0]
    no_more = sum(one.balanced_spread <= one.genetic_spread for one in results)
    rows += [
        ("spread no larger than the genetic search's", f"{no_more} of {len(results)}"),
        (
            "mean spread, genetic and own",
            f"{statistics.mean(o.genetic_spread for o in results):.1f} s, "
            f"{statistics.mean(o.balanced_spread for o in results):.1f} s",
        ),
        (
            "pointer's spread no larger, of those that are cut",
            f"{sum(o.pointer_spread <= o.genetic_spread for o in cut)} of {len(cut)}",
        ),
        (
            "their mean spread, pointer, genetic and own",
            " s, ".join(
                f"{statistics.mean(getattr(one, name) for one in cut):.1f}"
                for name in ("pointer_spread", "genetic_spread", "balanced_spread")
            )
            + " s",
        ),
    ]
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.federation")
    parser.add_argument("--fleets", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, nargs=2, default=(5, 10))
    parser.add_argument("--models", nargs="+", default=_MODELS)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--read", type=Path, nargs="+")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(arguments)
    if options.read:
        lines = [line for path in options.read for line in path.open()]
        results = [Result(**json.loads(line)) for line in lines]
    else:
        numbers = range(options.first, options.first + options.fleets)
        results = _compared(numbers, options)
    results.sort(key=lambda one: one.fleet)
    table, figures = [_HEAD, *map(_row, results)], summary(results)
    print(aligned(table), aligned(figures), sep="\n\n")
    if options.markdown is not None:
        text = f"{piped([('', ''), *figures])}\n\n{piped(table)}\n"
        options.markdown.write_text(text, encoding="utf-8")
    able = [one for one in results if one.members]
    sound = all(one.fits for one in able) and all(
        one.balanced_spread <= one.genetic_spread for one in results
    )
    return 0 if sound else 1


def _compared(numbers: range, options: argparse.Namespace) -> list[Result]:
    """Compare fleets, and keep the results one by one."""
    graphs = [capture(load_model(name, seq_len=_TOKENS)) for name in options.models]
    seed, rows = options.seed, options.rows
    results = []
    for number in tqdm(numbers, disable=not sys.stderr.isatty()):
        fleet = draw_fleet(seed * 10_000 + number, *options.hosts)
        graph = graphs[number % len(graphs)]
        results.append(compare(number, graph, fleet, seed))
        if rows is not None:
            with rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(results[-1])) + "\n")
    return results


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
