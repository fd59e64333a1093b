"""Tables of a run: for a terminal, for a results file, as JSON."""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.partitioner_figures import draw_curves, draw_ratios
from benchmarks.partitioner_goals import goals
from benchmarks.partitioner_ratios import Comparison
from benchmarks.partitioner_table import KindTable, ablations, kind_tables
from benchmarks.partitioner_times import first_plans, quality_curves, without_clock
from benchmarks.partitioner_worlds import FIRST, Record
from benchmarks.tables import aligned, cpu_name, piped, report_name
from planner.errors import PlanFileError

__all__ = ["Report"]

Lines = list[list[str]]

#: Between these lines of partitioners.md its results are kept.
_BEGIN = "<!-- results: written by benchmarks/partitioners.py -->"
_END = "<!-- end of results -->"
_CURVES, _RATIOS = "partitioners-quality-against-time", "partitioners-ratios"


@dataclass(frozen=True, slots=True)
class Report:
    """Tables of records.

    Attributes:
        records: All that were kept.
    """

    records: Sequence[Record]

    def data(self) -> dict[str, Any]:
        """For programs; NaN and infinity are null."""
        compared = {
            f"{kind}, {budget_s:g} s": {n: asdict(c) for n, c in found.items()}
            for (kind, budget_s), found in ablations(self.records).items()
        }
        made: dict[str, Any] = _finite(
            {
                "goals": [asdict(goal) for goal in goals(self.records)],
                "kinds": [asdict(table) for table in kind_tables(self.records)],
                "without_clock": [asdict(one) for one in without_clock(self.records)],
                "first_plans": [asdict(plan) for plan in first_plans(self.records)],
                "ablations": compared,
            }
        )
        return made

    def text(self) -> str:
        """For a terminal."""
        parts = [f"{title}\n{aligned(lines)}" for title, lines in self._tables()]
        return "\n\n".join([self._said(), *parts])

    def markdown(self, figures: Sequence[str] = ()) -> str:
        """The results file.

        Args:
            figures: Files in ``../figures`` to show.
        """
        parts = [
            "# Partitioners",
            f"{cpu_name()}, {datetime.date.today().isoformat()}, "
            f"Python {platform.python_version()}.",
            self._said(),
        ]
        for title, lines in self._tables():
            parts += [f"## {title[0].upper()}{title[1:]}", piped(lines)]
        parts += [f"![{name}](../figures/{name})" for name in figures]
        return "\n\n".join(parts) + "\n"

    def write(self, out: Path) -> Path:
        """Write the results file and the figures there is something to draw for.

        Args:
            out: Folder; results/ and figures/ are made in it. If it has a page
                ``partitioners.md``, its section of results is written anew.

        Raises:
            PlanFileError: If that page has no such section.
        """
        figures, results = out / "figures", out / "results"
        figures.mkdir(parents=True, exist_ok=True)
        results.mkdir(parents=True, exist_ok=True)
        drawn = []
        tables, curves = kind_tables(self.records), quality_curves(self.records)
        if any(table.row("learned") for table in tables):
            draw_ratios(tables, figures / f"{_RATIOS}.png")
            drawn.append(f"{_RATIOS}.png")
        if curves:
            draw_curves(curves, figures / f"{_CURVES}.png")
            drawn.append(f"{_CURVES}.png")
        target = results / report_name("partitioners")
        target.write_text(self.markdown(drawn), encoding="utf-8")
        page = out / "partitioners.md"
        if page.is_file():
            text = _filled(page, self._section(target, drawn))
            page.write_text(text, encoding="utf-8")
        return target

    def _section(self, results: Path, figures: Sequence[str]) -> str:
        """All but the tables of single kinds."""
        parts = [f"{cpu_name()}, {datetime.date.today().isoformat()}. {self._said()}"]
        for title, lines in self._overall():
            parts += [f"### {title[0].upper()}{title[1:]}", piped(lines)]
        parts += [f"![{name}](figures/{name})" for name in figures]
        parts.append(f"[Solver by solver](results/{results.name})")
        return "\n\n".join(parts)

    def _said(self) -> str:
        marks = sorted(
            {
                answer.checkpoint[:12]
                for record in self.records
                for name, answer in record.answers.items()
                if answer.checkpoint and name in {"learned", "auto"}
            }
        )
        about = f" Weights {' and '.join(marks)}." if marks else ""
        about += self._clocked()
        return (
            f"Worlds: {self._worlds()}.{about} Ratios are of the objective's value, "
            f"geometric means with 95 % bootstrap intervals over worlds; below 1 is "
            f"better. An answer later than 1.5 budgets and 0.2 s counts as none; none "
            f"against one counts as the world's worst answer, at least as 2. A tie is "
            f"within 0.1 %."
        )

    def _clocked(self) -> str:
        budgets = {r.budget_s for r in self.records if r.clock == "processor"}
        timed = sorted(budget for budget in budgets if budget is not None)
        if not timed:
            return ""
        return f" Budgets of {', '.join(f'{b:g}' for b in timed)} s are processor time."

    def _worlds(self) -> str:
        names: dict[str, set[str]] = {}
        for record in self.records:
            if record.kind != FIRST:
                names.setdefault(record.kind, set()).add(record.world)
        return ", ".join(f"{len(found)} {kind}" for kind, found in names.items())

    def _overall(self) -> list[tuple[str, Lines]]:
        made: list[tuple[str, Lines]] = [
            ("goals", self._goals()),
            ("against the best baseline", _summary(kind_tables(self.records))),
            ("uniform, against exhaustive without a clock", self._unhurried()),
            ("time to a first plan", self._first()),
            ("without a part, over the whole", self._ablated()),
        ]
        return [(title, lines) for title, lines in made if len(lines) > 1]

    def _tables(self) -> list[tuple[str, Lines]]:
        return self._overall() + [
            (f"{t.kind}, {t.budget_s:g} s, {t.worlds} worlds", _solvers(t))
            for t in kind_tables(self.records)
        ]

    def _goals(self) -> Lines:
        return [
            ["goal", "asked", "found", "met"],
            *(
                [goal.what, goal.asked, goal.found, "yes" if goal.met else "no"]
                for goal in goals(self.records)
            ),
        ]

    def _unhurried(self) -> Lines:
        lines = [["solver", "budget", "worlds", "ratio", "w/t/l", "ratio of times"]]
        for one in without_clock(self.records):
            budget = "none" if one.budget_s is None else f"{one.budget_s:g} s"
            quality = one.quality
            lines.append(
                [
                    one.solver,
                    budget,
                    str(one.worlds),
                    quality.ratio.plain(4),
                    _counts(quality),
                    one.time.plain(),
                ]
            )
        return lines

    def _first(self) -> Lines:
        lines = [["case", "solver", "median s", "runs"]]
        for plan in first_plans(self.records):
            took = "-" if math.isinf(plan.seconds) else f"{plan.seconds:.3f}"
            lines.append([plan.case, plan.solver, took, str(plan.runs)])
        return lines

    def _ablated(self) -> Lines:
        lines = [["kind", "budget", "left out", "worlds", "ratio", "w/t/l"]]
        for (kind, budget_s), found in ablations(self.records).items():
            for name, one in found.items():
                left_out = name.partition(":no-")[2]
                many = str(one.wins + one.ties + one.losses)
                budget = f"{budget_s:g} s"
                shown = [one.ratio.plain(), _counts(one)]
                lines.append([kind, budget, left_out, many, *shown])
        return lines


