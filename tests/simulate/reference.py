"""A slow, plain simulator of action tables, written apart from the product's."""

from __future__ import annotations

import heapq
import itertools

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
    """Makespan, by a heap of events; links are first come, first served."""
    work = {"F": forward, "B": backward + weight, "I": backward, "W": weight}
    parts = _parts(table)
    flat = [[part for pair in own for part in pair] for own in parts]
    closes = [
        [n == len(pair) - 1 for pair in own for n in range(len(pair))] for own in parts
    ]
    position = [0] * table.pp
    free_at: list[float | None] = [0.0] * table.pp
    arrived: dict[tuple[str, int, int], float] = {}
    link_free: dict[int, float] = {}
    unsent: list[list[tuple[str, int, int]]] = [[] for _ in range(table.pp)]
    ticket = itertools.count()
    events: list[tuple[float, int, int, int]] = []
    latest = 0.0

    def input_of(part: tuple[str, int, int]) -> tuple[str, int, int] | None:
        letter, stage, microbatch = part
        if letter == "F":
            return ("F", stage - 1, microbatch) if stage else None
        if letter in "BI" and stage < table.num_stages - 1:
            return ("G", stage + 1, microbatch)
        return None

    def start(rank: int) -> None:
        if free_at[rank] is None or position[rank] == len(flat[rank]):
            return
        part = flat[rank][position[rank]]
        needs = input_of(part)
        if needs is not None and needs not in arrived:
            return
        begin = max(free_at[rank] or 0.0, arrived[needs] if needs else 0.0)
        free_at[rank] = None
        end = begin + work[part[0]][part[1]]
        heapq.heappush(events, (end, rank, next(ticket), 0))

    def send(part: tuple[str, int, int], now: float) -> None:
        letter, stage, microbatch = part
        if letter == "W":
            return
        key = ("F" if letter == "F" else "G", stage, microbatch)
        other = stage + 1 if letter == "F" else stage - 1
        arrived[key] = now
        if not 0 <= other < table.num_stages:
            return
        target = int(table.rank_of_stage[other])
        if target != int(table.rank_of_stage[stage]):
            boundary = min(stage, other)
            took = there[boundary] if letter == "F" else back[boundary]
            links = link_there if letter == "F" else link_back
            link = -1 if links is None else int(links[boundary])
            begin = now if link < 0 else max(now, link_free.get(link, 0.0))
            arrived[key] = begin + took
            if link >= 0:
                link_free[link] = arrived[key]
        start(target)

    for rank in range(table.pp):
        start(rank)
    while events:
        now, rank, _, _ = heapq.heappop(events)
        latest = max(latest, now)
        here = position[rank]
        unsent[rank].append(flat[rank][here])
        position[rank] = here + 1
        free_at[rank] = now
        if closes[rank][here]:
            for part in unsent[rank]:
                send(part, now)
            unsent[rank].clear()
        start(rank)
    assert position == [len(own) for own in flat]
    return latest


def held_bytes(table: ActionTable, sizes: np.ndarray, freed: float) -> np.ndarray:
    """Greatest sum of activations on each rank, by walking its actions."""
    peak = np.zeros(table.pp)
    gives = {"F": 1.0, "B": -1.0, "I": -freed, "W": freed - 1.0}
    for rank, own in enumerate(_parts(table)):
        held = 0.0
        for letter, stage, _ in (part for pair in own for part in pair):
            held += gives[letter] * sizes[stage]
            peak[rank] = max(peak[rank], held)
        assert abs(held) < 1e-9
    return peak
