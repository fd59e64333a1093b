"""Sizes at which algorithms of a sum cross over, on gloo and by the planner's timer.

python -m benchmarks.sum_crossovers [--repeats 7] [--markdown FILE]

Four processes of this machine sum tensors of several sizes by ring, halving and direct
tables. Under ``slowed`` they stand on a square whose sides are faster than the ways
across: before a step's messages a rank sleeps for the longest latency of them, and for
the bytes that it sends, or receives, at the rates of their links, one message after the
other. Under ``gloo`` nothing is slowed; the latency and the rate of the links are those
of messages between two of the processes. A crossover is where the faster of two
algorithms becomes the slower one; between measured sizes it is interpolated. Ends with
1 if a measured crossover under ``slowed`` is not within a factor of 2 of the timer's.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.tables import aligned, piped
from executors.communication.tables import TableSum
from planner.schema.send_tables import SendTable, direct, halving, ring
from planner.simulate.send_tables import Network, SharedLinks, table_seconds

__all__ = ["crossover", "square"]

_RANKS = 4
TABLES = {
    "ring": ring(range(_RANKS)),
    "halving": halving(range(_RANKS)),
    "direct": direct([1 / _RANKS] * _RANKS),
}
#: Bytes of the tensors; of a message between two processes.
_SIZES = tuple(4 * 2**power for power in range(13, 23))
_PING = (2**12, 2**22)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures of the four processes.

    Attributes:
        seconds: Median of each table and size, of the slowest rank.
        ping: Seconds of a message between two processes, by its bytes.
    """

    seconds: dict[tuple[str, int], float]
    ping: dict[int, float]


def square() -> Network:
    """Ranks on a square: links along its sides are ten times those across."""
    far = np.subtract.outer(np.arange(_RANKS), np.arange(_RANKS)) % _RANKS == 2
    return Network(
        bandwidth=np.where(far, 2e7, 2e8),
        latency=np.full((_RANKS, _RANKS), 0.02),
        shared=(SharedLinks(domain=np.arange(_RANKS)),),
    )


class _SlowedSum(TableSum):
    """A sum that sleeps in each step as a network's links would take."""

    def __init__(
        self, table: SendTable, group: dist.ProcessGroup, network: Network
    ) -> None:
        super().__init__(table, group)
        rank = group.rank()
        #: Latency, then seconds a byte of the tensor, of each step of this rank.
        self._waits: list[tuple[float, float]] = []
        for _, sends in itertools.groupby(
            sorted(table.sends), key=lambda send: send.step
        ):
            latency, each = 0.0, {True: 0.0, False: 0.0}
            for send in sends:
                if rank in (send.source, send.destination):
                    link = send.source, send.destination
                    latency = max(latency, float(network.latency[link]))
                    takes = table.shares[send.chunk] / network.bandwidth[link]
                    each[send.source == rank] += float(takes)
            if latency:
                self._waits.append((latency, max(each.values())))

    def rounds(self, flat: torch.Tensor) -> Iterator[None]:
        """Sum as the table says, asleep before each step."""
        waits = iter(self._waits)
        running = super().rounds(flat)
        while True:
            latency, each = next(waits, (0.0, 0.0))
            time.sleep(latency + each * flat.nbytes)
            if next(running, running) is running:
                return
            yield


