"""The table of the job stream as text, and as a results file."""

from __future__ import annotations

import datetime
import platform
from dataclasses import dataclass
from pathlib import Path

from benchmarks.job_stream_figures import LoadStudy, draw_degrees, draw_loads
from benchmarks.job_stream_table import (
    Comparison,
    Estimate,
    compare,
    gains,
    missing,
    rows_of,
    tasks_of,
)
from benchmarks.job_stream_work import CHOSEN_ON, Work
from benchmarks.tables import aligned, cpu_name, piped, report_name
from envs.ramp.arrivals import LAWS

__all__ = ["Report", "make_report"]

_HEADS = (
    "policy",
    "blocking rate",
    "minus best constant",
    "relative",
    "throughput (1e7 B/s)",
    "mean JCT (s)",
    "ms a decision",
)


def _signed(found: Estimate) -> str:
    return f"{found.mean:+.4f} ± {found.half:.4f}"


def _cells(one: Comparison) -> list[str]:
    label = one.row.label
    if label == "best constant":
        label = f"{label} ({one.row.policy.removeprefix('constant_')})"
    return [
        label,
        f"{one.blocking.mean:.4f} ± {one.blocking.half:.4f}",
        _signed(one.against_best),
        f"{one.relative:+.1%}",
        f"{one.throughput_bytes_per_s / 1e7:.3f}",
        f"{one.mean_jct_s:.0f}",
        f"{one.ms_per_decision:.3f}",
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Results of the replays.

    Attributes:
        seeds: Seeds of the traces of each law.
        horizon_s: End of the episodes.
        compared: Comparisons on all laws.
        loads: Comparisons at each load.
        load_seeds: Seeds of the traces of each law and load.
    """

    seeds: range
    horizon_s: float
    compared: tuple[Comparison, ...]
    load_seeds: range
    loads: dict[float, tuple[Comparison, ...]]

    def text(self) -> str:
        """Format the results for a terminal."""
        parts = [self._about()]
        for law, lines in self._tables().items():
            parts.append(f"law {law}\n{aligned(lines)}")
        parts.append(f"against the best constant, by law\n{aligned(self._gains())}")
        return "\n\n".join(parts)

    def markdown(self) -> str:
        """The results file."""
        parts = [
            "# Job stream",
            f"{cpu_name()}, {datetime.date.today().isoformat()}, "
            f"Python {platform.python_version()}; `python benchmarks/job_stream.py`.",
            self._about(),
        ]
        for law, lines in self._tables().items():
            parts += [f"## Law {law}", piped(lines)]
        parts += ["## Against the best constant, by law", piped(self._gains())]
        parts += [
            "## Blocking rate against load",
            f"Seeds {self.load_seeds.start} to {self.load_seeds.stop - 1}; the best "
            f"constant is chosen for each load anew.",
            "![Blocking against load](../figures/job_stream_blocking_against_load.svg)",
        ]
        for law in dict.fromkeys(one.law for one in self.compared):
            parts += [f"### Law {law}", piped(self._by_load(law))]
        parts += [
            "## Degrees chosen against beta",
            "![Degrees against beta](../figures/job_stream_degree_against_beta.svg)",
        ]
        return "\n\n".join(parts) + "\n"

    def _about(self) -> str:
        said = (
            f"Seeds {self.seeds.start} to {self.seeds.stop - 1} of each law, episodes "
            f"of {self.horizon_s:g} s. Best constants are chosen on seeds "
            f"{CHOSEN_ON.start} to {CHOSEN_ON.stop - 1}. ± is the 95 % interval by "
            f"Student's t; differences are to the best constant on the same traces."
        )
        left_out = " and ".join(missing())
        return f"{said} Not installed, and left out: {left_out}." if left_out else said

    def _tables(self) -> dict[str, list[list[str]]]:
        found: dict[str, list[list[str]]] = {}
        for one in self.compared:
            found.setdefault(one.law, [list(_HEADS)]).append(_cells(one))
        return found

    def _gains(self) -> list[list[str]]:
        laws = list(dict.fromkeys(one.law for one in self.compared))
        lines = [["policy", *laws, "mean"]]
        for label, mean in gains(self.compared).items():
            own = {one.law: one for one in self.compared if one.row.label == label}
            shown = [f"{own[law].relative:+.1%}" for law in laws]
            lines.append([label, *shown, f"{mean:+.1%}"])
        return lines

    def _by_load(self, law: str) -> list[list[str]]:
        labels = list(
            dict.fromkeys(one.row.label for at in self.loads.values() for one in at)
        )
        lines = [["policy", *(f"{load:.0%}" for load in self.loads)]]
        for label in labels:
            line = [label]
            for compared in self.loads.values():
                [one] = [c for c in compared if (c.law, c.row.label) == (law, label)]
                line.append(f"{one.blocking.mean:.4f} ± {one.blocking.half:.4f}")
            lines.append(line)
        return lines


def make_report(
    seeds: range,
    horizon_s: float,
    loads: tuple[float, ...],
    load_seeds: range,
    out: Path,
    processes: int | None = None,
    kept: Path | None = None,
) -> Report:
    """Replay everything, and write results and figures.

    Args:
        seeds: Seeds of the traces of each law.
        horizon_s: End of the episodes.
        loads: Arrivals over the laws' own in the same time.
        load_seeds: Seeds of the traces at each load.
        out: Folder; results/ and figures/ are made in it.
        processes: Number of processes; by default that of the cores.
        kept: File of episodes; see Work.
    """
    work = Work(horizon_s, processes, kept)
    study = LoadStudy(loads=loads, seeds=load_seeds)
    rows = {law: rows_of(work.best(law)) for law in LAWS}
    todo = [task for law in LAWS for task in tasks_of(rows[law], law, seeds)]
    work.run(todo, "policies")
    work.run(study.tasks(work), "loads")
    compared = (compare(work, rows[law], law, seeds) for law in LAWS)
    report = Report(
        seeds=seeds,
        horizon_s=horizon_s,
        compared=tuple(one for law in compared for one in law),
        load_seeds=load_seeds,
        loads=study.compare(work),
    )
    figures, results = out / "figures", out / "results"
    figures.mkdir(parents=True, exist_ok=True)
    results.mkdir(parents=True, exist_ok=True)
    draw_loads(report.loads, figures / "job_stream_blocking_against_load.svg")
    draw_degrees(work, rows["A"], seeds, figures / "job_stream_degree_against_beta.svg")
    (results / report_name("job_stream")).write_text(
        report.markdown(), encoding="utf-8"
    )
    return report