def _filled(page: Path, section: str) -> str:
    """The page with its section of results written anew."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise PlanFileError(
            f"{page} has no section of results; put the lines {_BEGIN} and {_END} "
            f"where it is to be"
        )
    return f"{before}{begin}\n{section}\n{end}{after}"


def _counts(one: Comparison) -> str:
    return f"{one.wins}/{one.ties}/{one.losses}"


def _summary(tables: Sequence[KindTable]) -> Lines:
    lines = [
        [
            "kind",
            "budget",
            "worlds",
            "solver",
            "over the best of each world",
            "99 %",
            "worst",
            "w/t/l",
            "best baseline overall",
            "over that one",
            "w/t/l",
        ]
    ]
    for table in tables:
        about = [table.kind, f"{table.budget_s:g} s", str(table.worlds)]
        for solver, against in table.against_strongest.items():
            row = table.row(solver)
            best = row.against_best if row else against
            ends = [f"{best.near_worst:.2f}", f"{best.worst:.2f}"]
            mine = [solver, best.ratio.plain(), *ends, _counts(best)]
            other = [table.strongest, against.ratio.plain(), _counts(against)]
            lines.append([*about, *mine, *other])
    return lines


def _solvers(table: KindTable) -> Lines:
    return [
        ["solver", "over the best baseline", "best in", "mean s", "late", "no plan"],
        *(
            [
                row.solver,
                row.against_best.ratio.plain(),
                f"{row.best_share:.0%}",
                f"{row.seconds:.2f}",
                str(row.late),
                str(row.missed),
            ]
            for row in table.rows
        ),
    ]


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor infinity."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
