"""Tables of a report: policies side by side, streams, models; as text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner.report.stream.build import StreamReport
from planner.report.stream.data import StreamData
from planner.report.stream.words import CALLED, duration, percent
from planner.schema.stream import OUTCOMES

__all__ = ["TextTable", "models_table", "policies_table", "streams_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table of text, ready for HTML or Markdown.

    Attributes:
        caption: What it is of.
        header: Of columns; the first ``names`` are names, the others numbers.
        rows: Cells.
        names: Columns of names.
        won: Row that is best; None if none is.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1
    won: int | None = None


def policies_table(report: StreamReport) -> TextTable:
    """Blocked jobs by cause, and times, of each policy over the common streams."""
    causes = tuple(dict.fromkeys(report.first.blocked))
    rows = []
    for one in report.totals:
        arrived = one.sums["arrived"] or math.nan
        speed = one.sums["mean_speedup"]
        rows.append(
            (
                one.name,
                percent(one.rate),
                *(percent(one.sums[cause] / arrived) for cause in causes),
                duration(one.sums["mean_jct_s"]),
                "" if math.isnan(speed) else f"{speed:.3g}",
                percent(one.sums["utilisation"]),
            )
        )
    rates = [one.rate for one in report.totals]
    best = min(rates, default=0.0)
    count = len(report.common)
    return TextTable(
        caption=f"Means over {count} {'stream' if count == 1 else 'streams'}",
        header=(
            "policy",
            "blocked",
            *(CALLED[cause] for cause in causes),
            "mean completion",
            "speed-up",
            "devices in use",
        ),
        rows=tuple(rows),
        won=rates.index(best) if rates.count(best) == 1 and len(rates) > 1 else None,
    )


def streams_table(report: StreamReport) -> TextTable:
    """Jobs of each stream, and the blocking rate of each policy."""
    rows = []
    for stream in report.streams:
        rates = {run.name: percent(run.blocking_rate) for run in stream.runs}
        rows.append(
            (
                stream.name,
                f"{len(stream.runs[0]):,}",
                *(rates.get(name, "") for name in report.policies),
            )
        )
    return TextTable(
        caption="Jobs that were blocked, of those that arrived",
        header=("stream", "jobs", *report.policies),
        rows=tuple(rows),
    )


def models_table(report: StreamReport) -> TextTable:
    """Outcomes and times of each model, of each policy over all its streams."""
    rows = []
    several = len(report.policies) > 1
    outcomes = [o for o in OUTCOMES if any(run.count(o) for run in report.runs)]
    for policy in report.policies:
        runs = [run for run in report.runs if run.name == policy]
        names = list(dict.fromkeys(m.name for r in runs for m in r.record.models))
        for name in names:
            picked = [(run, _of_model(run, name)) for run in runs]
            rows.append(
                (
                    *((policy,) if several else ()),
                    name,
                    *_model_row(picked, [OUTCOMES.index(o) for o in outcomes]),
                )
            )
    return TextTable(
        caption="Jobs by model",
        header=(
            *(("policy",) if several else ()),
            "model",
            "jobs",
            "blocked",
            *(CALLED[outcome] for outcome in outcomes),
            "devices held",
            "mean run",
            "mean completion",
        ),
        rows=tuple(rows),
        names=2 if several else 1,
    )


def _of_model(run: StreamData, name: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    names = np.array([model.name for model in run.record.models])
    picked: np.ndarray[tuple[int], np.dtype[np.bool_]] = (names == name)[run.model]
    return picked


def _model_row(
    picked: list[tuple[StreamData, np.ndarray[tuple[int], np.dtype[np.bool_]]]],
    outcomes: list[int],
) -> tuple[str, ...]:
    jobs = sum(int(mine.sum()) for _, mine in picked)
    blocked = sum(int(run.blocked[mine].sum()) for run, mine in picked)

    def mean(values: list[np.ndarray[tuple[int], np.dtype[np.float64]]]) -> float:
        every = np.concatenate(values) if values else np.zeros(0)
        return float(every.mean()) if len(every) else math.nan

    held = mean([run.held[mine & run.ran].astype(float) for run, mine in picked])
    ran = mean([(run.end_s - run.start_s)[mine & run.ended] for run, mine in picked])
    took = mean([(run.end_s - run.arrival_s)[mine & run.ended] for run, mine in picked])
    counts = [
        sum(int((run.outcome[mine] == outcome).sum()) for run, mine in picked)
        for outcome in outcomes
    ]
    return (
        f"{jobs:,}",
        percent(blocked / jobs) if jobs else "",
        *(f"{count:,}" for count in counts),
        "" if math.isnan(held) else f"{held:.3g}",
        duration(ran),
        duration(took),
    )
