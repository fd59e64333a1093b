"""The top of the page: what it is of, in figures, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.report.data import ReportData
from planner.report.markup import details, escape, note, section, table
from planner.units import format_bytes, format_seconds

__all__ = [
    "SECTIONS",
    "beside",
    "chosen_section",
    "difference_section",
    "page_header",
    "titled",
]

#: Anchors of the sections and what the list at the top calls them.
SECTIONS = {
    "chosen": "What and why",
    "devices": "Devices",
    "memory": "Memory",
    "timeline": "Timeline",
    "breakdown": "Where the time goes",
    "others": "Runners-up",
    "pareto": "Time, memory, devices",
    "measured": "Measured",
}


def page_header(reports: Sequence[ReportData]) -> str:
    """Title, figures and list of sections."""
    if len(reports) == 1:
        (one,) = reports
        kicker, title = "Plan", _title(one)
        under = _chips(one) + _tiles(one)
    else:
        kicker, title = "Two plans side by side", _pair_title(reports)
        under = ""
    links = "".join(
        f'<li><a href="#{anchor}">{escape(name)}</a></li>'
        for anchor, name in (
            *((("difference", "Side by side"),) if len(reports) > 1 else ()),
            *SECTIONS.items(),
        )
    )
    return (
        f'<header class="top"><div class="head"><div><p class="kicker">{kicker}</p>'
        f"<h1>{title}</h1></div>"
        f'<button type="button" id="theme" aria-label="Switch between light and dark">'
        f"Dark</button></div>{under}"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>'
    )


def _title(report: ReportData) -> str:
    head = report.header
    return f"{escape(head.model)} <small>on {escape(head.cluster)}</small>"


def _pair_title(reports: Sequence[ReportData]) -> str:
    first, second = (report.header for report in reports)
    if (first.model, first.cluster) == (second.model, second.cluster):
        return _title(reports[0])
    return " <small>and</small> ".join(map(_title, reports))


def _chips(report: ReportData) -> str:
    parts = "".join(f"<li>{escape(part)}</li>" for part in report.header.label.split())
    return f'<ul class="chips" aria-label="Strategy">{parts}</ul>'


def _figure(text: str) -> str:
    """A number, with its unit in small."""
    number, _, unit = text.partition(" ")
    return f"{escape(number)} <small>{escape(unit)}</small>"


def _tiles(report: ReportData) -> str:
    head = report.header
    samples = f"{head.samples_per_s:,.2f}"
    speed = ("Samples per second", samples, "")
    if head.tokens_per_s is not None:
        speed = (
            "Tokens per second",
            f"{head.tokens_per_s:,.0f}",
            f"{samples} samples/s",
        )
    share = head.fullest_share
    over = " over" if share > 1 else ""
    meter = (
        f'<div class="meter{over}" aria-hidden="true">'
        f'<i style="width:{min(share, 1):.1%}"></i></div>'
    )
    tiles = [
        (
            "Step time",
            _figure(format_seconds(head.step_time_s)),
            escape("simulated" if head.fidelity == "simulated" else "by closed forms"),
        ),
        speed,
        (
            "Peak device memory",
            _figure(format_bytes(head.peak_memory_bytes)),
            f"{'under 1%' if share < 0.01 else f'{share:.0%}'} of its limit{meter}",
        ),
        (
            "Devices",
            f"{head.devices_used:,} <small>of {head.devices_there:,}</small>",
            escape(report.plan.strategy.label().split(" zero")[0].split(" mb")[0]),
        ),
    ]
    if head.model_flops_utilization is not None:
        tiles.insert(
            2,
            (
                "Model FLOPs utilization",
                f"{head.model_flops_utilization:.1%}".replace("%", " <small>%</small>"),
                "without recomputation",
            ),
        )
    return (
        '<dl class="tiles">'
        + "".join(
            f'<div><dt>{escape(name)}</dt><dd class="figure">{value}</dd>'
            f'<dd class="sub">{under}</dd></div>'
            for name, value, under in tiles
        )
        + "</dl>"
    )


def chosen_section(reports: Sequence[ReportData], names: Sequence[str]) -> str:
    """What was chosen and why."""
    panes = []
    for report, name in zip(reports, names, strict=True):
        head = report.header
        rows = "".join(
            f'<tr><th scope="row">{escape(fact)}</th><td>{escape(text)}</td></tr>'
            for fact, text in head.facts.items()
        )
        body = f'<p class="why">{escape(head.paragraph)}</p>'
        body += "".join(
            note(f"Meshwright cannot run it itself: {reason}")
            for reason in head.not_runnable
        )
        facts = (
            '<div class="scroll"><table class="facts"><caption>The plan in short'
            f"</caption><tbody>{rows}</tbody></table></div>"
        )
        body += details("The plan in short", facts) if len(reports) == 1 else facts
        if head.assumptions:
            told = "".join(f"<li>{escape(text)}</li>" for text in head.assumptions)
            body += details("Assumed while reading the model", f"<ul>{told}</ul>")
        panes.append(titled(body, name))
    return section("chosen", "What was chosen, and why", "", beside(panes))


def titled(body: str, name: str) -> str:
    """A pane; with a heading where there are two."""
    heading = ""
    if name:
        letter, _, rest = name.partition(" ")
        heading = f'<h3><span class="tag">{escape(letter)}</span>{escape(rest)}</h3>'
    return f'<div class="pane">{heading}{body}</div>'


def beside(panes: Sequence[str], *, stacked: bool = False) -> str:
    """Panes next to each other, or one above the other."""
    if len(panes) == 1:
        return panes[0]
    kind = "stack" if stacked else "panes"
    return f'<div class="{kind}">{"".join(panes)}</div>'


def _change(first: float, second: float) -> str:
    if not first:
        return ""
    change = f"{second / first - 1:+.1%}"
    return "equal" if change in {"+0.0%", "-0.0%"} else change.replace("-", "−")


def difference_section(reports: Sequence[ReportData], names: Sequence[str]) -> str:
    """The figures of two plans in a table, and every field that differs."""
    first, second = (report.header for report in reports)
    numbers: list[tuple[str, float, float, Callable[[float], str]]] = [
        ("Step time", first.step_time_s, second.step_time_s, format_seconds),
        (
            "Samples per second",
            first.samples_per_s,
            second.samples_per_s,
            lambda value: f"{value:,.2f}",
        ),
        (
            "Peak memory of a device",
            first.peak_memory_bytes,
            second.peak_memory_bytes,
            format_bytes,
        ),
        (
            "Devices",
            float(first.devices_used),
            float(second.devices_used),
            lambda value: f"{value:,.0f}",
        ),
    ]
    mfu = (first.model_flops_utilization, second.model_flops_utilization)
    if mfu[0] is not None and mfu[1] is not None:
        numbers.append(
            ("Model FLOPs utilization", mfu[0], mfu[1], lambda value: f"{value:.1%}")
        )
    parts = {part.name: None for report in reports for part in report.breakdown}
    spent = [{p.name: p.seconds for p in report.breakdown} for report in reports]
    rows = [
        (escape(name), escape(form(a)), escape(form(b)), _change(a, b))
        for name, a, b, form in numbers
    ]
    rows += [
        (
            f"of the step: {escape(part)}",
            escape(format_seconds(spent[0].get(part, 0.0))),
            escape(format_seconds(spent[1].get(part, 0.0))),
            _change(spent[0].get(part, 0.0), spent[1].get(part, 0.0)),
        )
        for part in parts
    ]
    labels = "".join(
        titled(_chips(report), name)
        for report, name in zip(reports, names, strict=True)
    )
    body = f'<div class="panes">{labels}</div>' + table(
        ("", *names, "difference"),
        rows,
        caption="Figures of both plans",
        numbers=(1, 2, 3),
    )
    changes = reports[0].plan.diff(reports[1].plan)
    if changes:
        told = "".join(f"<li>{escape(text)}</li>" for text in changes)
        body += details(
            f"Every field that differs ({len(changes)})", f"<ul>{told}</ul>"
        )
    return section("difference", "Side by side", "", body)
