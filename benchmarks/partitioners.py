"""Partitioners side by side: quality and time.

python benchmarks/partitioners.py --tasks DIR [--time-limit-s 120] [--json]

``--tasks`` splits every operator graph below a folder, see
:mod:`benchmarks.partitioner_tasks`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.partitioner_tasks import run_tasks, table_of_tasks
from planner.errors import MeshwrightError

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Print the figures; 1 if an input is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tasks", metavar="DIR", required=True)
    parser.add_argument("--methods", nargs="+", metavar="NAME")
    parser.add_argument("--time-limit-s", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        result = run_tasks(
            options.tasks,
            methods=options.methods,
            time_limit_s=options.time_limit_s,
            seed=options.seed,
            tell=lambda name: print(name, file=sys.stderr),
        )
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(result) if options.json else table_of_tasks(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
