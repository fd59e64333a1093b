"""The job stream: all policies side by side, or one trace decision by decision.

python benchmarks/job_stream.py
python benchmarks/job_stream.py --quick
python benchmarks/job_stream.py --arrivals trace.csv --policy para_min --json

The first replays laws A to D under every policy on test seeds, prints blocking rates
with 95 % intervals and differences to the best constant degree on the same traces, and
writes a results file and two figures: blocking against load, and the degrees chosen
against beta. The second does a part of it in a few minutes.

The third replays a trace with the columns arrival_s, model and beta. An arrival on the
horizon counts as arrived and is not decided. Policies: para_max, para_min, constant_K,
min_feasible, random; rollout, which draws its futures from the jobs seen so far unless
--law tells it one; learned, and learned+lookahead, which does both.

Jobs arrive at the benchmark's RAMP cluster, and are read from the PipeDream profiles of
MESHWRIGHT_DATA.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not __package__:
    # Run as a file, Python looks for modules beside it and not in the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.job_stream_replay import PLANNERS, replay_trace, write_decisions
from envs.ramp.jobs import MODELS
from planner.errors import MeshwrightError, StrategyError
from policies.baselines import BASELINES

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[1]

#: Settings of the whole table and of the quick one: seeds, horizon (s), loads, and how
#: many of the seeds are replayed at each load.
_FULL = ("9000:12", 1e6, (0.5, 0.75, 1.0, 1.25, 1.5), 6)
_QUICK = ("9000:3", 5e5, (0.5, 1.0, 1.5), 2)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--horizon-s", type=float, help="end of episodes, 1e6 at first")
    one = parser.add_argument_group("one trace")
    one.add_argument("--arrivals", type=Path, help="trace, a CSV")
    one.add_argument("--policy", help=", ".join((*BASELINES, *PLANNERS)))
    one.add_argument("--decisions", type=Path, help="write a row a decision here")
    one.add_argument("--seed", type=int, default=0, help="for policies that draw")
    one.add_argument("--law", help="A to D, told to rollout; else it learns")
    one.add_argument("--profiles", type=Path, help="folder of PipeDream profiles")
    one.add_argument("--models", nargs="+", default=MODELS)
    many = parser.add_argument_group("all policies")
    many.add_argument("--quick", action="store_true", help="a part of it")
    many.add_argument("--seeds", help="FIRST:COUNT of the traces of each law")
    many.add_argument("--processes", type=int, help="as many as cores by default")
    many.add_argument(
        "--keep",
        type=Path,
        help="file that episodes are kept in, for a run that is killed to go on",
    )
    many.add_argument(
        "--out",
        type=Path,
        help="folder for results/ and figures/; docs, and out if quick, by default",
    )
    return parser.parse_args(arguments)


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    # JSON has no NaN; means over no completed job are null.
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in values.items()
    }


def _one(options: argparse.Namespace) -> None:
    if options.policy is None:
        known = ", ".join((*BASELINES, *PLANNERS))
        raise StrategyError(f"--arrivals needs a --policy; known: {known}")
    result = replay_trace(
        options.arrivals,
        options.policy,
        horizon_s=1e6 if options.horizon_s is None else options.horizon_s,
        seed=options.seed,
        law=options.law,
        profiles=options.profiles,
        models=tuple(options.models),
    )
    if options.decisions is not None:
        write_decisions(result.decisions, options.decisions)
    found = {"policy": options.policy, **result.summary}
    found["ms_per_decision"] = result.ms_per_decision
    if options.json:
        print(json.dumps(_without_nan(found)))
        return
    for key, value in found.items():
        print(f"{key:24} {value:.6g}" if key != "policy" else f"{key:24} {value}")


def _many(options: argparse.Namespace) -> None:
    if options.policy is not None or options.decisions is not None:
        raise StrategyError("--policy and --decisions are of a trace; give --arrivals")
    # Needs scipy and matplotlib, which a replay does without.
    from benchmarks.job_stream_report import make_report
    from benchmarks.job_stream_table import check_seeds

    seeds, horizon_s, loads, at_each = _QUICK if options.quick else _FULL
    chosen = check_seeds(seeds if options.seeds is None else options.seeds)
    report = make_report(
        chosen,
        horizon_s if options.horizon_s is None else options.horizon_s,
        loads,
        chosen[:at_each],
        options.out or _ROOT / ("out" if options.quick else "docs"),
        options.processes,
        options.keep,
    )
    if options.json:
        print(json.dumps([_without_nan(asdict(one)) for one in report.compared]))
    else:
        print(report.text())


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay and print what it came to; 1 if the input is wrong."""
    options = _parse(arguments)
    try:
        if options.arrivals is None:
            _many(options)
        else:
            _one(options)
    except (MeshwrightError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
