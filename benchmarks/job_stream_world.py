"""The corrected job stream: decisions a second, and what baselines block by load.

python -m benchmarks.job_stream_world [--cluster dgx-a100:4] [--seeds 4] [--waiting 0]

Seconds of processor time on one core, code compiled beforehand. Prices of clusters
other than those that ship are worked out first, which takes minutes.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from envs.stream.arrivals import StreamLaw
from envs.stream.env import JobStreamEnv
from policies.baselines import make_baseline

__all__ = ["Row", "decisions_per_s", "job_stream_world"]

LOADS = (0.5, 0.75, 1.0, 1.25, 1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy at all loads.

    Attributes:
        policy: Its name.
        blocking: Mean share of jobs blocked at each of LOADS.
        late: Of load 1, the share of jobs that were late.
        utilisation: Of load 1.
        fragmentation: Of load 1.
        slowdown: Of load 1, mean running time over that alone.
    """

    policy: str
    blocking: tuple[float, ...]
    late: float
    utilisation: float
    fragmentation: float
    slowdown: float

    def __str__(self) -> str:
        rates = " ".join(f"{rate:7.4f}" for rate in self.blocking)
        return (
            f"{self.policy:13} {rates}   {self.late:6.4f} {self.utilisation:6.3f} "
            f"{self.fragmentation:6.3f} {self.slowdown:7.4f}"
        )


def _episode(env: JobStreamEnv, name: str, seed: int) -> tuple[int, dict[str, Any]]:
    policy = make_baseline(name, env.tables, seed)
    obs, _ = env.reset(seed=seed)
    steps, ended, info = 0, False, {}
    while not ended:
        action = policy.predict(obs, env.action_masks())
        obs, _, ended, _, info = env.step(np.int64(action))
        steps += 1
    return steps, info["summary"]


def decisions_per_s(cluster: str, *, observe: bool, waiting: int = 0) -> float:
    """Of a random policy at load 1, its own time included."""
    env = JobStreamEnv(cluster=cluster, observe=observe, max_waiting=waiting)
    # The first episode loads or compiles the code.
    _episode(env, "random", 0)
    start = time.process_time()
    steps = sum(_episode(env, "random", seed)[0] for seed in (1, 2))
    return steps / (time.process_time() - start)


def job_stream_world(cluster: str, seeds: int, waiting: int) -> list[Row]:
    """Every baseline at every load, on the same arrivals."""
    worlds = {
        load: JobStreamEnv(
            cluster=cluster,
            law=StreamLaw(load=load),
            max_waiting=waiting,
            observe=False,
        )
        for load in LOADS
    }
    degrees = sorted(set(worlds[1.0].tables.degrees.tolist()))
    names = ["para_max", "para_min", "min_feasible", "random"]
    rows = []
    for name in [*names, *(f"constant_{degree}" for degree in degrees)]:
        found = {
            load: [_episode(env, name, seed)[1] for seed in range(seeds)]
            for load, env in worlds.items()
        }

        def mean(key: str, load: float = 1.0, found: Any = found) -> float:
            return float(np.mean([summary[key] for summary in found[load]]))

        rows.append(
            Row(
                policy=name,
                blocking=tuple(mean("blocking_rate", load) for load in LOADS),
                late=mean("late") / mean("arrived"),
                utilisation=mean("utilisation"),
                fragmentation=mean("fragmentation"),
                slowdown=mean("mean_slowdown"),
            )
        )
    return rows


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="dgx-a100:4")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--waiting", type=int, default=0)
    given = parser.parse_args()
    for observe in (False, True):
        rate = decisions_per_s(given.cluster, observe=observe, waiting=given.waiting)
        asked = 300 if observe else 500
        words = "with observations" if observe else "without encoding"
        print(f"{words:18} {rate:8,.0f} decisions/s  (asked: {asked})")
    loads = " ".join(f"{load:7.2f}" for load in LOADS)
    print(f"\n{'blocked at load':13} {loads}     late   used  fragm  slower")
    for row in job_stream_world(given.cluster, given.seeds, given.waiting):
        print(row)


if __name__ == "__main__":
    main()
