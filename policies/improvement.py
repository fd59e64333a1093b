"""Policy iteration: label decisions by rollouts, fit a scorer to them, repeat.

The first rounds label by rollouts of a simple rule, the later ones by rollouts of the
scorer itself. Labelled decisions are those that the scorer reaches. Each round is
written to a file, so that a run can be resumed.

Source: Anthony, Tian and Barber 2017, "Thinking fast and slow with deep learning and
tree search" (expert iteration); Ross, Gordon and Bagnell 2011 (labels of states that
the learner reaches).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from planner.errors import StrategyError
from policies.fitting import FitConfig, LabelConfig, Labels, LabelWorld, fit
from policies.scorer import Scorer, averaged, check_scorer

__all__ = [
    "ImprovementConfig",
    "Judge",
    "Round",
    "improve",
    "read_round",
    "write_round",
]

#: Episodes that one task plays side by side.
_SIDE_BY_SIDE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ImprovementConfig:
    """Settings of policy iteration.

    Attributes:
        first_rounds: Rounds with rollouts of the rule.
        rounds: Number of all rounds.
        episodes: Episodes in each round.
        kept: Rounds whose labels are used in a fit, the current one included; of those
            by the rule only the last two once there are others.
        first: Labelling in the first rounds.
        later: Labelling in the other rounds.
        fit: Fit in each round.
        last: A further fit after the rounds, to all labels but those of the first
            rounds, from the last weights; it is returned whatever validation says.
            None for no further fit.
        last_fits: Number of further fits. All but one begin from random weights; their
            mean is returned, a scorer with the units of all.
    """

    first_rounds: int = 4
    rounds: int = 22
    episodes: int = 160
    kept: int = 8
    first: LabelConfig = field(
        default_factory=lambda: LabelConfig(futures=12, arrivals=32)
    )
    later: LabelConfig = field(
        default_factory=lambda: LabelConfig(futures=8, arrivals=24, labelled=0.05)
    )
    fit: FitConfig = field(default_factory=FitConfig)
    last: FitConfig | None = None
    last_fits: int = 1

    def __post_init__(self) -> None:
        if (
            not 1 <= self.first_rounds <= self.rounds
            or min(self.episodes, self.kept, self.last_fits) < 1
        ):
            raise StrategyError(
                f"first_rounds={self.first_rounds} of rounds={self.rounds}, "
                f"episodes={self.episodes}, kept={self.kept} and "
                f"last_fits={self.last_fits} are at least 1, and the first rounds at "
                f"most all"
            )

    @property
    def all_rounds(self) -> int:
        """Rounds, the last fit included."""
        return self.rounds + (self.last is not None)

    @property
    def hidden(self) -> int:
        """Hidden units of the scorer that is returned."""
        if self.last is None:
            return self.fit.hidden
        return self.fit.hidden + (self.last_fits - 1) * self.last.hidden


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Round:
    """Result of a round.

    Attributes:
        number: From 0 on.
        scorer: Fitted in this round.
        labels: Made in this round.
        loss: Loss of the fit.
        gains: Gain in each case of the validation.
    """

    number: int
    scorer: Scorer
    labels: Labels
    loss: float
    gains: tuple[float, ...]

    @property
    def gain(self) -> float:
        """Mean gain over the cases."""
        return float(np.mean(self.gains))


def write_round(done: Round, folder: Path) -> None:
    """Write a round to its file, completely or not at all."""
    path = folder / f"round_{done.number:03}.npz"
    part = path.with_suffix(".part")
    with part.open("wb") as stream:
        np.savez_compressed(
            stream,
            loss=done.loss,
            gains=np.array(done.gains),
            **{f"scorer.{name}": a for name, a in done.scorer._asdict().items()},
            **{f"labels.{name}": a for name, a in done.labels._asdict().items()},
        )
    part.replace(path)


def read_round(folder: Path, number: int) -> Round:
    """Read a round from its file.

    Raises:
        StrategyError: If the file is missing or damaged.
    """
    path = folder / f"round_{number:03}.npz"
    try:
        with np.load(path, allow_pickle=False) as held:
            scorer = Scorer(*(held[f"scorer.{name}"] for name in Scorer._fields))
            return Round(
                number=number,
                scorer=check_scorer(scorer, scorer.first.shape[0]),
                labels=Labels(*(held[f"labels.{name}"] for name in Labels._fields)),
                loss=float(held["loss"]),
                gains=tuple(held["gains"].tolist()),
            )
    except (OSError, KeyError, ValueError) as error:
        raise StrategyError(
            f"{path} is no round of a training run ({error}); remove it to make it anew"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A part of a round's episodes, for one process."""

    world: LabelWorld
    actor: Scorer | None
    base: Scorer | None
    config: LabelConfig
    seed: tuple[int, ...]


