"""The ``learned`` solver of Piper tasks: a network says where to cut and what to ask.

The network reads the task once. The suffixes that it thinks most of are searched
exactly, beginning with the time per sample that it expects: near the best time most
pipelines can be ruled out, and far below it or above it asking is all but wasted. Then
cuts are moved by a layer as long as that helps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from planner.errors import StrategyError
from planner.split import PiperPlan, PiperTask
from policies.piper.candidates import Layout, lay_out
from policies.piper.features import CUTS, observe
from policies.piper.network import PiperNetwork, batch_of
from policies.piper.restricted import at_suffixes, cuts_of, least_time, next_to, spread
from policies.piper.saved import load_policy

__all__ = ["SearchConfig", "best_by_network", "learned"]

_WORK = CUTS.index("work")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """How much is searched.

    Attributes:
        kept: Suffixes that are searched first, at most.
        close: How much slower than the best of those the first answer may be.
        above: What is asked for first, above the time that the network expects.
        around: Suffixes that are searched when cuts are moved, at most.
        rounds: Most rounds of moves.
        gain: By what part a round must be better for another one.
    """

    kept: int = 96
    close: float = 0.02
    above: float = 0.005
    around: int = 96
    rounds: int = 4
    gain: float = 2e-3

    def __post_init__(self) -> None:
        if min(self.kept, self.around) < 1 or self.rounds < 0:
            raise StrategyError(
                f"kept={self.kept}, around={self.around} are at least 1, "
                f"rounds={self.rounds} is not negative"
            )
        if min(self.close, self.gain) <= 0 or self.above < 0:
            raise StrategyError(
                f"close={self.close}, gain={self.gain} are above 0, "
                f"above={self.above} is not negative"
            )


@lru_cache(maxsize=1)
def _shipped() -> PiperNetwork:
    return load_policy().network


def _first(
    network: PiperNetwork,
    task: PiperTask,
    layout: Layout,
    search: SearchConfig,
    ends: float,
) -> PiperPlan:
    """The best of the suffixes that are kept; of all there are, if none fits there."""
    seen = observe(task, layout)
    scores, times = network(batch_of([seen]))
    expected = least_time(task) * float(np.exp(np.clip(float(times[0]), 0, 50)))
    guess, close = expected * (1 + search.above), search.close
    work = seen.cuts[:, _WORK].astype(np.float64)
    kept, every = search.kept, len(layout.has)
    while True:
        rows = layout.has[spread(scores[0].double().numpy(), work, kept)]
        plan = at_suffixes(task, rows, guess=guess, close=close, ends=ends)
        if plan.stages or len(rows) == every:
            return plan
        kept = every


@torch.inference_mode()
def best_by_network(
    network: PiperNetwork,
    task: PiperTask,
    *,
    seed: int = 0,
    search: SearchConfig | None = None,
    ends: float = np.inf,
) -> PiperPlan:
    """The best pipeline where the network would cut it.

    Args:
        network: That scores.
        task: What is planned.
        seed: Of the orders drawn.
        search: How much is searched.
        ends: By the monotonic clock.

    Returns:
        The pipeline; without stages if none was found.
    """
    search = search or SearchConfig()
    plan = _first(network, task, lay_out(task, seed), search, ends)
    rng = np.random.default_rng(seed)
    for _ in range(search.rounds if plan.stages else 0):
        if time.monotonic() > ends:
            break
        near = next_to(task, cuts_of(task, plan), most=search.around, rng=rng)
        before = plan.time_per_sample
        aim = before * (1 - search.gain)
        plan = at_suffixes(
            task, near, known=plan, guess=aim, close=search.gain, ends=ends
        )
        if plan.time_per_sample > aim:
            break
    return plan


def learned(task: PiperTask, *, time_limit_s: float = 60.0, seed: int = 0) -> PiperPlan:
    """Plan a task by the shipped network; see :func:`best_by_network`.

    Args:
        task: What is planned.
        time_limit_s: Time there is; it takes some hundredths of a second.
        seed: Of the orders drawn.

    Raises:
        StrategyError: If the shipped weights are damaged.
    """
    ends = time.monotonic() + time_limit_s
    return best_by_network(_shipped(), task, seed=seed, ends=ends)
