"""Schedules of an all-gather found for a topology by an integer program.

Every rank begins with C chunks. In step s a link of relative bandwidth b carries at
most ``b r_s`` chunks; the rounds r_s of S steps add up to R. A schedule then takes
``S α + R / C n / (p β)`` for n bytes in all, so that few steps suit short messages and
few rounds a chunk long ones. Where the topology looks alike from each rank, the
schedule of one rank's chunks is found, and turned round for the others.

A sum is a reduce-scatter, which is an all-gather of the opposite links in reverse,
followed by an all-gather.

Source: Cai et al. 2021, Synthesizing Optimal Collective Algorithms, PPoPP'21.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.errors import StrategyError
from planner.schema.send_tables import Send, SendTable
from planner.search.communication.choose import Choice, choose
from planner.search.quiet_stdout import quiet_stdout
from planner.simulate.send_tables import Network, table_seconds

__all__ = [
    "Rounds",
    "all_reduce_of",
    "gather_bounds",
    "synthesize_all_reduce",
    "synthesize_gather",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_MOST_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Shape of a schedule.

    Attributes:
        steps: Messages follow each other so often.
        rounds: Times that a link of bandwidth 1 can send a chunk, in all steps.
        chunks: Of each rank.
    """

    steps: int
    rounds: int
    chunks: int


def gather_bounds(links: FloatArray) -> tuple[int, float]:
    """Return the fewest steps, and the fewest rounds a chunk, of any all-gather.

    Steps are the topology's diameter. A rank gets the chunks of all others through its
    links, and sends its own at least once.

    Args:
        links: Relative bandwidth from each rank to each other, 0 without a link.
            Shape [n, n].
    """
    n = len(links)
    reach = (links > 0) | np.eye(n, dtype=bool)
    reached, steps = reach, 1
    while not reached.all():
        wider = (reached.astype(int) @ reach.astype(int)) > 0
        if (wider == reached).all():
            raise StrategyError(
                "links do not join all ranks; give each a way to each other"
            )
        reached, steps = wider, steps + 1
    return steps, float((n - 1) / links.sum(axis=0).min())


def synthesize_gather(
    links: FloatArray, shape: Rounds, time_limit_s: float = 60.0
) -> SendTable | None:
    """Find an all-gather of a shape.

    Args:
        links: As :func:`gather_bounds`, of at most 8 ranks.
        shape: Steps, rounds and chunks.
        time_limit_s: For each way to divide the rounds among the steps.
    Returns:
        A checked table; None if there is none, or none was found in time.
    Raises:
        StrategyError: If the topology is larger or not joined.
        ModuleNotFoundError: Without scipy.
    """
    n = len(links)
    if links.shape != (n, n) or not 2 <= n <= _MOST_RANKS:
        raise StrategyError(
            f"links of shape {links.shape}; schedules are found for 2 to "
            f"{_MOST_RANKS} ranks, use an algorithm for more"
        )
    least_steps, least_rounds = gather_bounds(links)
    if shape.steps < least_steps or shape.rounds < least_rounds * shape.chunks - 1e-9:
        return None
    for rounds in _divisions(shape):
        sends = _solve(links, shape, rounds, time_limit_s)
        if sends is not None:
            table = SendTable(
                collective="all_gather",
                ranks=n,
                shares=(1 / (n * shape.chunks),) * (n * shape.chunks),
                owners=tuple(np.repeat(range(n), shape.chunks).tolist()),
                sends=tuple(sends),
            )
            table.check()
            return table
    return None


def _divisions(shape: Rounds) -> Iterator[tuple[int, ...]]:
    """Ways to divide the rounds among the steps, even ones first."""
    found = [
        parts
        for parts in itertools.product(range(1, shape.rounds + 1), repeat=shape.steps)
        if sum(parts) == shape.rounds
    ]
    yield from sorted(found, key=lambda parts: (max(parts) - min(parts), parts))


def _solve(
    links: FloatArray, shape: Rounds, rounds: Sequence[int], time_limit_s: float
) -> list[Send] | None:
    """Solve the program for one division of the rounds."""
    chosen = _Program(links, shape, rounds).solve(time_limit_s)
    if chosen is None:
        return None
    return [
        Send(step, source, destination, chunk, add=False)
        for step, chunk, source, destination in chosen
    ]


