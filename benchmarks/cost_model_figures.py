"""Two figures of the cost model: predicted against measured, and error by source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.cost_model_fits import Judged
from benchmarks.cost_model_scores import Prediction, family_of, runs_of, time_scores

__all__ = ["draw_errors", "draw_scatter"]

_BAND = 0.1
#: Fits by their colour; the baseline is black.
_COLOURS = {
    "shipped": "#009e73",
    "fitted": "#56b4e9",
    "loso": "#0072b2",
    "lodo": "#d55e00",
}


def _save(figure: Figure, path: Path) -> None:
    # The same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": "cost_model", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def _colours(judged: Sequence[Judged]) -> dict[str, tuple[float, ...]]:
    # Releases of one table share a colour.
    families = sorted(_names(judged))
    table = mpl.colormaps["tab20"]
    return {family: table(at % 20) for at, family in enumerate(families)}


def _names(judged: Sequence[Judged]) -> dict[str, str]:
    """Families by what to call them: as their source, if they have but one."""
    sources = {run.source for one in judged for run in runs_of(one.predictions)}
    found: dict[str, str] = {}
    for source in sources:
        family = family_of(source)
        found[family] = family if family in found else source
    return found


def draw_scatter(judged: Sequence[Judged], path: Path) -> None:
    """Seconds of a step, a panel a fit, a colour a source; the band is 10 % wide."""
    figure = Figure(figsize=(4.6 * len(judged) + 0.4, 6.2), layout="constrained")
    panels = figure.subplots(1, len(judged), sharex=True, sharey=True, squeeze=False)
    colours, names = _colours(judged), _names(judged)
    for one, panel in zip(judged, panels[0], strict=True):
        known = [run for run in runs_of(one.predictions) if run.step_s is not None]
        for family, colour in colours.items():
            runs = [run for run in known if family_of(run.source) == family]
            panel.scatter(
                [run.measured_s for run in runs],
                [run.step_s for run in runs],
                s=14,
                color=colour,
                alpha=0.75,
                linewidths=0,
                label=names[family],
            )
        if known:
            times = [t for run in known for t in (run.measured_s, run.step_s or 1)]
            ends = np.array([min(times) / 1.3, max(times) * 1.3])
            panel.plot(ends, ends, color="#000000", linewidth=0.8)
            panel.fill_between(
                ends,
                ends * (1 - _BAND),
                ends * (1 + _BAND),
                color="#000000",
                alpha=0.12,
            )
        panel.set_xscale("log")
        panel.set_yscale("log")
        mape = time_scores(one.predictions).mape.percent()
        panel.set_title(f"{one.fit}: {mape}", fontsize=10)
        panel.set_xlabel("measured seconds of a step")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("predicted")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=max(1, len(judged)),
        fontsize=7,
    )
    _save(figure, path)


def _error_of(predictions: Sequence[Prediction], source: str) -> tuple[float, ...]:
    mape = time_scores([one for one in predictions if one.source == source]).mape
    return tuple(100 * end for end in (mape.value, mape.low, mape.high))


def draw_errors(judged: Sequence[Judged], path: Path) -> None:
    """Mean absolute error of each source, a bar a fit with its 95 % interval.

    A black tick is what one constant MFU comes to under the same fit.
    """
    sources = list(
        dict.fromkeys(run.source for one in judged for run in runs_of(one.predictions))
    )
    height = 1.6 + 0.2 * (len(judged) + 1) * max(1, len(sources))
    figure = Figure(figsize=(10, height), layout="constrained")
    panel = figure.subplots()
    places = np.arange(len(sources), dtype=float)
    thick = 0.8 / len(judged)
    for number, one in enumerate(judged):
        at = places + (number - (len(judged) - 1) / 2) * thick
        shape = (len(sources), 3)
        errors = np.array([_error_of(one.predictions, s) for s in sources])
        value, low, high = errors.reshape(shape).T
        panel.barh(at, value, thick, color=_COLOURS[one.fit], label=one.fit)
        panel.hlines(at, low, high, color="#404040", linewidth=0.8)
        baseline = np.array([_error_of(one.constant_mfu, s) for s in sources])
        panel.plot(
            baseline.reshape(shape)[:, 0],
            at,
            linestyle="none",
            marker="|",
            markersize=7,
            color="#000000",
            label=None if number else "constant MFU, same fit",
        )
    panel.axvline(100 * _BAND, color="#9a9a9a", linestyle="--", linewidth=0.8)
    panel.set_yticks(places, [fill(source, 40) for source in sources], fontsize=7)
    panel.margins(y=0.01)
    panel.invert_yaxis()
    panel.set_xlabel("mean absolute error of step time (%)")
    panel.grid(alpha=0.3, axis="x")
    panel.legend(loc="lower right", fontsize=8)
    _save(figure, path)
