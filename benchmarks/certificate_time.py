"""Seconds that a certificate adds to a plan, in fresh processes.

python -m benchmarks.certificate_time [--runs 3]

Each request is planned without a certificate, with one that is made, and with one that
is kept. Imports of the planning process are not counted, those of the certifier are: it
is started with the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["CASES", "measure"]

#: Model, cluster, global batch and pins.
CASES: dict[str, tuple[str, str, int, dict[str, int]]] = {
    "gpt2, 2 ranks": ("gpt2", "local:2", 8, {}),
    "llama3-8b, tp": ("llama3-8b", "dgx-h100:1", 64, {"tp": 8, "pp": 1, "cp": 1}),
    "llama3-8b, free": ("llama3-8b", "dgx-h100:1", 64, {}),
    "llama3-70b, pp x cp x tp": ("llama3-70b", "dgx-h100:8", 128, {"tp": 8, "pp": 2}),
    "mixtral-8x7b": ("mixtral-8x7b", "dgx-h100:2", 64, {}),
}


def measure(name: str, certify: bool) -> dict[str, object]:
    """Plan once in this process; seconds, verdict and twin."""
    import transformers

    from planner import plan
    from planner.portfolio import AUTO
    from planner.search import get_partitioner

    for one in AUTO:
        get_partitioner(one)
    _ = transformers.LlamaForCausalLM, transformers.GPT2LMHeadModel
    model, cluster, batch, pins = CASES[name]
    started = time.perf_counter()
    made = plan(model, cluster, global_batch=batch, pin=pins, certify=certify)
    seconds = time.perf_counter() - started
    found = made.certificate
    return {
        "seconds": seconds,
        "verdict": found.verdict if found else "",
        "twin": found.strategy if found else "",
    }


def _fresh(name: str, certify: bool, cache: str) -> dict[str, object]:
    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-m", "benchmarks.certificate_time", "--case", name]
    done = subprocess.run(
        [*command, *(["--certify"] if certify else [])],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=root,
        env={**os.environ, "XDG_CACHE_HOME": cache, "PYTHONPATH": root},
    )
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--certify", action="store_true")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.certify)))
        return
    print(
        f"{'seconds, median':26s}{'without':>9s}{'made':>9s}{'kept':>9s}  verdict, twin"
    )
    for name in CASES:
        rows: dict[str, list[float]] = {"without": [], "made": [], "kept": []}
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory() as cache:
                for kind, certify in (
                    ("without", False),
                    ("made", True),
                    ("kept", True),
                ):
                    found = _fresh(name, certify, cache)
                    rows[kind].append(float(str(found["seconds"])))
        took = "".join(f"{statistics.median(row):9.2f}" for row in rows.values())
        print(f"{name:26s}{took}  {found['verdict']}, {found['twin']}", flush=True)


if __name__ == "__main__":
    main()
