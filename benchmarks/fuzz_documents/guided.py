"""Mutations that coverage guides, by atheris, each kind in a process of its own."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.fuzz_documents.judging import BAD, judge, keep, mutation_path, prepare
from benchmarks.fuzz_documents.mutations import mutate_bytes

__all__ = ["fuzz_kind_guided"]


def fuzz_kind_guided(
    kind: str, count: int, seed: int, folder: Path, seconds: float
) -> Counter[str]:
    """Count the outcomes of mutations; those that fail are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [kind, str(count), str(seed), str(folder), str(seconds)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fuzz_documents.guided", *words],
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{kind}: atheris ended with {done.returncode}")
    return Counter(json.loads(done.stdout.splitlines()[-1]))


def _compiled() -> list[str]:
    """Modules with loops for numba, which compiles nothing that is instrumented."""
    root = Path(__file__).parents[2]
    files = [path for room in ("planner", "envs") for path in (root / room).rglob("*")]
    return [
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in files
        if path.suffix == ".py"
        and re.search(r"simulate\.compiled|import numba", path.read_text())
    ]


def main() -> None:
    import atheris

    kind, count, seed, where, seconds = sys.argv[1:]
    folder, until = Path(where), time.monotonic() + float(seconds)
    with atheris.instrument_imports(include=["planner", "envs"], exclude=_compiled()):
        originals = prepare(kind, folder)
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for index, text in enumerate(originals):
        (corpus / f"real-{index}").write_text(text)
    counts: Counter[str] = Counter()

    def run_one(raw: bytes) -> None:
        mutation_path(kind, folder).write_bytes(raw)
        outcome, why = judge(kind, mutation_path(kind, folder))
        counts[outcome] += 1
        if outcome in BAD:
            keep(kind, folder, counts.total(), outcome, why)
        if counts.total() >= int(count) or time.monotonic() > until:
            print(json.dumps(counts), flush=True)
            os._exit(0)

    def change(raw: bytes, most: int, number: int) -> bytes:
        rng = random.Random(number)
        if rng.random() < 0.2:
            return bytes(atheris.Mutate(raw, most))
        return mutate_bytes(raw, kind, rng)[:most]

    # Time and memory have limits already.
    words = ["", "-timeout=0", "-rss_limit_mb=0", "-max_len=100000", "-verbosity=0"]
    words += [f"-seed={int(seed) + 1}", str(corpus)]
    atheris.Setup(words, run_one, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
