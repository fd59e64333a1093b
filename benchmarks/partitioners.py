"""Partitioners side by side: quality and time.

python benchmarks/partitioners.py --tasks DIR [--time-limit-s 120] [--json]
python benchmarks/partitioners.py --worlds FILE.json [--budgets 1] [--json]

``--tasks`` splits every operator graph below a folder, see
:mod:`benchmarks.partitioner_tasks`. ``--worlds`` asks every partitioner for a plan of
every world of a file (:mod:`envs.partition.world`), each alone and within the budget;
one that finds nothing has null for an answer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.partitioner_solvers import solver_names
from benchmarks.partitioner_tasks import run_tasks, table_of_tasks
from benchmarks.partitioner_worlds import Arena, Kept, result_of
from envs.partition import load_worlds
from planner.errors import MeshwrightError

__all__ = ["main"]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tasks(options: argparse.Namespace) -> None:
    result = run_tasks(
        options.tasks,
        methods=options.methods,
        time_limit_s=options.time_limit_s,
        seed=options.seed,
        tell=_tell,
    )
    print(json.dumps(result) if options.json else table_of_tasks(result))


def _worlds(options: argparse.Namespace) -> None:
    worlds = load_worlds(options.worlds)
    arena = Arena(Kept(options.out), tell=_tell)
    names = options.solvers or solver_names()
    result: dict[str, Any] = result_of(arena, worlds, options.budgets, names)
    print(json.dumps(result))


def main(arguments: list[str] | None = None) -> int:
    """Print the figures; 1 if an input is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tasks", metavar="DIR")
    what.add_argument("--worlds", metavar="FILE")
    parser.add_argument("--methods", nargs="+", metavar="NAME")
    parser.add_argument("--time-limit-s", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--budgets", "--budget-s", nargs="+", type=float, default=[1.0])
    parser.add_argument("--solvers", nargs="+", metavar="NAME")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.tasks is not None:
            _tasks(options)
        else:
            _worlds(options)
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
