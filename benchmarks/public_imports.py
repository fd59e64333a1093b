"""Public configuration files, read by the importers and checked by eye.

python -m benchmarks.public_imports FOLDER [LIST]     # prints the table

FOLDER has the files, each under the repository's name with + for the slash:
FOLDER/owner+name/path. LIST is a CSV, by default benchmarks/data/public_imports.csv:
kind, repository and path of each file, the recipe in it, processes and a script's
arguments where a file does not say them, and what a person read in it: axes, ZeRO,
dtype, batch, recomputation and offload, or ``refused`` and a word of the reason. The
files stay outside: they are other people's.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.errors import MeshwrightError
from planner.imports import SOURCES, Imported, Wanted, import_text
from planner.reading import read_text

_LIST = Path(__file__).parent / "data" / "public_imports.csv"
_OUTCOMES = ("read right", "read", "refused rightly", "refused", "read wrong", "failed")


def read_list(path: Path) -> list[dict[str, str]]:
    """Rows of a list of files."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def facts(found: Imported) -> dict[str, str]:
    """Words for a strategy that an expectation may name."""
    strategy = found.strategy
    mesh = strategy.mesh
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    return {name: str(getattr(mesh, name)) for name in names} | {
        "zero": str(strategy.zero_stage),
        "compute": strategy.precision.compute,
        "parameter": strategy.precision.parameter,
        "batch": f"{strategy.microbatch_size}x{strategy.num_microbatches}",
        "recompute": strategy.stages[0].recompute,
        "schedule": strategy.schedule,
        "virtual": str(strategy.virtual_stages),
        "context": strategy.context_algorithm,
        "optimizer": strategy.optimizer.name,
        "offload": str(strategy.offload),
        "compile": str(strategy.compile),
    }


def _import(row: Mapping[str, str], folder: Path) -> Imported:
    path = folder / row["repository"].replace("/", "+") / row["path"]
    world = int(row["world_size"]) if row["world_size"] else None
    return import_text(
        row["kind"],
        read_text(path, "config"),
        Wanted(world_size=world, recipe=row["recipe"], script_words=row["args"]),
        str(path),
    )


def outcome(row: Mapping[str, str], folder: Path) -> tuple[str, str]:
    """Outcome of one file, and its strategy or the reason."""
    expected = row["expected"]
    try:
        found = _import(row, folder)
    except MeshwrightError as error:
        reason = " ".join(str(error).replace(str(folder), "").split())
        if not expected:
            return "refused", reason
        refused = expected.startswith("refused")
        known = refused and expected.removeprefix("refused").strip(": ") in reason
        return ("refused rightly" if known else "failed"), reason
    label = found.strategy.label()
    if not expected:
        return "read", label
    if expected.startswith("refused"):
        return "read wrong", f"{label}: to be refused"
    said = facts(found)
    pairs = [pair.split("=", 1) for pair in expected.split() if "=" in pair]
    wrong = [
        f"{key}={said[key]}, not {value}" for key, value in pairs if said[key] != value
    ]
    return ("read wrong", "; ".join(wrong)) if wrong else ("read right", label)


def table(rows: Sequence[Mapping[str, str]], found: Sequence[tuple[str, str]]) -> str:
    """Outcomes by kind, and every file, as Markdown."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in SOURCES}
    for row, (result, _) in zip(rows, found, strict=True):
        counts.setdefault(row["kind"], Counter())[result] += 1
    lines = [f"| kind | files | {' | '.join(_OUTCOMES)} |", "|---" * 8 + "|"]
    total: Counter[str] = Counter()
    for kind, count in counts.items():
        total += count
        cells = " | ".join(str(count[name]) for name in _OUTCOMES)
        lines.append(f"| {kind} | {count.total()} | {cells} |")
    cells = " | ".join(str(total[name]) for name in _OUTCOMES)
    lines += [f"| all | {total.total()} | {cells} |", ""]
    read = total["read right"] + total["read"]
    share = 100 * read / max(total.total(), 1)
    lines += [f"{read} of {total.total()} files are read ({share:.0f} %).", ""]
    lines += ["| repository | file | result | strategy, or reason |", "|---" * 4 + "|"]
    for row, (result, text) in zip(rows, found, strict=True):
        name = row["path"] + (f" `{row['recipe']}`" if row["recipe"] else "")
        shown = text.replace("|", "\\|")
        lines.append(f"| {row['repository']} | {name} | {result} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    """Read every file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("list", type=Path, nargs="?", default=_LIST)
    given = parser.parse_args()
    rows = read_list(given.list)
    print(table(rows, [outcome(row, given.folder) for row in rows]))


if __name__ == "__main__":
    main()