class _Program:
    """Variables: chunk c goes over link e in step s.

    Args:
        links: Relative bandwidths.
        shape: Of the schedule.
        rounds: Of each step.
    """

    def __init__(self, links: FloatArray, shape: Rounds, rounds: Sequence[int]) -> None:
        self._links, self._rounds = links, rounds
        self._edges = np.argwhere(links > 0)
        self._n, self._steps = len(links), shape.steps
        self._roots = np.repeat(np.arange(self._n), shape.chunks)
        self._shape = (shape.steps, len(self._roots), len(self._edges))

    def _places(self) -> IntArray:
        return np.arange(np.prod(self._shape)).reshape(self._shape)

    def _rows(self) -> Iterator[tuple[IntArray, FloatArray, float, float]]:
        """Variables, weights, and bounds of each constraint."""
        places = self._places()
        into = [np.flatnonzero(self._edges[:, 1] == rank) for rank in range(self._n)]
        for chunk, root in enumerate(self._roots):
            for rank in range(self._n):
                arrives = places[:, chunk, into[rank]].ravel()
                once = 0.0 if rank == root else 1.0
                yield arrives, np.ones(len(arrives)), once, once
            for step, edge in itertools.product(
                range(self._steps), range(len(self._edges))
            ):
                source = self._edges[edge, 0]
                if source == root:
                    continue
                # It goes on only if it has arrived in a step before.
                before = places[:step, chunk, into[source]].ravel()
                used = np.append(before, places[step, chunk, edge])
                weights = np.append(-np.ones(len(before)), 1.0)
                yield used, weights, -np.inf, 0.0
        for step, edge in itertools.product(
            range(self._steps), range(len(self._edges))
        ):
            used = places[step, :, edge]
            most = self._links[tuple(self._edges[edge])] * self._rounds[step]
            yield used, np.ones(len(used)), -np.inf, float(most)

    def _ends(self, edge: int) -> tuple[int, int]:
        source, destination = self._edges[edge].tolist()
        return source, destination

    def solve(self, time_limit_s: float) -> list[tuple[int, int, int, int]] | None:
        """Return step, chunk, source and destination of each message, if any."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        rows = list(self._rows())
        columns = np.concatenate([used for used, *_ in rows])
        weights = np.concatenate([weight for _, weight, *_ in rows])
        starts = np.cumsum([0, *(len(used) for used, *_ in rows)])
        size = int(np.prod(self._shape))
        matrix = csr_array((weights, columns, starts), shape=(len(rows), size))
        low, high = np.array([row[2] for row in rows]), np.array([r[3] for r in rows])
        with quiet_stdout():
            found = milp(
                np.zeros(size),
                integrality=np.ones(size),
                bounds=Bounds(0, 1),
                constraints=LinearConstraint(matrix, low, high),
                options={"time_limit": time_limit_s},
            )
        if found.x is None:
            return None
        taken = np.argwhere(np.round(found.x).reshape(self._shape) > 0)
        return [
            (step, chunk, *self._ends(edge)) for step, chunk, edge in taken.tolist()
        ]


def all_reduce_of(gather: SendTable, opposite: SendTable) -> SendTable:
    """Sum by a reduce-scatter and an all-gather of the same owners.

    Args:
        gather: An all-gather.
        opposite: An all-gather over the links turned round; the same one where links
            are alike both ways. Its messages in reverse are the reduce-scatter.
    Raises:
        StrategyError: If they are of other collectives or chunks.
    """
    if (gather.owners, gather.shares) != (opposite.owners, opposite.shares) or {
        gather.collective,
        opposite.collective,
    } != {"all_gather"}:
        raise StrategyError(
            f"a {gather.collective} of {len(gather.owners)} chunks and a "
            f"{opposite.collective} of {len(opposite.owners)}; give two all_gathers "
            f"of the same chunks and owners"
        )
    last = opposite.steps - 1
    sends = [
        Send(last - s.step, s.destination, s.source, s.chunk, add=True)
        for s in opposite.sends
    ]
    sends += [
        Send(opposite.steps + s.step, s.source, s.destination, s.chunk, add=False)
        for s in gather.sends
    ]
    table = SendTable(
        collective="all_reduce",
        ranks=gather.ranks,
        shares=gather.shares,
        sends=tuple(sends),
    )
    table.check()
    return table


def synthesize_all_reduce(
    network: Network,
    domains: Sequence[IntArray],
    size_bytes: float,
    time_limit_s: float = 2.0,
) -> Choice:
    """Return the fastest sum that is found: a synthesised one, or an algorithm.

    Schedules are found for the fast links alone, and for all of them.

    Args:
        network: Of at most 8 ranks.
        domains: As :func:`planner.search.communication.candidates`.
        size_bytes: Of the tensor.
        time_limit_s: For each program.
    """
    best = choose(network, domains, size_bytes)
    for links in _topologies(network.bandwidth):
        for shape in _shapes(links):
            gather = synthesize_gather(links, shape, time_limit_s)
            back = gather
            if (links != links.T).any():
                back = synthesize_gather(links.T, shape, time_limit_s)
            if gather is None or back is None:
                continue
            table = all_reduce_of(gather, back)
            seconds = float(table_seconds(table, network, size_bytes))
            if seconds < best.seconds:
                best = Choice(collective=None, table=table, seconds=seconds)
    return best


def _topologies(bandwidth: FloatArray) -> Iterator[FloatArray]:
    """Relative bandwidths, in whole multiples of the slowest link that is used."""
    n = len(bandwidth)
    off = np.where(np.eye(n, dtype=bool), 0.0, bandwidth)
    seen: list[FloatArray] = []
    for share in (0.5, 0.125, 0.0):
        used = np.where(off >= share * off.max(), off, 0.0)
        links = np.floor(used / used[used > 0].min() + 1e-9)
        joined = np.linalg.matrix_power((links > 0) + np.eye(n, dtype=int), n) > 0
        if joined.all() and not any((links == one).all() for one in seen):
            seen.append(links)
            yield links


def _shapes(links: FloatArray) -> Iterator[Rounds]:
    """Shapes near the bounds, those of few chunks first."""
    steps, rounds = gather_bounds(links)
    for chunks, more in itertools.product((1, 2, 3), (0, 1)):
        least = max(steps + more, int(np.ceil(rounds * chunks - 1e-9)))
        yield Rounds(steps=steps + more, rounds=least, chunks=chunks)
