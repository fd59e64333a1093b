"""The command ``meshwright evaluate``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from planner.cli.output import emit_json, emit_table, progress
from planner.cli.train import World, require_learning
from planner.errors import StrategyError

__all__ = ["EvaluateCommand"]


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Say what a policy comes to on streams of jobs."""

    world: World
    """What it decides: job-stream."""
    policy: str = "learned"
    """A baseline (para_max, para_min, min_feasible, random, constant_K), rollout,
    learned or learned+lookahead."""
    weights: Annotated[
        str | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")
    ] = None
    """Saved by training, for the learned ones; those shipped by default."""
    laws: tuple[str, ...] = ("A", "B", "C", "D")
    """Of the arrivals."""
    seeds: str = "600:4"
    """FIRST:COUNT, of each law. The shipped policy was chosen on 5000:12."""
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

        seeds, jobs, found = _seeds(self.seeds), read_jobs(), {}
        with progress(len(self.laws), "law") as bar:
            for law in self.laws:
                found[law] = play(
                    lambda env: make_policy(self.policy, env, folder=self.weights),
                    jobs,
                    law,
                    seeds,
                    horizon_s=self.horizon_s,
                    observe=self.policy in OBSERVING,
                    mask="possible" if self._plans() else "benchmark",
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

    def _plans(self) -> bool:
        """Whether the policy looks at what is possible, as the fixed ones do not."""
        return self.policy.startswith(("learned", "rollout"))


def _seeds(text: str) -> range:
    first, _, count = text.partition(":")
    if not (first.isdigit() and count.isdigit() and int(count) > 0):
        raise StrategyError(
            f"seeds {text!r}; write FIRST:COUNT, for instance 600:4 for 600 to 603"
        )
    return range(int(first), int(first) + int(count))
