"""Two figures of the job stream: blocking against load, degrees against beta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.job_stream_table import Comparison, Row, compare, rows_of, tasks_of
from benchmarks.job_stream_work import BETA_BINS, Task, Work, degrees
from envs.ramp.arrivals import LAWS

__all__ = ["LoadStudy", "draw_degrees", "draw_loads"]

#: Lines of the first figure and their colours: grey for policies that are fixed.
_LINES = {
    "para_max": "#c7c7c7",
    "para_min": "#9a9a9a",
    "min_feasible": "#6b6b6b",
    "best constant": "#000000",
    "rollout": "#56b4e9",
    "rollout, law told": "#0072b2",
    "learned": "#d55e00",
}
#: Rows of the second.
_SHOWN = ("min_feasible", "rollout, law told", "learned", "learned+lookahead")
_AWAY = "#d9d9d9"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStudy:
    """Replays at several loads.

    Attributes:
        loads: Arrivals over the laws' own in the same time.
        seeds: Seeds of the traces at each load.
    """

    loads: tuple[float, ...]
    seeds: range

    def tasks(self, work: Work) -> list[Task]:
        """List the episodes to replay; chooses the best constants first."""
        return [
            task
            for load in self.loads
            for law in LAWS
            for task in tasks_of(self._rows(work, law, load), law, self.seeds, load)
        ]

    def compare(self, work: Work) -> dict[float, tuple[Comparison, ...]]:
        """Compare policies at each load, after the tasks have been run."""
        return {
            load: tuple(
                one
                for law in LAWS
                for one in compare(
                    work, self._rows(work, law, load), law, self.seeds, load
                )
            )
            for load in self.loads
        }

    @staticmethod
    def _rows(work: Work, law: str, load: float) -> list[Row]:
        rows = rows_of(work.best(law, load))
        # With lookahead a learned policy would take hours.
        return [row for row in rows if row.label in _LINES]


def _save(figure: Figure, path: Path) -> None:
    # The same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": "job_stream", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def draw_loads(loads: Mapping[float, Sequence[Comparison]], path: Path) -> None:
    """Blocking rate against load, a panel a law, with 95 % intervals."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, len(LAWS), sharey=True)
    for law, panel in zip(LAWS, panels, strict=True):
        for label, colour in _LINES.items():
            found = [
                (100 * load, one.blocking)
                for load, compared in loads.items()
                for one in compared
                if (one.law, one.row.label) == (law, label)
            ]
            if not found:
                continue
            at = [load for load, _ in found]
            mean = np.array([rate.mean for _, rate in found])
            half = np.array([rate.half for _, rate in found])
            style = "--" if label == "best constant" else "-"
            panel.plot(at, mean, style, color=colour, label=label, linewidth=1.6)
            panel.fill_between(at, mean - half, mean + half, color=colour, alpha=0.2)
        panel.set_title(f"law {law}", fontsize=10)
        panel.set_xlabel("load (% of the benchmark's)")
        panel.grid(alpha=0.3)
        panel.set_ylim(bottom=0)
    panels[0].set_ylabel("blocking rate")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    _save(figure, path)


def draw_degrees(work: Work, rows: Sequence[Row], seeds: range, path: Path) -> None:
    """Share of each action by beta, a column a law and a row a policy."""
    shown = [row for row in rows if row.label in _SHOWN]
    figure = Figure(figsize=(11, 1 + 1.9 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), len(LAWS), sharex=True, sharey=True)
    names = ["turned away", *(f"degree {degree}" for degree in degrees())]
    steps = np.linspace(0.05, 0.95, len(names) - 1)
    colours = [_AWAY, *mpl.colormaps["viridis_r"](steps)]
    middles, width = (BETA_BINS[:-1] + BETA_BINS[1:]) / 2, np.diff(BETA_BINS) * 0.92
    for row, line in zip(shown, panels, strict=True):
        for law, panel in zip(LAWS, line, strict=True):
            counts = sum(work[t].chosen for t in tasks_of([row], law, seeds))
            total = np.maximum(np.sum(counts, axis=1, keepdims=True), 1)
            shares = np.asarray(counts / total)
            below = np.zeros(len(shares))
            for action, (name, colour) in enumerate(zip(names, colours, strict=True)):
                part = shares[:, action]
                panel.bar(middles, part, width, below, color=colour, label=name)
                below += part
            panel.set_ylim(0, 1)
        line[0].set_ylabel(f"{row.label}\nshare of decisions")
    for law, top, bottom in zip(LAWS, panels[0], panels[-1], strict=True):
        top.set_title(f"law {law}", fontsize=10)
        bottom.set_xlabel("beta")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    _save(figure, path)
