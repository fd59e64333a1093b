"""The lessons of a training run: which are kept, and what was found out about them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from planner.errors import StrategyError
from planner.search.arranging.arranger import Priced
from policies.partition.lessons import Lesson
from policies.partition.preparing import Preparer
from policies.partition.settings import PartitionTrainConfig

__all__ = ["LessonBook"]

#: Worlds in a row that may give no lesson.
_IN_VAIN = 50
#: New lessons that are prepared ahead.
_AHEAD = 4


class LessonBook:
    """Lessons, of which steps draw some.

    Studying a lesson changes it: search finds better orders. A run that goes on
    prepares its lessons again when they are drawn, and gives them back what was found.

    Args:
        config: Of the run.
        preparer: Makes lessons of split ``train``.
    """

    def __init__(self, config: PartitionTrainConfig, preparer: Preparer) -> None:
        self._config, self._preparer = config, preparer
        self._held: list[int] = []
        self._next = 0
        self._lessons: dict[int, Lesson] = {}
        self._found: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def worlds(self) -> int:
        """Worlds that were drawn so far."""
        return self._next

    def grow(self, step: int) -> None:
        """Prepare the lessons that are due before a step.

        Raises:
            StrategyError: If world after world gives no lesson.
        """
        while len(self._held) < self._config.first_lessons:
            self._add()
        if step and step % self._config.lesson_every == 0:
            self._add()
        self._look_ahead()

    def draw(self, rng: np.random.Generator) -> list[Lesson]:
        """The lessons of a step."""
        places = rng.integers(len(self._held), size=self._config.batch)
        return [self._lesson(self._held[place]) for place in places.tolist()]

    def _lesson(self, index: int) -> Lesson:
        if index not in self._lessons:
            made = self._preparer.take("train", index)
            if made is None:
                raise StrategyError(
                    f"world {index} of the run gave a lesson and gives none now; with "
                    f"another version, begin a run in another folder"
                )
            _restore(made, self._found.pop(index, None))
            self._lessons[index] = made
        return self._lessons[index]

    def _add(self) -> None:
        for _ in range(_IN_VAIN):
            self._look_ahead()
            index = self._next
            made = self._preparer.take("train", index)
            self._next += 1
            if made is not None:
                break
        else:
            raise StrategyError(
                f"{_IN_VAIN} worlds in a row gave no lesson; nothing fits on them, "
                f"give other clusters or models"
            )
        self._held.append(index)
        self._lessons[index] = made
        if len(self._held) > self._config.lessons:
            oldest = self._held.pop(0)
            self._lessons.pop(oldest, None)
            self._found.pop(oldest, None)

    def _look_ahead(self) -> None:
        """Begin with what comes next, then with what a run that goes on lacks."""
        self._preparer.ask("train", range(self._next, self._next + _AHEAD))
        self._preparer.ask(
            "train", (index for index in self._held if index not in self._lessons)
        )

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        found = dict(self._found)
        for index, lesson in self._lessons.items():
            if lesson.elites:
                found[index] = _found(lesson)
        return {"held": list(self._held), "next": self._next, "found": found}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._held, self._next = list(state["held"]), state["next"]
        self._lessons, self._found = {}, dict(state["found"])


def _found(lesson: Lesson) -> dict[str, Any]:
    (elites,) = lesson.elites
    return {
        # A copy: search goes on to change the lesson's.
        "prices": torch.from_numpy(lesson.score.copy()),
        "layout": torch.from_numpy(elites.layout),
        "sequence": torch.from_numpy(elites.sequence),
        "row": torch.from_numpy(elites.row),
        "score": torch.from_numpy(elites.score),
    }


def _restore(lesson: Lesson, found: dict[str, Any] | None) -> None:
    if found is None:
        return
    lesson.score[:] = found["prices"].numpy()
    lesson.elites[:] = [
        Priced(
            layout=found["layout"].numpy(),
            sequence=found["sequence"].numpy(),
            row=found["row"].numpy(),
            score=found["score"].numpy(),
        )
    ]
