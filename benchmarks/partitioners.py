"""Partitioners side by side: quality and time.

python benchmarks/partitioners.py --quick
python benchmarks/partitioners.py --budgets 1 10 --count 200 50 --out answers.jsonl
python benchmarks/partitioners.py --results answers.jsonl --docs docs
python benchmarks/partitioners.py --worlds FILE.json --budgets 1 --json

The first draws worlds of all kinds (envs.partition.sampler) and asks every partitioner
for a plan of each, alone and on a clock; tables compare the learned one with the
others. It takes minutes, the second a night: what --out keeps is not asked again, and
--results makes tables of it at any time, --docs a results file and figures.

--worlds asks for plans of the worlds of a file and prints what was found world by
world; null for a solver that found nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.partitioner_solvers import ABLATIONS, solver_names
from benchmarks.partitioner_study import Study, run_study
from benchmarks.partitioner_worlds import Arena, Kept, result_of
from envs.partition import GraphStore, load_worlds
from envs.partition.sampler import KINDS, SPLITS
from planner.errors import MeshwrightError, PlanFileError, UnknownNameError

__all__ = ["main"]

#: Of the quick run: worlds of each kind, and seconds of each solver.
_QUICK = (1, 1.0)


def _natural(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number; give 0 or more")
    return int(text)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--seed", type=_natural, default=0, help="of all that is drawn")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--worlds", metavar="FILE", help="plan these worlds")
    what.add_argument("--results", type=Path, metavar="FILE", help="only make tables")
    what.add_argument("--quick", action="store_true", help="a world of each kind")
    worlds = parser.add_argument_group("worlds")
    worlds.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    worlds.add_argument(
        "--count",
        nargs="+",
        type=_natural,
        default=[200],
        metavar="N",
        help="worlds of each kind; several: one for each budget",
    )
    worlds.add_argument("--split", choices=SPLITS, default="test")
    worlds.add_argument(
        "--budgets",
        "--budget-s",
        nargs="+",
        type=float,
        default=[1.0],
        metavar="S",
        help="seconds of each solver",
    )
    worlds.add_argument(
        "--solvers", nargs="+", metavar="NAME", help="all that there are by default"
    )
    worlds.add_argument(
        "--ablate",
        type=_natural,
        default=0,
        metavar="N",
        help="worlds of each kind on which parts of the learned one are left out",
    )
    worlds.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="what budgets are seconds of; processor where other work runs",
    )
    worlds.add_argument(
        "--no-graphs", type=Path, metavar="DIR", help="weights without graphs"
    )
    worlds.add_argument(
        "--out", type=Path, help="file of answers; those in it are not asked again"
    )
    worlds.add_argument(
        "--docs", type=Path, metavar="DIR", help="write results/ and figures/ here"
    )
    worlds.add_argument("--cache", type=Path, metavar="DIR", help="of models' graphs")
    return parser.parse_args(arguments)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _solvers(options: argparse.Namespace) -> list[str]:
    known = [*solver_names(), *ABLATIONS]
    for name in options.solvers or ():
        if name not in known:
            raise UnknownNameError("partitioner", name, known)
    return list(options.solvers or solver_names())


def _worlds(options: argparse.Namespace, arena: Arena) -> None:
    worlds = load_worlds(options.worlds)
    result = result_of(arena, worlds, options.budgets, _solvers(options))
    if options.json:
        print(json.dumps(result))
    else:
        _report(options, arena.kept)


def _study(options: argparse.Namespace, arena: Arena) -> None:
    counts, budgets = options.count, options.budgets
    if options.quick:
        counts, budgets = [_QUICK[0]], [_QUICK[1]]
    run_study(
        Study(
            kinds=tuple(options.kinds),
            budgets=tuple(budgets),
            counts=tuple(counts * len(budgets) if len(counts) == 1 else counts),
            solvers=tuple(_solvers(options)),
            split=options.split,
            seed=options.seed,
            ablate=options.ablate,
            no_graphs=options.no_graphs is not None,
        ),
        arena,
    )
    _report(options, arena.kept)


def _report(options: argparse.Namespace, kept: Kept) -> None:
    # Needs matplotlib, which answers do without.
    from benchmarks.partitioner_report import Report

    report = Report(kept.records)
    if options.docs is not None:
        _tell(f"wrote {report.write(options.docs)}")
    print(json.dumps(report.data()) if options.json else report.text())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; 1 if an input is wrong."""
    options = _parse(arguments)
    try:
        if options.results is not None:
            if not options.results.is_file():
                raise PlanFileError(
                    f"no file {options.results}; name one that --out wrote"
                )
            _report(options, Kept(options.results))
        else:
            arena = Arena(
                Kept(options.out),
                GraphStore(options.cache),
                options.no_graphs,
                _tell,
                options.clock,
            )
            if options.clock == "processor":
                # Searches and what times them read the one clock.
                time.perf_counter = time.process_time
            if options.worlds is not None:
                _worlds(options, arena)
            else:
                _study(options, arena)
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
