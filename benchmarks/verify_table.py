"""Predicted memory and bytes of many meshes beside those that a dry run finds.

    python -m benchmarks.verify_table [--only TEXT] [--processes 2] [--report PATH]

Models and meshes are those of ``benchmarks/data/verify``, models that it does not
describe are built in. Every mesh is priced for
H100s, then one rank of its first, middle and last pipeline stage runs a step on fake
tensors, as ``meshwright verify`` has it. Nothing is fitted to what was found. Rows are
peak memory on each of these stages, and the bytes of each kind of collective on the
busiest of them. A difference is one that ``meshwright verify --tolerance 0.05`` would
fail for.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.tables import aligned, piped
from planner import Cluster, predict
from planner.capture import capture, load_config, load_model
from planner.capture.models import LoadedModel
from planner.graph import ModelGraph
from planner.schema import Mesh, Plan, Precision, Stage, Strategy, TensorSharding
from planner.schema.schedules import schedule_spec
from planner.schema.verification import Deviation, Verification

__all__ = ["TOLERANCE", "Row", "main", "meshes", "strategy_of", "verify_mesh"]

FOLDER = Path(__file__).parent / "data" / "verify"

#: Share of what was found by which a prediction may be off.
TOLERANCE = 0.05

_DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
_NUMBERS = (
    *_DEGREES,
    "zero_stage",
    "virtual_stages",
    "microbatch_size",
    "num_microbatches",
    "sequence_parallel",
)
_HEADS = ("model", "compute", "strategy", "quantity", "predicted", "found", "ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Findings about one mesh.

    Attributes:
        model: Name in ``models.yaml``, or built in.
        compute: Dtype.
        label: Of the strategy.
        deviations: Predicted quantities beside those found; empty if a rank failed.
        failure: Why nothing was found; None if it was.
        wall_s: Seconds that it took.
    """

    model: str
    compute: str
    label: str
    deviations: tuple[Deviation, ...]
    failure: str | None
    wall_s: float

    @property
    def agrees(self) -> bool:
        """True if all quantities are within the tolerance."""
        return not self.failure and not any(
            each.beyond(TOLERANCE) for each in self.deviations
        )

    @property
    def name(self) -> str:
        """Model, dtype and strategy."""
        return f"{self.model} {self.compute} {self.label}"


