"""What became of every job of the replay, kept while episodes go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from envs.ramp.world import Arrival

if TYPE_CHECKING:
    from envs.ramp.episodes import RampEpisodes

__all__ = ["LoggedEpisode", "ReplayLog"]

Index = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class LoggedEpisode:
    """One episode's decisions so far; lists have an entry a decision.

    Attributes:
        arrivals: Up to the horizon, also those on it, which are not decided.
        outcome: Number of the outcome in OUTCOMES of :mod:`envs.ramp.steps`.
        degree: That was asked for; 0 for turning away.
        split: Largest split of a placed job, else 0.
        jct_s: Completion time of a placed job, else 0.
        servers: That a placed job holds, as bits.
    """

    arrivals: Sequence[Arrival]
    outcome: list[int] = field(default_factory=list)
    degree: list[int] = field(default_factory=list)
    split: list[int] = field(default_factory=list)
    jct_s: list[float] = field(default_factory=list)
    servers: list[int] = field(default_factory=list)


class ReplayLog:
    """Follows episodes side by side; nothing in them depends on it."""

    def __init__(self) -> None:
        self.episodes: dict[int, LoggedEpisode] = {}

    def begin(self, row: int, arrivals: Sequence[Arrival], horizon_s: float) -> None:
        """Start an episode anew."""
        there = [arrival for arrival in arrivals if arrival.time_s <= horizon_s]
        self.episodes[row] = LoggedEpisode(arrivals=there)

    def note(
        self, episodes: RampEpisodes, rows: Index, choice: Index, outcome: Index
    ) -> None:
        """Keep decisions that were taken, before time goes on.

        Args:
            episodes: That they were taken in.
            rows: Episodes that are not over. Shape [r].
            choice: Index of a degree, or -1. Shape [b].
            outcome: Of each episode's decision. Shape [b].
        """
        tables, running = episodes.tables, episodes.running
        for row in rows.tolist():
            kept, taken = self.episodes[row], int(choice[row])
            model = int(
                episodes.arrivals.model[row, episodes.arrivals.position[row] - 1]
            )
            placed = outcome[row] == 0
            split = int(tables.splits[model, taken]) if placed else 0
            jct_s = episodes.known_jct_s[row, model, split] if placed else 0.0
            latest = int(running.number[row]) - 1
            kept.outcome.append(int(outcome[row]))
            kept.degree.append(int(tables.degrees[taken]) if taken >= 0 else 0)
            kept.split.append(split)
            kept.jct_s.append(float(jct_s))
            kept.servers.append(int(running.masks[row, latest]) if placed else 0)
