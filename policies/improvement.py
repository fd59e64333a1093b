"""Policy iteration: label decisions by rollouts, fit a scorer to them, and again.

The first rounds label by rollouts of a simple rule, the later ones by rollouts of the
scorer itself. Decisions that are labelled are those that the scorer
comes to. Each round is written down, so that a run which is stopped goes on where it
was.

Source: Anthony, Tian and Barber 2017, "Thinking fast and slow with deep learning and
tree search" (expert iteration); Ross, Gordon and Bagnell 2011 (labels of states that
the learner comes to).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from planner.errors import StrategyError
from policies.fitting import FitConfig, fit
from policies.labels import LabelConfig, Labels, LabelWorld
from policies.scorer import Scorer, averaged, check_scorer

__all__ = [
    "ImprovementConfig",
    "Judge",
    "Round",
    "improve",
    "read_round",
    "write_round",
]

#: Episodes that one task of a process plays side by side.
_SIDE_BY_SIDE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ImprovementConfig:
    """How a scorer is improved, round by round.

    Attributes:
        first_rounds: With rollouts of the rule.
        rounds: In all.
        episodes: Played in each round.
        kept: Rounds whose labels are fitted to, this one and those before; of those by
            the rule only the last two once there are others.
        first: Labels of the first rounds.
        later: Of the others.
        fit: How the scorer is fitted in each round.
        last: How one more is fitted after the rounds, to all labels but those of the
            first rounds, from where the last round has come to, and returned whatever
            validation says of others; none if None.
        last_fits: How many fits ``last`` is for. The others begin from random weights;
            the mean of all of them is returned, with the units of all.
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
    def hidden(self) -> int:
        """Hidden units of the scorer that is returned."""
        if self.last is None:
            return self.fit.hidden
        return self.fit.hidden + (self.last_fits - 1) * self.last.hidden


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Round:
    """What a round came to.

    Attributes:
        number: From 0 on.
        scorer: That was fitted.
        labels: That this round made.
        loss: Of the fit.
        gains: On the validation streams, for each law.
    """

    number: int
    scorer: Scorer
    labels: Labels
    loss: float
    gains: tuple[float, ...]

    @property
    def gain(self) -> float:
        """Mean over the laws."""
        return float(np.mean(self.gains))


def write_round(done: Round, folder: Path) -> None:
    """Write a round down; whole or not at all."""
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
    """Read a round back.

    Raises:
        StrategyError: If it is not there, or not whole.
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
    """Some of a round's episodes, for one process."""

    world: LabelWorld
    actor: Scorer | None
    base: Scorer | None
    config: LabelConfig
    seed: tuple[int, ...]


def _label(task: _Task) -> Labels:
    return task.world.draw_labels(
        task.actor, task.base, task.config, _SIDE_BY_SIDE, task.seed
    )


#: Judges a scorer: its gain on each of the validation streams' kinds.
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
    """Go through all rounds; those that ``folder`` has are not made again.

    Args:
        config: How.
        world: Where decisions are labelled.
        judge: By which the best round is found.
        folder: To write rounds to.
        seed: Of everything that is drawn: the outcome does not depend on ``workers``.
        workers: Processes that label.
        watch: Told of each round.
    Returns:
        The best round; with ``config.last`` that one.
    Raises:
        StrategyError: If a round that was written is not whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done: list[Round] = []
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for number in range(config.rounds + (config.last is not None)):
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
    # Which round is best by how much is mostly noise; the last fit has the least.
    return max(done, key=lambda one: one.gain) if config.last is None else done[-1]


def _last(config: ImprovementConfig, judge: Judge, done: Sequence[Round]) -> Round:
    """One more fit, to all that rollouts by scorers have said."""
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
    # Two rounds by the rule are enough to go on from: more would outvote the first
    # labels by the scorer.
    first = max(0 if early else config.first_rounds - 2, number - config.kept + 1)
    kept = [one.labels for one in done[first:]]
    scorer, loss = fit(Labels.joined([*kept, labels]), config.fit, last, number)
    return Round(
        number=number, scorer=scorer, labels=labels, loss=loss, gains=judge(scorer)
    )
