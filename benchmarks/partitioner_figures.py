"""Two figures: quality against time, and the learned partitioner against the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.intervals import Estimate
from benchmarks.partitioner_table import KindTable

__all__ = ["draw_curves", "draw_ratios"]

Curves = Mapping[str, Mapping[str, Sequence[tuple[float, Estimate]]]]

#: Grey and thin for baselines, so that what is learned is seen.
_COLOURS = {
    "learned": "#d55e00",
    "auto": "#0072b2",
    "exhaustive": "#000000",
    "evolutionary": "#009e73",
    "anneal": "#cc79a7",
    "beam": "#e69f00",
    "metis": "#56b4e9",
    "dtfm": "#f0e442",
    "expert": "#9a9a9a",
    "random": "#c7c7c7",
}
_OTHER = "#6b6b6b"
_LEARNED = ("learned", "auto")
#: Values above are off the picture.
_HIGHEST = 2.05


def _save(figure: Figure, path: Path) -> None:
    # Without it the file would say when it was drawn.
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_curves(curves: Curves, path: Path) -> None:
    """Mean ratio to the best that is known against the budget, a panel a kind."""
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(3.9 * columns, 0.7 + 3.0 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, (kind, lines) in zip(panels, curves.items(), strict=False):
        _draw_lines(panel, lines)
        panel.set_title(kind, fontsize=10)
        panel.set_xlabel("budget (s)")
        panel.set_ylabel("over the best known")
    for panel in panels[len(curves) :]:
        panel.set_axis_off()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(9, len(labels))
    )
    _save(figure, path)


def _draw_lines(
    panel: Axes, lines: Mapping[str, Sequence[tuple[float, Estimate]]]
) -> None:
    for name, points in lines.items():
        at = [budget for budget, _ in points]
        colour = _COLOURS.get(name, _OTHER)
        value = np.array([ratio.value for _, ratio in points])
        bold = name in _LEARNED
        panel.plot(
            at,
            value,
            color=colour,
            label=name,
            linewidth=2.2 if bold else 1.1,
            marker="o",
            markersize=4 if bold else 2.5,
            zorder=3 if bold else 2,
        )
        if bold:
            low = [ratio.low for _, ratio in points]
            high = [ratio.high for _, ratio in points]
            panel.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    ticks = [budget for budget, _ in next(iter(lines.values()))]
    panel.set_xscale("log")
    panel.set_xticks(ticks, [f"{budget:g}" for budget in ticks])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    top = max(ratio.value for points in lines.values() for _, ratio in points)
    panel.set_ylim(0.99, min(_HIGHEST, 1.02 * max(1.05, top)))


def draw_ratios(tables: Sequence[KindTable], path: Path) -> None:
    """Over the best baseline of each world, with intervals."""
    kinds = list(dict.fromkeys(table.kind for table in tables))
    bars = [
        (name, budget_s)
        for name in _LEARNED
        for budget_s in sorted({table.budget_s for table in tables})
    ]
    figure = Figure(figsize=(2 + 1.5 * len(kinds), 3.6), layout="constrained")
    panel = figure.subplots()
    width = 0.8 / max(1, len(bars))
    longest = max((budget_s for _, budget_s in bars), default=1.0)
    for place, (name, budget_s) in enumerate(bars):
        found = [
            (kinds.index(table.kind), row.against_best.ratio)
            for table in tables
            if table.budget_s == budget_s and (row := table.row(name)) is not None
        ]
        if not found:
            continue
        at = np.array([kind for kind, _ in found]) - 0.4 + width * (place + 0.5)
        value = np.array([ratio.value for _, ratio in found])
        low = value - np.array([ratio.low for _, ratio in found])
        high = np.array([ratio.high for _, ratio in found]) - value
        panel.bar(
            at,
            100 * (value - 1),
            width * 0.92,
            yerr=100 * np.array([low, high]),
            color=_COLOURS[name],
            # The longer the budget, the fuller the colour.
            alpha=0.35 + 0.65 * budget_s / longest,
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
            label=f"{name}, {budget_s:g} s",
        )
    panel.axhline(0, color="#000000", linewidth=1)
    panel.set_xticks(range(len(kinds)), kinds)
    panel.set_ylabel("over the best baseline\nof each world (%)")
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=5)
    _save(figure, path)
