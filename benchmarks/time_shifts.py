"""Jobs that share links, with and without a choice of when in a step they send.

    python -m benchmarks.time_shifts --seeds 9400 9405

The same streams are played with bursts that are spread, that collide, that are shifted
by rule, and whose shifts are chosen by each action: always 0, or the one with which
fewest running jobs become late, and then the links are stretched least. A baseline
names the degree: min_feasible takes the smallest that meets the deadline, constant_16
sends all jobs over two hosts of eight devices. With ``--wide`` jobs take the most hosts
that have room for their degree, so that they share links.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from envs.stream.arrivals import StreamLaw
from envs.stream.env import JobStreamEnv
from envs.stream.network import Shape
from envs.stream.session import StreamConfig, StreamSession
from envs.stream.tables import Bursts
from policies.baselines import make_baseline

__all__ = ["WAYS", "best_shift", "play", "widest"]

#: Models of sharing, and whether actions choose shifts.
WAYS: dict[str, tuple[Bursts, bool]] = {
    "spread": ("spread", False),
    "collide": ("collide", False),
    "shifted by rule": ("shifted", False),
    "chosen, always 0": ("chosen", False),
    "chosen": ("chosen", True),
}
_LOADS = (0.5, 1.0, 1.5)


def best_shift(env: JobStreamEnv, action: int) -> int:
    """Return the action of the same shape whose shift disturbs least.

    Args:
        env: With a job at the head.
        action: Of a shape; others are returned as they are.
    """
    options = env.session.options
    alike = _alike(
        env, action, lambda one: (one.kind, one.hosts, one.per_host, one.frugal)
    )
    return 1 + min(
        alike,
        key=lambda index: (options.harmed[index], options.stretch[index]),
        default=action - 1,
    )


def widest(env: JobStreamEnv, action: int) -> int:
    """Return the first action of the same degree with the most hosts.

    Args:
        env: With a job at the head.
        action: Of a shape; others are returned as they are.
    """
    alike = _alike(env, action, lambda one: one.devices)
    hosts = [shape.hosts for shape in env.shapes]
    return 1 + max(alike, key=lambda index: hosts[index], default=action - 1)


def _alike(
    env: JobStreamEnv, action: int, trait: Callable[[Shape], object]
) -> list[int]:
    """Return the possible shapes with the trait of an action's; none if it has none."""
    shapes, options = env.shapes, env.session.options
    if not 1 <= action <= len(shapes):
        return []
    asked = trait(shapes[action - 1])
    return [
        index
        for index, shape in enumerate(shapes)
        if trait(shape) == asked and options.possible[index]
    ]


def play(
    cluster: str,
    load: float,
    way: str,
    seeds: Sequence[int],
    *,
    intervals: float = 500.0,
    baseline: str = "min_feasible",
    wide: bool = False,
) -> tuple[float, float]:
    """Return the blocking rate and the throughput in devices, means over seeds.

    Args:
        cluster: As :class:`envs.stream.session.StreamConfig` takes it.
        load: Of the arrivals.
        way: Of :data:`WAYS`.
        seeds: Of the streams.
        intervals: Mean intervals of an episode.
        baseline: Of :data:`policies.baselines.BASELINES`, takes the degree.
        wide: Whether jobs take the most hosts of their degree.
    """
    bursts, chooses = WAYS[way]
    config = StreamConfig(
        cluster=cluster, law=StreamLaw(load=load), bursts=bursts, observe=False
    )
    session = StreamSession(config)
    interval_s = config.laws[0].mean_interval_s(session.names, session.tables)
    env = JobStreamEnv(replace(config, horizon_s=intervals * interval_s))
    policy = make_baseline(baseline, env.tables)
    found = []
    for seed in seeds:
        obs, _ = env.reset(seed=seed)
        ended = env.session.over
        summary: dict[str, float] = {}
        while not ended:
            action = int(policy.predict(obs, env.action_masks()))
            action = widest(env, action) if wide else action
            action = best_shift(env, action) if chooses else action
            obs, _, ended, _, info = env.step(np.int64(action))
            summary = info.get("summary", summary)
        found.append((summary["blocking_rate"], summary["throughput"]))
    rate, throughput = np.mean(found, axis=0).tolist()
    return rate, throughput


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", default="dgx-a100:4")
    parser.add_argument("--seeds", nargs=2, type=int, default=(9400, 9405))
    parser.add_argument("--loads", nargs="+", type=float, default=_LOADS)
    parser.add_argument("--intervals", type=float, default=500.0)
    parser.add_argument("--baseline", default="min_feasible")
    parser.add_argument("--wide", action="store_true")
    given = parser.parse_args()
    seeds = range(given.seeds[0], given.seeds[1] + 1)
    print(f"{given.cluster}, {given.baseline}, seeds {seeds[0]} to {seeds[-1]}")
    print("blocking rate, throughput in devices at load", *given.loads)
    for way in WAYS:
        cells = [
            play(
                given.cluster,
                load,
                way,
                seeds,
                intervals=given.intervals,
                baseline=given.baseline,
                wide=given.wide,
            )
            for load in given.loads
        ]
        told = "   ".join(f"{rate:.3f} {devices:5.1f}" for rate, devices in cells)
        print(f"{way:<18}{told}")


if __name__ == "__main__":
    main()
