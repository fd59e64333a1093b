"""Tables of a plan's report as text, for the page and for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.report.data import MeasuredData, ReportData
from planner.units import format_bytes, format_seconds

__all__ = [
    "TextTable",
    "contenders_table",
    "differences_table",
    "measured_table",
    "regimes_table",
    "runners_up_table",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table of text, ready for HTML or Markdown.

    Attributes:
        caption: Title, a sentence without its point.
        header: Names of the columns.
        rows: Cells.
        names: First columns, which are names; the others are numbers.
        words: Further columns that are no numbers.
        code: Columns of strategies.
        won: Row that is best; None if none is.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1
    words: tuple[int, ...] = ()
    code: tuple[int, ...] = ()
    won: int | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """Columns that are set flush right."""
        every = range(self.names, len(self.header))
        return tuple(column for column in every if column not in self.words)


def differences_table(reports: Sequence[ReportData], names: Sequence[str]) -> TextTable:
    """Figures of two plans, and by how much the second one's differ.

    Args:
        reports: Two.
        names: Names of the plans, for people.
    """
    first, second = (report.plan.prediction for report in reports)
    used = [float(report.plan.strategy.mesh.num_devices) for report in reports]
    numbers: list[tuple[str, float, float, Callable[[float], str]]] = [
        ("step time", first.step_time_s, second.step_time_s, format_seconds),
        (
            "samples per second",
            first.samples_per_s,
            second.samples_per_s,
            "{:,.2f}".format,
        ),
        (
            "peak memory of a device",
            first.peak_memory_bytes,
            second.peak_memory_bytes,
            format_bytes,
        ),
        ("devices", used[0], used[1], "{:,.0f}".format),
    ]
    mfu = (first.model_flops_utilization, second.model_flops_utilization)
    if mfu[0] is not None and mfu[1] is not None:
        numbers.append(("model FLOPs utilization", mfu[0], mfu[1], "{:.1%}".format))
    spent = [{p.name: p.seconds for p in report.breakdown} for report in reports]
    numbers += [
        (
            f"of the step: {part}",
            spent[0].get(part, 0.0),
            spent[1].get(part, 0.0),
            format_seconds,
        )
        for part in {**spent[0], **spent[1]}
    ]
    return TextTable(
        caption="Figures of both plans",
        header=("", *names, "difference"),
        rows=tuple(
            (name, form(a), form(b), _change(a, b)) for name, a, b, form in numbers
        ),
    )


def _change(first: float, second: float) -> str:
    if not first:
        return ""
    change = f"{second / first - 1:+.1%}"
    return "equal" if change in {"+0.0%", "-0.0%"} else change.replace("-", "−")


def runners_up_table(report: ReportData) -> TextTable:
    """The chosen strategy, and those that were priced and not chosen."""
    plan, chosen = report.plan, report.plan.prediction
    step_s = chosen.step_time_s or 1.0
    rows = [
        (
            plan.strategy.label(),
            format_seconds(chosen.step_time_s),
            "",
            format_bytes(chosen.peak_memory_bytes),
            "chosen",
        )
    ]
    rows += [
        (
            other.label,
            format_seconds(other.step_time_s),
            f"{other.step_time_s / step_s - 1:+.1%}",
            format_bytes(other.peak_memory_bytes),
            other.reason,
        )
        for other in plan.provenance.alternatives
    ]
    return TextTable(
        caption="Runners-up: the best strategies that were priced and not chosen",
        header=("strategy", "step", "slower by", "memory", "why it lost"),
        rows=tuple(rows),
        words=(4,),
        code=(0,),
        won=0,
    )


def regimes_table(report: ReportData) -> TextTable:
    """Other ways of training that were considered, and what speaks for them."""
    return TextTable(
        caption="Other ways of training, and their time to the same loss",
        header=("method", "step", "progress a sample", "even at", "beside the plan"),
        rows=tuple(
            (
                one.method,
                "" if one.step_time_s is None else format_seconds(one.step_time_s),
                f"{one.efficiency.eta:.2f}, {one.efficiency.basis}"
                if one.efficiency
                else "1",
                "" if one.break_even is None else f"{one.break_even:.2f}",
                one.reason,
            )
            for one in report.plan.provenance.regimes
        ),
        words=(4,),
        code=(0,),
    )


def contenders_table(report: ReportData) -> TextTable:
    """Best strategy of each partitioner, and how many it priced."""
    return TextTable(
        caption="Best strategy of each partitioner, and how many it priced",
        header=("partitioner", "step", "closed form", "simulated", "its best"),
        rows=tuple(
            (
                one.partitioner,
                "none fits"
                if one.step_time_s is None
                else format_seconds(one.step_time_s),
                f"{one.evaluations.get('analytic', 0):,}",
                f"{one.evaluations.get('simulated', 0):,}",
                one.label or "",
            )
            for one in report.plan.provenance.contenders
        ),
        words=(4,),
        code=(4,),
    )


def measured_table(run: MeasuredData, most_ranks: int) -> TextTable:
    """A run beside the prediction.

    Args:
        run: The measurement.
        most_ranks: Ranks whose memory is listed.
    """
    ranks, rows = 0, []
    for row in run.rows:
        ranks += "peak memory" in row.name
        if "peak memory" not in row.name or ranks <= most_ranks:
            rows.append(row.cells())
    return TextTable(
        caption="Predicted beside measured",
        header=("", "predicted", "measured", "predicted ÷ measured"),
        rows=tuple(rows),
    )
