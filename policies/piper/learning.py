"""What a step of training wants: cuts that pipelines do well with, and their time.

Scores of cuts learn by REINFORCE from sets of cuts that they draw, each judged by the
best pipeline along it, and by the likelihood of the cuts of the best pipeline known.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.utils import softmax

from planner.split import PiperPlan, PiperTask
from planner.split.task import Array, Index
from policies.piper.candidates import Layout, lay_out
from policies.piper.features import CUTS, Observation, observe
from policies.piper.restricted import (
    at_suffixes,
    cuts_of,
    least_time,
    parts_of,
    spread,
)
from policies.piper.worlds import PiperWorld, draw_tasks

__all__ = [
    "WORST",
    "Lesson",
    "draw_lessons",
    "imitation_loss",
    "log_shares",
    "reward_of",
    "set_loss",
    "time_loss",
]

#: Log of the time over the best known: what is worse counts as this.
WORST = 0.5

_CLOSE = 1e-3  # of the best pipeline known to the best there is
_LONGEST_S = 5.0  # that is spent on one
_RAREST = 1e-9  # chance; surprise has an end


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lesson:
    """A task to learn from.

    Attributes:
        task: What it is.
        layout: Of its layers.
        seen: What is seen of it.
        least: What the work alone would take per sample.
        best: Time per sample of the best pipeline known.
        used: The suffixes that one is cut at, by number, without the ends.
    """

    task: PiperTask
    layout: Layout
    seen: Observation
    least: float
    best: float
    used: Index


def _lesson(task: PiperTask) -> Lesson | None:
    layout = lay_out(task)
    ends = time.monotonic() + _LONGEST_S
    plan = at_suffixes(task, layout.has, close=_CLOSE, ends=ends)
    if not plan.stages:
        return None
    return Lesson(
        task=task,
        layout=layout,
        seen=observe(task, layout),
        least=least_time(task),
        best=plan.time_per_sample,
        used=_numbers(task, layout, plan),
    )


def _numbers(task: PiperTask, layout: Layout, plan: PiperPlan) -> Index:
    cuts = {row.tobytes() for row in cuts_of(task, plan)[1:-1]}
    rows = (at for at, row in enumerate(layout.has) if row.tobytes() in cuts)
    return np.fromiter(rows, dtype=np.int64)


def draw_lessons(count: int, part: str, world: PiperWorld) -> list[Lesson]:
    """Lessons of tasks drawn by chance; those that nothing fits are none.

    Args:
        count: Of lessons.
        part: One of :data:`policies.piper.worlds.PARTS`.
        world: What tasks are drawn from.
    """
    found: list[Lesson] = []
    for task in draw_tasks(0, part, world):
        if len(found) == count:
            break
        lesson = _lesson(task)
        if lesson is not None and len(lesson.layout.has) > 4:
            found.append(lesson)
    return found


def log_shares(scores: Tensor, part: Tensor) -> Tensor:
    """Log probability of each suffix to be the one drawn from its part. Shape [s].

    Args:
        scores: Log odds of each suffix. Shape [s].
        part: Of the work, that it ends in. Shape [s].
    """
    share = softmax(scores, part)
    return torch.log(share.clamp_min(_RAREST))


def reward_of(lesson: Lesson, scores: Array, kept: int) -> float:
    """Log of the best time known over that along the suffixes that are kept.

    Args:
        lesson: The task.
        scores: Of its suffixes. Shape [s].
        kept: Suffixes, at most.
    """
    has = lesson.layout.has[spread(scores, _work(lesson), kept)]
    guess = (1 + 10 * _CLOSE) * lesson.best
    plan = at_suffixes(lesson.task, has, guess=guess, close=4 * _CLOSE)
    return -min(float(np.log(plan.time_per_sample / lesson.best)), WORST)


def _work(lesson: Lesson) -> Array:
    return lesson.seen.cuts[:, CUTS.index("work")].astype(np.float64)


def set_loss(
    lesson: Lesson,
    scores: Tensor,
    *,
    samples: int,
    kept: int,
    rng: np.random.Generator,
) -> tuple[Tensor, float]:
    """Draw sets of cuts, judge each, and say what makes the better ones likelier.

    Args:
        lesson: The task.
        scores: Of its suffixes. Shape [s].
        samples: Sets, 2 at least.
        kept: Cuts in a set.
        rng: What is left to chance.

    Returns:
        A loss whose slope is that of the mean reward, and the mean reward.
    """
    given = scores.detach().double().numpy()
    noisy = given + rng.gumbel(size=(samples, len(given)))
    rewards = np.array([reward_of(lesson, row, kept) for row in noisy])
    others = (rewards.sum() - rewards) / (samples - 1)
    part = parts_of(_work(lesson), kept)
    odds = log_shares(scores[1:-1], torch.from_numpy(part))
    loss = scores.new_zeros(())
    for row, gain in zip(noisy, rewards - others, strict=True):
        ranks = np.argsort(-row[1:-1])
        drawn = ranks[np.unique(part[ranks], return_index=True)[1]]
        loss = loss - float(gain) / samples * odds[torch.from_numpy(drawn)].sum()
    return loss, float(rewards.mean())


def imitation_loss(lesson: Lesson, scores: Tensor, kept: int) -> Tensor:
    """Mean surprise at each cut of the best pipeline known; nothing without a cut.

    Args:
        lesson: The task.
        scores: Of its suffixes. Shape [s].
        kept: Suffixes, at most.
    """
    if not len(lesson.used):
        return scores.new_zeros(())
    part = torch.from_numpy(parts_of(_work(lesson), kept))
    odds = log_shares(scores[1:-1], part)
    return -odds[torch.from_numpy(lesson.used - 1)].mean()


def time_loss(lessons: Sequence[Lesson], times: Tensor) -> Tensor:
    """How far off the times are that the network expects. ``times``: [lessons]."""
    wanted = [float(np.log(lesson.best / lesson.least)) for lesson in lessons]
    return nn.functional.smooth_l1_loss(times, times.new_tensor(wanted), beta=0.05)
