"""Table of training methods, from their registry: what each sends, keeps and takes.

python -m benchmarks.methods_table [--write]

Bytes and memory are those of GPT-2 on the eight copies of one host of A100, beside
all-reduce's memory. Steps are the fastest plan's of GPT-2 XL with 1,024 samples of
1,024 tokens, on four hosts of H100, on 32 PCs with a GPU each on 10 Gbit/s, and on 64
V100 in eight regions of the world (DT-FM's case 5, read from ``MESHWRIGHT_DATA``).
``--write`` writes the table to ``docs/methods.md``. Ten minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import piped
from planner import Plan, plan, predict
from planner.errors import MeshwrightError
from planner.measurements.convergence import convergence
from planner.schema.composition import FEATURES, cell
from planner.schema.methods import Method, methods, read_method
from planner.units import format_bytes, format_seconds

__all__ = ["goes_with", "lines", "main"]

_PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
_START, _END = "<!-- methods: start -->", "<!-- methods: end -->"
#: Heads of columns of steps, and their clusters.
_CLUSTERS = {
    "4 x DGX H100": "dgx-h100:4",
    "32 PCs, 10 Gbit/s": "rtx4090-pc:32",
    "`dtfm-5`": "dtfm-5",
}
_COPIES = 8
_SMALL = {"mesh": {"dp_replicate": _COPIES}, "microbatch_size": 8}
#: Features of a strategy by the name of what they are of.
_GROUPS = {"zero": "ZeRO", "schedule": "pp", "context": "cp", "recompute": "recompute"}
_OF_METHODS = [one.feature for one in methods() if one.feature]


@dataclass(frozen=True, slots=True)
class _Row:
    """A method, or one of its presets: its name as a pin."""

    method: Method
    name: str


def _rows() -> Iterator[_Row]:
    for method in methods():
        yield _Row(method, method.kind)
        for preset in method.presets:
            yield _Row(method, preset)


def goes_with(method: Method) -> str:
    """Features that a method can be combined with, by group."""
    if method.default:
        return "all"
    # Of methods that go with the same, one has a row in the table of features.
    alike = (one.feature for one in methods(method.slot) if one.feature and one.runs)
    feature = method.feature or next(alike, None)
    if feature is None:
        return "pp"
    found: dict[str, list[bool]] = {}
    for other in FEATURES:
        if other.name in (feature.name, "replicas") or other.kind == method.slot:
            continue
        group = _GROUPS.get(other.kind, other.name.split()[0])
        if other in _OF_METHODS:
            group = other.name
        judged = cell((feature.name, other.name))
        if judged.strategy is not None:
            found.setdefault(group, []).append(judged.works)
    told = [
        group if all(works) else f"{group} ({sum(works)} of {len(works)})"
        for group, works in found.items()
        if any(works)
    ]
    return ", ".join(told) or "nothing else"


def _evidence(row: _Row) -> str:
    if row.method.inexact is None:
        return "exact"
    for one in convergence():
        if one.slot == row.method.slot and one.name == row.name:
            return f"{one.efficiency.basis}: {one.efficiency.eta:.2f}"
    return "none"


def _small(row: _Row, base: Plan | None) -> tuple[str, str]:
    """Bytes that a device sends in a mean step, and memory over all-reduce's."""
    slot = row.method.slot
    given = {**_SMALL, slot: read_method(slot, row.name)}
    if row.method.inexact is not None:
        given["semantics"] = "approximate"
    try:
        made = predict("gpt2", "dgx-a100", given)
    except MeshwrightError:
        return "-", "-"
    sent = sum(made.prediction.link_bytes.values())
    more = made.prediction.peak_memory_bytes
    if base is not None:
        more -= base.prediction.peak_memory_bytes
    sign = "-" if more < 0 else "+"
    return format_bytes(sent), f"{sign}{format_bytes(abs(more))}"


def _step(row: _Row, cluster: str) -> str:
    pin = {row.method.slot: row.name}
    try:
        made = plan("gpt2-xl", cluster, global_batch=1024, seq_len=1024, pin=pin)
    except MeshwrightError:
        return "-"
    return format_seconds(made.prediction.step_time_s)


def lines() -> list[tuple[str, ...]]:
    """Head and rows of the table."""
    base = predict("gpt2", "dgx-a100", _SMALL)
    head = (
        *("method", "pin", "goes with", "evidence", "sent", "memory"),
        *_CLUSTERS,
        "test",
    )
    found = [head]
    for row in _rows():
        method = row.method
        page = Path(method.page).relative_to("methods")
        first = row.name == method.kind
        found.append(
            (
                f"[`{row.name}`](methods/{page})" if first else f"`{row.name}`",
                f"`{method.slot}`" if first else "",
                goes_with(method) if first else "",
                _evidence(row),
                *_small(row, base),
                *(_step(row, cluster) for cluster in _CLUSTERS.values()),
                f"`{Path(method.test).name}`" if first else "",
            )
        )
        print(" | ".join(found[-1]), file=sys.stderr)
    return found


def _spliced(text: str, table: str) -> str:
    before, rest = text.split(_START)
    after = rest.split(_END)[1]
    return f"{before}{_START}\n{table}\n{_END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it to the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/methods.md")
    given = parser.parse_args(argv)
    if not os.environ.get("MESHWRIGHT_DATA"):
        parser.error("set MESHWRIGHT_DATA to the folder that has dtfm/")
    table = piped(lines())
    print(table)
    if given.write:
        _PAGE.write_text(_spliced(_PAGE.read_text("utf-8"), table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
