"""The cost model's errors as text, and as a results file."""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cost_model_figures import draw_errors, draw_scatter
from benchmarks.cost_model_fits import FITS, Judged
from benchmarks.cost_model_goals import goals
from benchmarks.cost_model_scores import (
    Prediction,
    coverage,
    groups_of_plans,
    memory_scores,
    rank_scores,
    regret,
    time_scores,
)
from benchmarks.tables import aligned, cpu_name, piped, report_name
from planner.calibration.rows import DOUBTFUL_RULE

__all__ = ["Report", "write_report"]

_Lines = list[list[str]]

_HOW = (
    "Errors are of seconds of a step, predicted over measured less 1, each run once. A "
    "group has source, model, sequence length, GPUs, batch and width of numbers in "
    "common; its rank correlation (Spearman) and regret are of groups of at least 4 "
    "distinct plans. In brackets: 95 % bootstrap intervals, runs resampled within "
    "their source, groups among themselves. Only complete rows are scored unless said "
    "otherwise."
)


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _sources(predictions: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    found: dict[str, list[Prediction]] = {}
    for one in predictions:
        found.setdefault(one.source, []).append(one)
    return found


def _time_line(
    label: str,
    predictions: Sequence[Prediction],
    baselines: Sequence[Sequence[Prediction]],
) -> list[str]:
    scores, ranks = time_scores(predictions), rank_scores(predictions)
    point = scores.worst_point.rpartition(", ")[2]
    return [
        label,
        str(scores.runs),
        scores.mape.percent(),
        _share(scores.median.value),
        f"{_share(scores.worst)} ({point})" if point else "-",
        "-" if math.isnan(scores.bias.value) else f"{scores.bias.value:+.1%}",
        str(len(ranks.groups)),
        ranks.mean.plain(),
        regret(predictions).mean.percent(),
        *(_share(time_scores(baseline).mape.value) for baseline in baselines),
    ]


def _times(judged: Judged) -> _Lines:
    heads = "source,runs,MAPE,median,worst,bias,groups,rank correlation,regret"
    lines = [[*heads.split(","), "MAPE of constant MFU", "of bubble only"]]
    baselines = (judged.constant_mfu, judged.bubble_only)
    by_source = [_sources(baseline) for baseline in baselines]
    for source, rows in _sources(judged.predictions).items():
        if time_scores(rows).runs:
            own = [baseline.get(source, []) for baseline in by_source]
            lines.append(_time_line(source, rows, own))
    lines.append(_time_line("all", judged.predictions, baselines))
    for label, baseline in zip(("constant MFU", "bubble only"), baselines, strict=True):
        lines.append(_time_line(f"all, by {label}", baseline, ((), ())))
    return lines


def _orders(judged: Judged) -> _Lines:
    lines = [["group", "plans", "correlation", "regret", "bubble only", "its regret"]]
    baseline = {one.group: one for one in groups_of_plans(judged.bubble_only)}
    for one in groups_of_plans(judged.predictions):
        beside = baseline.get(one.group)
        lines.append(
            [
                # A bar would end the cell.
                one.group.replace(" | ", ", "),
                str(one.plans),
                f"{one.correlation:.3f}",
                f"{one.regret:.1%}",
                "-" if beside is None else f"{beside.correlation:.3f}",
                "-" if beside is None else f"{beside.regret:.1%}",
            ]
        )
    return lines


def _memory_line(
    label: str, predictions: Sequence[Prediction], complete: bool
) -> list[str]:
    found = memory_scores(predictions, complete=complete)
    return [
        label,
        str(found.peaks),
        found.peak.percent(),
        "-" if math.isnan(found.bias.value) else f"{found.bias.value:+.1%}",
        _share(found.worst),
        str(found.parts),
        found.part.percent(),
        str(found.ran_out),
        found.found.percent(),
        str(found.ran),
        found.refused.percent(),
    ]


def _memories(judged: Judged) -> _Lines:
    heads = "rows,peaks,MAPE,bias,worst,parts,MAPE of parts"
    lines = [[*heads.split(","), "ran out", "found", "ran", "refused"]]
    for source, rows in _sources(judged.predictions).items():
        line = _memory_line(source, rows, False)
        if any(int(line[at]) for at in (1, 5, 7)):
            lines.append(line)
    lines.append(_memory_line("all complete", judged.predictions, True))
    lines.append(_memory_line("all, incomplete ones too", judged.predictions, False))
    return lines


def _coverages(judged: Sequence[Judged]) -> _Lines:
    lines = [["fit", "complete", "predicted", "others", "predicted", "doubtful"]]
    for one in judged:
        found = coverage(one.predictions)
        counts = (
            found.complete,
            found.complete_predicted,
            found.others,
            found.others_predicted,
            found.doubtful,
        )
        lines.append([one.fit, *map(str, counts)])
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Errors of the cost model's predictions.

    Attributes:
        points: Name of the file of measurements.
        judged: A fit each.
    """

    points: str
    judged: tuple[Judged, ...]

    def text(self) -> str:
        """For a terminal."""
        parts = [_HOW, DOUBTFUL_RULE]
        for title, lines in self._tables().items():
            parts.append(f"{title}\n{aligned(lines)}")
        return "\n\n".join(parts)

    def markdown(self) -> str:
        """The results file."""
        parts = [
            "# Cost model against published measurements",
            f"{cpu_name()}, {datetime.date.today().isoformat()}, "
            f"Python {platform.python_version()}; "
            f"`benchmarks/cost_model.py` on {self.points}.",
            _HOW,
            DOUBTFUL_RULE,
        ]
        for title, lines in self._tables().items():
            parts += [f"## {title}", piped(lines)]
        parts += [
            "## Predicted against measured",
            "![Scatter](../figures/cost_model_predicted_against_measured.svg)",
            "## Error by source",
            "![Bars](../figures/cost_model_error_by_source.svg)",
        ]
        return "\n\n".join(parts) + "\n"

    def _tables(self) -> dict[str, _Lines]:
        found = {"Goals": self._goals(), "Rows": _coverages(self.judged)}
        for one in self.judged:
            found[f"Step time, {one.fit}: {FITS[one.fit]}"] = _times(one)
        for one in self.judged:
            for kind, lines in (
                ("Order of plans", _orders(one)),
                ("Memory", _memories(one)),
            ):
                if len(lines) > 1:
                    found[f"{kind}, {one.fit}"] = lines
        return found

    def _goals(self) -> _Lines:
        words = {True: "met", False: "missed", None: "nothing to measure it on"}
        lines = [["goal", "fit", "asked", "found", "verdict"]]
        lines += [
            [goal.what, goal.fit, goal.asked, goal.found, words[goal.met]]
            for goal in goals(self.judged)
        ]
        return lines


def write_report(report: Report, out: Path) -> Path:
    """Write results and figures.

    Args:
        report: What was found.
        out: Folder; results/ and figures/ are made in it.
    Returns:
        The results file.
    """
    figures, results = out / "figures", out / "results"
    figures.mkdir(parents=True, exist_ok=True)
    results.mkdir(parents=True, exist_ok=True)
    draw_scatter(report.judged, figures / "cost_model_predicted_against_measured.svg")
    draw_errors(report.judged, figures / "cost_model_error_by_source.svg")
    path = results / report_name("cost_model")
    path.write_text(report.markdown(), encoding="utf-8")
    return path
