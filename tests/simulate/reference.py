"""A slow, plain simulator of action tables, written apart from the product's."""

from __future__ import annotations

import heapq

import numpy as np

from planner.simulate import ActionKind, ActionTable

__all__ = ["held_bytes", "simulate"]


def _parts(table: ActionTable) -> list[list[list[tuple[str, int, int]]]]:
    """Per rank its actions, each a list of (letter, stage, microbatch)."""
    found = []
    for rank in range(table.pp):
        own = []
        for action in table.rank(rank):
            if action.kind is ActionKind.OVERLAP_F_B:
                pair = ("B", action.paired_stage, action.paired_microbatch)
                own.append([("F", action.stage, action.microbatch), pair])
            else:
                own.append([(action.kind.letter, action.stage, action.microbatch)])
        found.append(own)
    return found


_Part = tuple[str, int, int]


class _Run:
    """One simulation: a heap of ends of parts, links first come, first served."""

    def __init__(
        self,
        table: ActionTable,
        work: dict[str, np.ndarray],
        took: dict[str, np.ndarray],
        links: dict[str, np.ndarray],
    ) -> None:
        self.table, self.work, self.took, self.links = table, work, took, links
        parts = _parts(table)
        self.flat = [[part for pair in own for part in pair] for own in parts]
        self.closes = [
            [part is pair[-1] for pair in own for part in pair] for own in parts
        ]
        self.position = [0] * table.pp
        self.free_at: list[float | None] = [0.0] * table.pp
        self.arrived: dict[_Part, float] = {}
        self.link_free: dict[int, float] = {}
        self.events: list[tuple[float, int]] = []

    def start(self, rank: int) -> None:
        """Start the next part of a rank if the rank is free and the input is known."""
        free, here = self.free_at[rank], self.position[rank]
        if free is None or here == len(self.flat[rank]):
            return
        letter, stage, microbatch = self.flat[rank][here]
        needs = None
        if letter == "F" and stage > 0:
            needs = ("F", stage - 1, microbatch)
        if letter in "BI" and stage < self.table.num_stages - 1:
            needs = ("G", stage + 1, microbatch)
        if needs is not None and needs not in self.arrived:
            return
        begin = max(free, self.arrived[needs]) if needs else free
        self.free_at[rank] = None
        heapq.heappush(self.events, (begin + self.work[letter][stage], rank))

    def send(self, part: _Part, now: float) -> None:
        """Hand on what a part has made."""
        letter, stage, microbatch = part
        if letter == "W":
            return
        way = "F" if letter == "F" else "G"
        other = stage + 1 if way == "F" else stage - 1
        arrives = now
        if 0 <= other < self.table.num_stages:
            ranks = self.table.rank_of_stage
            if ranks[other] != ranks[stage]:
                boundary = min(stage, other)
                link = int(self.links[way][boundary])
                if link >= 0:
                    arrives = max(now, self.link_free.get(link, 0.0))
                arrives += self.took[way][boundary]
                if link >= 0:
                    self.link_free[link] = arrives
        self.arrived[way, stage, microbatch] = arrives
        if 0 <= other < self.table.num_stages:
            self.start(int(self.table.rank_of_stage[other]))

    def run(self) -> float:
        """Makespan."""
        unsent: list[list[_Part]] = [[] for _ in self.flat]
        now = 0.0
        for rank in range(self.table.pp):
            self.start(rank)
        while self.events:
            now, rank = heapq.heappop(self.events)
            here = self.position[rank]
            self.position[rank], self.free_at[rank] = here + 1, now
            unsent[rank].append(self.flat[rank][here])
            if self.closes[rank][here]:
                for part in unsent[rank]:
                    self.send(part, now)
                unsent[rank].clear()
            self.start(rank)
        assert self.position == [len(own) for own in self.flat]
        return now


def simulate(
    table: ActionTable,
    forward: np.ndarray,
    backward: np.ndarray,
    weight: np.ndarray,
    there: np.ndarray,
    back: np.ndarray,
    link_there: np.ndarray | None = None,
    link_back: np.ndarray | None = None,
) -> float:
    """Makespan of one candidate; every transfer has its own link if none is given."""
    work = {"F": forward, "B": backward + weight, "I": backward, "W": weight}
    own = np.full(len(there), -1)
    links = {
        "F": own if link_there is None else link_there,
        "G": own if link_back is None else link_back,
    }
    return _Run(table, work, {"F": there, "G": back}, links).run()


def held_bytes(table: ActionTable, sizes: np.ndarray) -> np.ndarray:
    """Greatest sum of bytes on each rank, by walking its actions.

    ``sizes`` has rows for: forward done, input gradient done, both halves done, whole
    backward done. Shape [4, stages].
    """
    peak = np.zeros(table.pp)
    for rank, own in enumerate(_parts(table)):
        holds: dict[tuple[int, int], float] = {}
        total, split = 0.0, set()
        for letter, stage, microbatch in (part for pair in own for part in pair):
            if letter == "I":
                split.add((stage, microbatch))
            assert (letter == "W") == ((stage, microbatch) in split) or letter == "I"
            size = sizes["FIWB".index(letter), stage]
            total += size - holds.get((stage, microbatch), 0.0)
            holds[stage, microbatch] = size
            peak[rank] = max(peak[rank], total)
        assert len(holds) == table.virtual_stages * table.num_microbatches
    return peak