def _label(task: _Task) -> Labels:
    return task.world.draw_labels(
        task.actor, task.base, task.config, _SIDE_BY_SIDE, task.seed
    )


#: Validates a scorer: returns its gain in each case.
Judge = Callable[[Scorer], tuple[float, ...]]


def improve(
    config: ImprovementConfig,
    world: LabelWorld,
    judge: Judge,
    folder: Path,
    *,
    seed: int,
    workers: int = 1,
    watch: Callable[[Round], None] | None = None,
) -> Round:
    """Run all rounds, except those that ``folder`` already has.

    Args:
        config: Settings.
        world: Source of labels.
        judge: Validation by which the best round is found.
        folder: Folder of the rounds' files.
        seed: Seed of everything that is drawn. The result does not depend on
            ``workers``.
        workers: Processes that label.
        watch: Called after each round.
    Returns:
        The best round; with ``config.last`` the last one.
    Raises:
        StrategyError: If the file of a round is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done: list[Round] = []
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for number in range(config.all_rounds):
            if (folder / f"round_{number:03}.npz").exists():
                made = read_round(folder, number)
            elif number < config.rounds:
                made = _round(config, world, judge, done, (seed, number), pool)
                write_round(made, folder)
            else:
                made = _last(config, judge, done)
                write_round(made, folder)
            done.append(made)
            if watch is not None:
                watch(made)
    # Differences between rounds are mostly noise; the last fit has the least of it.
    return max(done, key=lambda one: one.gain) if config.last is None else done[-1]


def _last(config: ImprovementConfig, judge: Judge, done: Sequence[Round]) -> Round:
    """Fit once more, to all labels by scorers."""
    how = config.last or config.fit
    first = min(config.first_rounds, len(done) - 1)
    labels = Labels.joined([one.labels for one in done[first:]])
    found = [
        fit(labels, how, None if number else done[-1].scorer, len(done) + number)
        for number in range(config.last_fits)
    ]
    # The mean of one is itself, to the bit.
    scorer = averaged([one for one, _ in found])
    return Round(
        number=len(done),
        scorer=scorer,
        labels=Labels._make(part[:0] for part in labels),
        loss=float(np.mean([loss for _, loss in found])),
        gains=judge(scorer),
    )


def _round(
    config: ImprovementConfig,
    world: LabelWorld,
    judge: Judge,
    done: Sequence[Round],
    seed: tuple[int, int],
    pool: ProcessPoolExecutor,
) -> Round:
    number = len(done)
    early = number < config.first_rounds
    last = done[-1].scorer if done else None
    tasks = [
        _Task(
            world=world,
            actor=last,
            base=None if early else last,
            config=config.first if early else config.later,
            seed=(*seed, index),
        )
        for index in range(-(-config.episodes // _SIDE_BY_SIDE))
    ]
    labels = Labels.joined(list(pool.map(_label, tasks)))
    # Two rounds by the rule are enough: more would outweigh the first labels by the
    # scorer.
    first = max(0 if early else config.first_rounds - 2, number - config.kept + 1)
    kept = [one.labels for one in done[first:]]
    scorer, loss = fit(Labels.joined([*kept, labels]), config.fit, last, number)
    return Round(
        number=number, scorer=scorer, labels=labels, loss=loss, gains=judge(scorer)
    )
