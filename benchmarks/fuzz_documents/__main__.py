"""``python -m benchmarks.fuzz_documents``; see the package."""

from __future__ import annotations

import argparse
import datetime
import math
import re
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks import fuzz_documents
from benchmarks.fuzz_documents.guided import fuzz_kind_guided
from benchmarks.fuzz_documents.judging import BAD, OUTCOMES, Worker, keep
from benchmarks.fuzz_documents.kinds import KINDS


def fuzz_kind(
    kind: str, count: int, seed: int, folder: Path, seconds: float
) -> Counter[str]:
    """Count the outcomes of mutations; those that fail are kept."""
    counts: Counter[str] = Counter()
    folder.mkdir(parents=True, exist_ok=True)
    worker = Worker(kind, seed, folder)
    until = time.monotonic() + seconds
    for number in range(count):
        if time.monotonic() > until:
            break
        outcome, why = worker.judge(number)
        counts[outcome] += 1
        if outcome in BAD:
            keep(kind, folder, number, outcome, why)
    worker.close()
    return counts


def _report(found: dict[str, Counter[str]], started: float) -> str:
    lines = [
        "| document | mutations | clean errors | accepted | tracebacks | above 5 s | "
        "above 1 GB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    total: Counter[str] = sum(found.values(), Counter())
    for name, counts in [*found.items(), ("all", total)]:
        cells = [f"{sum(counts.values()):,}"]
        cells += [f"{counts[outcome]:,}" for outcome in OUTCOMES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append("")
    lines.append(f"{time.monotonic() - started:.0f} s.")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=fuzz_documents.__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="mutations in all")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these")
    parser.add_argument("--guided", action="store_true", help="by coverage, atheris")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"))
    parser.add_argument("--out", type=Path, help="folder for a dated result")
    return parser.parse_args()


def main() -> int:
    options = _options()
    started = time.monotonic()
    kinds = options.kind or list(KINDS)
    fuzz = fuzz_kind_guided if options.guided else fuzz_kind
    found: dict[str, Counter[str]] = {}
    for index, kind in enumerate(kinds):
        left = options.seconds - (time.monotonic() - started)
        share = max(left / (len(kinds) - index), 1.0)
        folder = options.keep / re.sub(r"\W+", "_", kind)
        count = -(-options.count // len(kinds))
        found[kind] = fuzz(kind, count, options.seed, folder, share)
        print(f"{kind}: {dict(found[kind])}", file=sys.stderr, flush=True)
    text = _report(found, started)
    print(text)
    if options.out is not None:
        today = datetime.date.today().isoformat()
        command = " ".join(sys.argv[1:])
        page = (
            f"# Documents from outside, mutated\n\n{today}, seed {options.seed}. "
            f"`python -m benchmarks.fuzz_documents {command}`\n\n{text}\n"
        )
        (options.out / f"fuzz_{today}.md").write_text(page)
    return int(any(counts[outcome] for counts in found.values() for outcome in BAD))


if __name__ == "__main__":
    sys.exit(main())