def meshes() -> list[dict[str, Any]]:
    """Rows of ``meshes.csv``, numbers as integers."""
    with (FOLDER / "meshes.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [{k: int(v) if k in _NUMBERS else v for k, v in r.items()} for r in rows]


@functools.cache
def _model(name: str, compute: str) -> tuple[LoadedModel, ModelGraph]:
    described = yaml.safe_load((FOLDER / "models.yaml").read_text(encoding="utf-8"))
    if entry := described.get(name):
        loaded = load_config(entry["config"], seq_len=entry["seq_len"])
    else:
        loaded = load_model(name)
    return loaded, capture(loaded, dtype=compute)


def strategy_of(row: dict[str, Any]) -> Strategy:
    """Strategy of a row of ``meshes.csv``; its stages are not cut."""
    mesh = Mesh(**{axis: row[axis] for axis in _DEGREES})
    spec = schedule_spec(row["schedule"])
    return Strategy(
        mesh=mesh,
        stages=tuple(
            Stage(
                rank=spec.rank_of_stage(index, mesh.pp),
                modules=(),
                recompute=row["recompute"],
            )
            for index in range(mesh.pp * row["virtual_stages"])
        ),
        precision=Precision(compute=row["compute"]),
        sharding=TensorSharding(sequence_parallel=bool(row["sequence_parallel"])),
        **{
            name: row[name]
            for name in (
                "zero_stage",
                "schedule",
                "virtual_stages",
                "microbatch_size",
                "num_microbatches",
                "context_algorithm",
            )
        },
    )


def _plan(row: dict[str, Any]) -> Plan:
    """Price the strategy of a row; the planner cuts its stages."""
    strategy = strategy_of(row)
    _, graph = _model(row["model"], row["compute"])
    hosts = -(-strategy.mesh.num_devices // 8)
    priced: Plan = predict(graph, Cluster.parse(f"dgx-h100:{hosts}"), strategy)
    return priced


def verify_mesh(row: dict[str, Any]) -> Row:
    """Predict one mesh, and run it dry."""
    from executors.dryrun import dry_runs

    started = time.perf_counter()
    loaded, _ = _model(row["model"], row["compute"])
    made = _plan(row)
    mesh = made.strategy.mesh
    places = sorted({0, mesh.pp // 2, mesh.pp - 1})
    found = dry_runs(made, loaded.build, [p * mesh.stride("pp") for p in places])
    failures = [f"rank {r.rank}: {r.failure}" for r in found if r.failure]
    return Row(
        model=row["model"],
        compute=row["compute"],
        label=made.strategy.label(),
        deviations=() if failures else Verification.of(made, found).deviations,
        failure=failures[0] if failures else None,
        wall_s=time.perf_counter() - started,
    )


def _measure(rows: Sequence[dict[str, Any]], processes: int) -> Iterator[Row]:
    """Verify meshes; models that a process has read stay in it."""
    if processes == 1:
        yield from map(verify_mesh, rows)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(verify_mesh, rows)


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:,.1f}"


def _lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Cells of all quantities, sizes in MB; the heads first."""
    lines: list[tuple[str, ...]] = [_HEADS]
    for row in rows:
        start = (row.model, row.compute, row.label)
        if row.failure:
            lines.append((*start, row.failure, "", "", ""))
        for each in row.deviations:
            if each.negligible:
                continue
            ratio = "" if each.ratio is None else f"{each.ratio:.3f}"
            mark = " *" if each.beyond(TOLERANCE) else ""
            cells = (_size(each.predicted), _size(each.found), ratio + mark)
            lines.append((*start, each.name, *cells))
    return lines


def _distance(each: Deviation) -> float:
    """Distance of the prediction from what was found, over the latter."""
    return abs(each.predicted - each.found) / max(each.found, 1.0)


def _summary(rows: Sequence[Row]) -> list[str]:
    """Shares within the tolerance, then the quantities that are furthest off."""
    quantities = [
        (row, each) for row in rows for each in row.deviations if not each.negligible
    ]
    memory = [pair for pair in quantities if pair[1].name.startswith("peak memory")]
    sent = [pair for pair in quantities if pair not in memory]
    lines = [
        f"{sum(row.agrees for row in rows)} of {len(rows)} meshes are within "
        f"{TOLERANCE:.0%} in everything."
    ]
    for what, pairs in (("peaks of memory", memory), ("sums of bytes", sent)):
        within = sum(not each.beyond(TOLERANCE) for _, each in pairs)
        off = sum(_distance(each) for _, each in pairs) / max(len(pairs), 1)
        lines.append(
            f"{within} of {len(pairs)} {what} are within {TOLERANCE:.0%}; they are "
            f"{off:.1%} off on average."
        )
    worst = sorted(quantities, key=lambda pair: -_distance(pair[1]))[:10]
    lines += [
        f"{row.name}, {each.name}: {_size(each.predicted)} MB predicted, "
        f"{_size(each.found)} MB found"
        for row, each in worst
        if each.beyond(TOLERANCE)
    ]
    return lines


def _report(rows: Sequence[Row]) -> str:
    """Page for ``docs/results``."""
    summary = _summary(rows)
    shares, worst = summary[:3], summary[3:]
    parts = [
        "# Predicted memory and bytes beside those of dry runs",
        f"{len(rows)} meshes of {len({row.model for row in rows})} models, priced for "
        f"H100s. Sizes in MB; * is further off than {TOLERANCE:.0%}. "
        f"`python -m benchmarks.verify_table`",
        "\n".join(f"* {line}" for line in shares),
    ]
    if worst:
        parts += ["## Furthest off", "\n".join(f"* {line}" for line in worst)]
    parts += ["## All", piped(_lines(rows))]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Print the table; return 1 if a quantity is further off than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="rows whose values have this text")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--report", type=Path, help="also write a page of results")
    options = parser.parse_args()
    chosen = [row for row in meshes() if options.only in json.dumps(row)]
    rows = []
    for row in _measure(chosen, options.processes):
        rows.append(row)
        print(f"{row.name}: {row.wall_s:.1f} s", file=sys.stderr, flush=True)
    print(aligned(_lines(rows)))
    print("\n".join(_summary(rows)))
    if options.report is not None:
        options.report.write_text(_report(rows), encoding="utf-8")
    return 0 if all(row.agrees for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