def _rank(
    rank: int, store: str, network: Network | None, repeats: int, into: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, _RANKS), rank=rank, world_size=_RANKS
    )
    group = dist.group.WORLD
    assert group is not None
    found: dict[tuple[str, int], float] = {}
    for name, table in TABLES.items():
        summed = (
            TableSum(table, group)
            if network is None
            else _SlowedSum(table, group, network)
        )
        for size in _SIZES:
            flat = torch.ones(size // 4)
            taken = [_timed(summed, flat) for _ in range(repeats + 1)]
            found[name, size] = float(np.median(taken[1:]))
    ping = {size: _ping(rank, size) for size in _PING}
    if rank == 0:
        torch.save((found, ping), into)
    dist.destroy_process_group()


def _timed(summed: TableSum, flat: torch.Tensor) -> float:
    """Seconds until the slowest rank has its sum."""
    dist.barrier()
    started = time.perf_counter()
    summed.run(flat)
    taken = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def _ping(rank: int, size: int, times: int = 20) -> float:
    """Seconds of a message from rank 0 to rank 1, half of its way there and back."""
    flat, taken = torch.ones(size // 4), []
    for _ in range(times):
        dist.barrier()
        started = time.perf_counter()
        if rank == 0:
            dist.send(flat, 1)
            dist.recv(flat, 1)
        elif rank == 1:
            dist.recv(flat, 0)
            dist.send(flat, 0)
        taken.append((time.perf_counter() - started) / 2)
    return float(np.median(taken))


def measure(network: Network | None, repeats: int) -> Measured:
    """Sum on this machine's processes, over a network's links if one is given."""
    with tempfile.TemporaryDirectory() as folder:
        store, into = Path(folder, "store"), Path(folder, "found")
        mp.spawn(  # type: ignore[attr-defined, no-untyped-call]
            _rank,
            args=(str(store), network, repeats, str(into)),
            nprocs=_RANKS,
        )
        seconds, ping = torch.load(into)
    return Measured(seconds=seconds, ping=ping)


def links_of(ping: Mapping[int, float]) -> Network:
    """Return equal links that take a message as long as it was measured."""
    (short, few), (long, many) = sorted(ping.items())
    rate = (long - short) / max(many - few, 1e-9)
    latency = max(few - short / rate, 1e-6)
    return Network(
        bandwidth=np.full((_RANKS, _RANKS), rate),
        latency=np.full((_RANKS, _RANKS), latency),
        shared=(SharedLinks(domain=np.arange(_RANKS)),),
    )


def crossover(sizes: Sequence[float], first: object, second: object) -> float | None:
    """Return the size at which the faster of two becomes the slower; None if never.

    Args:
        sizes: Bytes, ascending. Shape [n].
        first: Seconds of one algorithm. Shape [n].
        second: Of the other. Shape [n].
    """
    gap = np.log(np.asarray(first, float)) - np.log(np.asarray(second, float))
    flips = np.flatnonzero(np.sign(gap[:-1]) * np.sign(gap[1:]) < 0)
    if not len(flips):
        return None
    at = int(flips[-1])
    share = gap[at] / (gap[at] - gap[at + 1])
    ends = math.log(sizes[at]), math.log(sizes[at + 1])
    return math.exp(ends[0] + float(share) * (ends[1] - ends[0]))


def _rows(name: str, network: Network, found: Measured) -> list[tuple[str, ...]]:
    rows = []
    fine = np.geomspace(_SIZES[0], _SIZES[-1], 400)
    for one, other in itertools.combinations(TABLES, 2):
        by_model = crossover(
            fine.tolist(),
            table_seconds(TABLES[one], network, fine),
            table_seconds(TABLES[other], network, fine),
        )
        seen = crossover(
            _SIZES,
            [found.seconds[one, size] for size in _SIZES],
            [found.seconds[other, size] for size in _SIZES],
        )
        ratio = f"{seen / by_model:.2f}" if seen and by_model else ""
        shown = [f"{v / 1e3:,.0f}" if v else "none" for v in (by_model, seen)]
        rows.append((name, f"{one}, {other}", *shown, ratio))
    return rows


def _times(name: str, network: Network, found: Measured) -> list[tuple[str, ...]]:
    rows = []
    for size in _SIZES:
        cells = [name, f"{size / 1e3:,.0f}"]
        for table, sends in TABLES.items():
            model = float(table_seconds(sends, network, size))
            cells.append(f"{model * 1e3:.1f} / {found.seconds[table, size] * 1e3:.1f}")
        rows.append(tuple(cells))
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.sum_crossovers")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(arguments)
    slowed = square()
    cases = {"slowed": (slowed, measure(slowed, options.repeats))}
    plain = measure(None, options.repeats)
    cases["gloo"] = links_of(plain.ping), plain
    crossings: list[tuple[str, ...]] = [
        ("links", "algorithms", "model kB", "measured kB", "ratio")
    ]
    times: list[tuple[str, ...]] = [
        ("links", "kB", *(f"{name}: model / measured ms" for name in TABLES))
    ]
    for name, (network, found) in cases.items():
        crossings += _rows(name, network, found)
        times += _times(name, network, found)
    print(aligned(crossings), aligned(times), sep="\n\n")
    if options.markdown is not None:
        text = f"{piped(crossings)}\n\n{piped(times)}\n"
        options.markdown.write_text(text, encoding="utf-8")
    ratios = [
        row[4] for row in crossings[1:] if row[0] == "slowed" and row[2] != "none"
    ]
    return 0 if all(ratio and 0.5 <= float(ratio) <= 2 for ratio in ratios) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
