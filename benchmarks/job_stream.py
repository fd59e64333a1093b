"""Replay a trace of the job stream under a policy, decision by decision.

python benchmarks/job_stream.py --arrivals trace.csv --policy para_min --json

The trace has the columns arrival_s, model and beta. Jobs arrive at the benchmark's RAMP
cluster and are read from the PipeDream profiles of MESHWRIGHT_DATA. An arrival on the
horizon counts as arrived and is not decided. Policies: para_max, para_min, constant_K,
min_feasible, random, and rollout, which draws its futures from the jobs seen so far
unless --law tells it one.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from envs.ramp.arrivals import get_law
from envs.ramp.observation import MaskKind
from envs.ramp.profiles import MODELS
from envs.ramp.replay_env import RampReplayEnv
from planner.errors import MeshwrightError, UnknownNameError
from policies.baselines import BASELINES, Policy, make_baseline
from policies.lookahead import RolloutPolicy

__all__ = ["PLANNERS", "Decision", "ReplayResult", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One row of a replay's record.

    Attributes:
        arrival_s: When the job arrived.
        model: Its name.
        beta: Its deadline.
        degree: The action taken; 0 turned it away.
        outcome: What became of it: placed, refused, no_room or late.
    """

    arrival_s: float
    model: str
    beta: float
    degree: int
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """A replay.

    Attributes:
        decisions: In order.
        summary: Fields of envs.ramp.world.Summary and the blocking rate.
        ms_per_decision: Wall time that the policy took; the first decision, which
            loads compiled code, left out.
    """

    decisions: tuple[Decision, ...]
    summary: dict[str, float]
    ms_per_decision: float


def _rollout(env: RampReplayEnv, seed: int, law: str | None) -> Policy:
    told = None if law is None else get_law(law)
    return RolloutPolicy(env, law=told, models=tuple(env.session.jobs.jobs), seed=seed)


#: Policies that need more than observations: from environment, seed and law told.
PLANNERS: dict[str, Callable[[RampReplayEnv, int, str | None], Policy]] = {
    "rollout": _rollout
}


def _policy(name: str, env: RampReplayEnv, seed: int, law: str | None) -> Policy:
    if name in PLANNERS:
        return PLANNERS[name](env, seed, law)
    try:
        return make_baseline(name, env.tables, seed)
    except UnknownNameError as error:
        known = (*BASELINES, *PLANNERS)
        raise UnknownNameError("policy", name, known) from error


def replay(
    arrivals: Path,
    policy: str,
    *,
    horizon_s: float = 1e6,
    seed: int = 0,
    law: str | None = None,
    profiles: Path | None = None,
    models: tuple[str, ...] = MODELS,
) -> ReplayResult:
    """Replay a trace.

    Args:
        arrivals: CSV file.
        policy: A name of BASELINES, with a degree for K, or of PLANNERS.
        horizon_s: When the episode ends.
        seed: For policies that draw.
        law: Told to policies that draw futures.
        profiles: Folder of PipeDream profiles.
        models: That may arrive.

    Raises:
        MeshwrightError: If the trace, the policy or a number is wrong.
    """
    # The fixed policies are defined over the benchmark's own mask.
    mask: MaskKind = "possible" if policy in PLANNERS else "benchmark"
    env = RampReplayEnv(
        trace=arrivals,
        horizon_s=horizon_s,
        folder=profiles,
        models=models,
        mask=mask,
        observe=False,
    )
    decider = _policy(policy, env, seed, law)
    obs, _ = env.reset(seed=seed)
    stream = env.session.source.draw(np.random.default_rng(seed)).arrivals
    decided = [arrival for arrival in stream if arrival.time_s < horizon_s]
    decisions, spent_s = [], 0.0
    info: dict[str, Any] = {}
    for number, arrival in enumerate(tqdm(decided, desc=policy, disable=None)):
        start = time.perf_counter()
        action = decider.predict(obs, env.action_masks())
        spent_s += time.perf_counter() - start if number else 0.0
        obs, _, _, _, info = env.step(np.int64(action))
        decisions.append(
            Decision(
                arrival_s=arrival.time_s,
                model=arrival.model,
                beta=arrival.beta,
                degree=info["degree"],
                outcome=info["outcome"],
            )
        )
    return ReplayResult(
        decisions=tuple(decisions),
        summary=info["summary"],
        ms_per_decision=1e3 * spent_s / max(len(decisions) - 1, 1),
    )


def _write(decisions: Sequence[Decision], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(Decision.__slots__)
        for row in decisions:
            time_s, beta = f"{row.arrival_s:.15g}", f"{row.beta:.15g}"
            writer.writerow([time_s, row.model, beta, row.degree, row.outcome])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arrivals", type=Path, required=True, help="trace, a CSV")
    known = ", ".join((*BASELINES, *PLANNERS))
    parser.add_argument("--policy", required=True, help=known)
    parser.add_argument("--decisions", type=Path, help="write a row a decision here")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--horizon-s", type=float, default=1e6)
    parser.add_argument("--seed", type=int, default=0, help="for policies that draw")
    parser.add_argument("--law", help="A to D, told to rollout; else it learns")
    parser.add_argument("--profiles", type=Path, help="folder of PipeDream profiles")
    parser.add_argument("--models", nargs="+", default=MODELS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay a trace and print what it came to; 1 if the input is wrong."""
    options = _parse(arguments)
    try:
        result = replay(
            options.arrivals,
            options.policy,
            horizon_s=options.horizon_s,
            seed=options.seed,
            law=options.law,
            profiles=options.profiles,
            models=tuple(options.models),
        )
        if options.decisions is not None:
            _write(result.decisions, options.decisions)
    except (MeshwrightError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    found = {"policy": options.policy, **result.summary}
    found["ms_per_decision"] = result.ms_per_decision
    if options.json:
        # JSON has no NaN; means over no completed job are null.
        numbers = (isinstance(v, float) and math.isnan(v) for v in found.values())
        pairs = zip(found.items(), numbers, strict=True)
        print(json.dumps({key: None if nan else v for (key, v), nan in pairs}))
    else:
        for key, value in found.items():
            print(f"{key:24} {value:.6g}" if key != "policy" else f"{key:24} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
