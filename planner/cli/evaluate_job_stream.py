"""The commands ``meshwright evaluate job-stream`` and ``evaluate job-stream-world``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from planner.cli.learning import WeightsFolder, read_seeds, require_learning
from planner.cli.output import emit_json, emit_table, progress

__all__ = ["EvaluateJobStream", "EvaluateJobStreamWorld"]

Policy = Annotated[
    str,
    tyro.conf.arg(
        metavar="NAME",
        help="A baseline (para_max, para_min, min_feasible, random, constant_K), "
        "rollout, learned or learned+lookahead.",
    ),
]
Seeds = Annotated[
    str,
    tyro.conf.arg(
        metavar="FIRST:COUNT",
        help="Of each law or load. The shipped policies were chosen on seeds from 5000 "
        "on.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class EvaluateJobStream:
    """Which jobs run how on the cluster of the benchmark."""

    policy: Policy = "learned"
    weights: WeightsFolder = None
    seeds: Seeds = "600:4"
    laws: tuple[str, ...] = ("A", "B", "C", "D")
    """Of the arrivals."""
    horizon_s: float = 1e6
    """When a stream ends."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Play, and print."""
        require_learning()
        from envs.ramp.profiles import read_jobs
        from policies.by_name import OBSERVING, make_policy
        from policies.evaluation import play

        seeds, jobs, found = read_seeds(self.seeds), read_jobs(), {}
        # These look at what is possible, as the fixed policies do not.
        plans = self.policy.startswith(("learned", "rollout"))
        with progress(len(self.laws), "law") as bar:
            for law in self.laws:
                found[law] = play(
                    lambda env: make_policy(self.policy, env, folder=self.weights),
                    jobs,
                    law,
                    seeds,
                    horizon_s=self.horizon_s,
                    observe=self.policy in OBSERVING,
                    mask="possible" if plans else "benchmark",
                )
                bar.update(1)
        if self.json:
            emit_json(
                {
                    law: {
                        "blocking_rate": one.blocking_rate,
                        "blocking_rates": list(one.blocking_rates),
                        "throughput_bytes_per_s": one.throughput_bytes_per_s,
                        "mean_jct_s": one.mean_jct_s,
                        "decision_s": one.decision_s,
                    }
                    for law, one in found.items()
                }
            )
            return
        emit_table(
            ("law", "blocked", "GB/s", "mean JCT s", "ms a decision"),
            [
                (
                    law,
                    f"{one.blocking_rate:.4f}",
                    f"{one.throughput_bytes_per_s / 1e9:.4g}",
                    f"{one.mean_jct_s:.0f}",
                    f"{1e3 * one.decision_s:.3f}",
                )
                for law, one in found.items()
            ],
            numbers=True,
        )


@dataclass(frozen=True, kw_only=True)
class EvaluateJobStreamWorld:
    """The same on any cluster."""

    policy: Policy = "learned"
    weights: WeightsFolder = None
    seeds: Seeds = "600:4"
    cluster: str = "dgx-a100:4"
    """The cluster."""
    models: tuple[str, ...] = ()
    """Jobs that may arrive, the built-in ones by default."""
    loads: tuple[float, ...] = (0.5, 1.0, 1.5)
    """Work offered over what the cluster can do."""
    intervals: float = 1000.0
    """Mean times between arrivals that a stream lasts."""
    waiting: int = 0
    """Jobs that may wait."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Play, and print."""
        require_learning()
        from envs.stream.jobs import built_in_jobs
        from policies.stream_by_name import make_stream_policy, stream_observes
        from policies.stream_evaluation import StreamCase, play_stream
        from policies.stream_worlds import StreamWorld

        seeds, found = read_seeds(self.seeds), {}
        world = StreamWorld(
            cluster=self.cluster,
            models=self.models or tuple(job.name for job in built_in_jobs()),
            max_waiting=self.waiting,
        )
        with progress(len(self.loads), "load") as bar:
            for load in self.loads:
                case = StreamCase(world=world, load=load, intervals=self.intervals)
                found[load] = play_stream(
                    lambda env: make_stream_policy(
                        self.policy, env, folder=self.weights
                    ),
                    case.env(observe=stream_observes(self.policy)),
                    seeds,
                )
                bar.update(1)
        if self.json:
            emit_json(
                {
                    f"{load:g}": {
                        **{name: one.mean(name) for name in one.summaries[0]},
                        "blocking_rates": list(one.blocking_rates),
                        "decision_s": one.decision_s,
                    }
                    for load, one in found.items()
                }
            )
            return
        causes = ("refused", "no_room", "late")
        emit_table(
            ("load", "blocked", *causes, "mean JCT h", "used", "ms a decision"),
            [
                (
                    f"{load:g}",
                    f"{one.blocking_rate:.4f}",
                    *(
                        f"{one.mean(cause) / one.mean('arrived'):.4f}"
                        for cause in causes
                    ),
                    f"{one.mean('mean_jct_s') / 3600:.3g}",
                    f"{one.mean('utilisation'):.3f}",
                    f"{1e3 * one.decision_s:.3f}",
                )
                for load, one in found.items()
            ],
            numbers=True,
        )
