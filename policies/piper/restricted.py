"""Pipelines that are cut at some suffixes only, and at those next to their own cuts."""

from __future__ import annotations

import numpy as np

from planner.split import PiperPlan, PiperTask
from planner.split.piper.pipelines import Pipelines
from planner.split.piper.stage import Flags
from planner.split.piper.suffixes import least_work, tables_of
from planner.split.task import Array, Index
from policies.piper.candidates import distinct, neighbours_of

__all__ = ["at_suffixes", "cuts_of", "least_time", "next_to", "parts_of", "spread"]


def least_time(task: PiperTask) -> float:
    """What the work alone takes per sample, spread evenly over all devices."""
    return float(least_work(task).sum()) / task.devices


def parts_of(work: Array, kept: int) -> Index:
    """Which of ``kept`` equal parts of the work each suffix ends in. Shape [s - 2].

    Args:
        work: Part of the work that is a suffix's, 0 to 1, of both ends, too. Shape [s].
        kept: Parts.
    """
    return np.minimum((work[1:-1] * kept).astype(np.int64), kept - 1)


def spread(scores: Array, work: Array, kept: int) -> Index:
    """Suffixes of high scores from all over the work, and both ends, in their order.

    The work is cut into as many parts as are kept; each gives its best suffix.

    Args:
        scores: Of suffixes, the empty one first and that of all layers last. Shape [s].
        work: Part of the work that is theirs, 0 to 1. Shape [s].
        kept: Of those between, at most.
    """
    count = len(scores)
    if count - 2 <= kept:
        return np.arange(count)
    part = parts_of(work, kept)
    ranks = np.argsort(-scores[1:-1], kind="stable")
    _, first = np.unique(part[ranks], return_index=True)
    best = ranks[first]
    # Where parts are empty the best of the others come in.
    others = ranks[~np.isin(ranks, best)][: kept - len(best)]
    inner = 1 + np.sort(np.concatenate([best, others]))
    return np.concatenate([[0], inner, [count - 1]])


def at_suffixes(
    task: PiperTask,
    has: Flags,
    *,
    known: PiperPlan | None = None,
    guess: float = np.inf,
    close: float = 1e-3,
    ends: float = np.inf,
) -> PiperPlan:
    """The fastest pipeline that is cut at some suffixes.

    Args:
        task: What is planned.
        has: 1 for each layer of a suffix, smaller ones first, both ends among them.
            Shape [s, n].
        known: A pipeline to be beaten.
        guess: Time per sample that is asked for first.
        close: How much slower than the fastest it may be, relative.
        ends: By the monotonic clock.
    """
    tables = tables_of(task, has)
    assert tables is not None  # no limit was given
    found, _ = Pipelines(task, tables, ends).best(known=known, guess=guess, close=close)
    return found


def cuts_of(task: PiperTask, plan: PiperPlan) -> Flags:
    """The suffixes that a pipeline is cut at, both ends among them. Shape [s, n]."""
    place = {node: at for at, node in enumerate(task.nodes)}
    has = np.zeros((len(plan.stages) + 1, len(task)), dtype=np.int8)
    for k, stage in enumerate(reversed(plan.stages)):
        has[k + 1] = has[k]
        has[k + 1, [place[node] for node in stage.nodes]] = 1
    return has


def next_to(
    task: PiperTask, cuts: Flags, *, most: int, rng: np.random.Generator
) -> Flags:
    """Some cuts, and suffixes that one layer more or less turns them into.

    Args:
        task: What is planned.
        cuts: 1 for each layer of a suffix. Shape [s, n].
        most: Suffixes besides the cuts, at most.
        rng: Which, if there are more.

    Returns:
        Smaller suffixes first. Shape [suffixes, n].
    """
    near = distinct(neighbours_of(task, cuts))
    if len(near) > most:
        near = near[rng.choice(len(near), most, replace=False)]
    return distinct(np.concatenate([cuts, near]))
