"""Train the partitioner's network, from nothing or from weights, to weights.

A run is a folder: ``config.json`` (all settings, and what it ran with),
``checkpoint.pt``, ``progress.jsonl``, ``board/`` (TensorBoard's), ``graphs/`` (models
that were read) and, at the end, ``policy/``. Calling it again goes on where it stopped.
Without a limit of minutes the same settings give the same weights, whether or not a run
was stopped on the way, and with any number of processes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from planner import __version__
from planner.errors import StrategyError
from policies.partition.book import LessonBook
from policies.partition.checkpoint import new_learner, read_state, write_state
from policies.partition.learning import study
from policies.partition.lessons import Lesson
from policies.partition.preparing import Preparer
from policies.partition.saved import SavedNetwork, load_network, save_network
from policies.partition.settings import PartitionTrainConfig, worlds_of
from policies.partition.validating import Judged, judge, orders_matter
from policies.run_folder import describe_run

__all__ = ["Watch", "WatchedStep", "train_partition"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedStep:
    """Where a run is.

    Attributes:
        step: Steps done.
        steps: Steps in all, unless minutes end it before.
        lessons: Lessons that are kept.
        loss: Mean over the lessons of the step.
        judged: What validation found after this step, if there was one.
        best: Step after which validation found most.
    """

    step: int
    steps: int
    lessons: int
    loss: float
    judged: Judged | None
    best: int


#: Told of each step.
Watch = Callable[[WatchedStep], None]


def train_partition(
    config: PartitionTrainConfig,
    out: str | Path,
    *,
    watch: Watch | None = None,
    workers: int = 1,
) -> SavedNetwork:
    """Train, or go on with a run that was stopped.

    Args:
        config: Settings; those of a run that is gone on with must be the same.
        out: Folder of the run, made if it is not there.
        watch: Told of each step.
        workers: Processes; from 2 on all but one prepare lessons.
    Returns:
        The network that is best on the validation worlds, also in ``policy/``.
    Raises:
        StrategyError: If the folder holds a run of other settings, or no world gives a
            lesson.
        MeshwrightError: If a cluster or a model cannot be read.
    """
    run = Path(out)
    # A wrong cluster or model is refused before the folder is made.
    worlds_of(config, "train")
    start = None
    if config.source != "new":
        folder = None if config.source == "shipped" else Path(config.source)
        start = load_network(folder)
    describe_run(config, run)
    torch.set_num_threads(1)
    with (
        Preparer(config, run / "graphs", workers - 1) as preparer,
        _Run(config, run, preparer, start, watch) as training,
    ):
        return training.finish()


class _Run:
    """A run while it is going on."""

    def __init__(
        self,
        config: PartitionTrainConfig,
        folder: Path,
        preparer: Preparer,
        start: SavedNetwork | None,
        watch: Watch | None,
    ) -> None:
        self._config, self._folder, self._watch = config, folder, watch
        self._preparer, self._start = preparer, start
        self._book = LessonBook(config, preparer)
        self._learner = new_learner(config, start)
        read_state(folder, self._learner, self._book)
        self._board = SummaryWriter(
            str(folder / "board"), purge_step=self._learner.step + 1
        )

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._board.close()

    def _share(self) -> float:
        """How much of the run is done, between 0 and 1."""
        done = self._learner.step / self._config.steps
        if self._config.minutes is not None:
            done = max(done, self._learner.seconds / (60 * self._config.minutes))
        return min(done, 1.0)

    def finish(self) -> SavedNetwork:
        """Train to the end."""
        if self._share() < 1.0:
            lessons = self._validation_lessons()
            self._train(lessons)
        policy = self._folder / "policy"
        network = self._learner.best_network()
        save_network(network, self._notes(), policy)
        return load_network(policy)

    def _validation_lessons(self) -> list[Lesson]:
        count = self._config.validation_count
        self._preparer.ask("validation", range(count))
        found = []
        for index in range(count):
            self._preparer.ask("validation", range(index, count))
            found.append(self._preparer.take("validation", index))
        lessons = [one for one in found if one is not None]
        if not lessons:
            raise StrategyError(
                f"none of {count} validation worlds gave a lesson; nothing fits on "
                f"them, give other clusters or models"
            )
        return lessons

    def _train(self, validation: list[Lesson]) -> None:
        learner, config = self._learner, self._config
        while (share := self._share()) < 1.0:
            began = time.perf_counter()
            self._book.grow(learner.step)
            loss = self._step(share)
            learner.step += 1
            learner.seconds += time.perf_counter() - began
            done = self._share() >= 1.0
            judged = None
            if done or learner.step % config.evaluate_every == 0:
                judged = self._judge(validation)
            if done or learner.step % config.checkpoint_every == 0:
                write_state(self._folder, learner, self._book)
            if self._watch is not None:
                self._watch(
                    WatchedStep(
                        step=learner.step,
                        steps=config.steps,
                        lessons=len(self._book),
                        loss=loss,
                        judged=judged,
                        best=learner.best_step,
                    )
                )

    def _step(self, share: float) -> float:
        """Study some lessons and follow the gradient."""
        config, learner, board = self._config, self._learner, self._board
        # By seed and step alone: a run that goes on draws what it would have drawn.
        rng = np.random.default_rng([config.seed, learner.step])
        rate = config.last_rate + (config.first_rate - config.last_rate) * (1 - share)
        for group in learner.optimizer.param_groups:
            group["lr"] = rate
        learner.optimizer.zero_grad()
        lessons = self._book.draw(rng)
        learned = []
        for lesson in lessons:
            orders = orders_matter(lesson)
            one = study(learner.network, lesson, config.learning, rng, orders=orders)
            (one.loss / len(lessons)).backward()  # type: ignore[no-untyped-call]
            learned.append(one)
        norm = torch.nn.utils.clip_grad_norm_(learner.network.parameters(), config.clip)
        learner.optimizer.step()
        loss = float(np.mean([one.loss.item() for one in learned]))
        at = learner.step + 1
        board.add_scalar("train/loss", loss, at)
        board.add_scalar(
            "train/mesh_loss", np.mean([one.mesh_loss for one in learned]), at
        )
        rewards = [one.reward for one in learned if one.reward is not None]
        if rewards:
            board.add_scalar("train/orders_mean", np.mean(rewards), at)
        board.add_scalar("train/gradient_norm", norm.item(), at)
        board.add_scalar("train/rate", rate, at)
        return loss

    def _judge(self, validation: list[Lesson]) -> Judged:
        """Validate, keep the network if it is the best so far, and write it down."""
        learner = self._learner
        began = time.perf_counter()
        judged = judge(learner.network, validation, self._config.learning)
        learner.seconds += time.perf_counter() - began
        learner.keep_if_best(judged)
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": learner.step,
            "minutes": round(learner.seconds / 60, 2),
            "lessons": len(self._book),
            "worlds": self._book.worlds,
            "best_step": learner.best_step,
            **judged.as_data(),
        }
        with (self._folder / "progress.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        for name, value in judged.as_data().items():
            self._board.add_scalar(f"validation/{name}", value, learner.step)
        self._board.add_scalar("train/lessons", len(self._book), learner.step)
        self._board.flush()
        return judged

    def _notes(self) -> dict[str, Any]:
        """What the weights' own description says of the run."""
        config, learner = self._config, self._learner
        trained: dict[str, Any] = {"kinds": list(config.kinds)}
        if config.own:
            trained = {"clusters": list(config.clusters), "models": list(config.models)}
        return {
            "trained_on": {
                **trained,
                "seed": config.seed,
                "worlds": self._book.worlds,
                "steps": learner.step,
                "minutes": round(learner.seconds / 60, 1),
            },
            "started_from": None if self._start is None else self._start.checkpoint,
            "validated_on": {
                "worlds": config.validation_count,
                "split": "validation",
                "seed": config.seed,
                "best_step": learner.best_step,
                **learner.best_figures,
            },
            "versions": {"meshwright": __version__, "torch": torch.__version__},
        }
