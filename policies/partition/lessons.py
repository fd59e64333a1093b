"""What there is to learn from one planning problem."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from envs.partition.features import Observed, observe
from envs.partition.graphs import GraphStore
from envs.partition.world import World
from planner.search import Request
from planner.search.arranging.arranger import Arranger, Priced, open_arranger
from planner.search.arranging.climb import Limits, best_of, climb, joined
from planner.search.arranging.fleets import Choices, list_choices
from planner.search.arranging.groups import DeviceGroups, group_devices

__all__ = ["Lesson", "prepare_lesson"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Meshes of one problem that are priced with all their rows.
_MOST_MESHES = 400
#: Layouts that are kept to learn orders on.
_MOST_LAYOUTS = 32
#: Arrangements that are kept to learn from.
_ELITES = 6


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Lesson:
    """A problem, in numbers and with the prices of some of its meshes.

    Attributes:
        request: The question.
        groups: Of its devices.
        choices: All meshes.
        seen: What the network sees.
        priced: Meshes that were priced. Shape [n].
        score: Their best price under plain orders; infinite if nothing fits. [n].
        arranger: Of the best of them.
        elites: The best arrangements that search has found so far; they get better
            while the lesson is studied.
    """

    request: Request
    groups: DeviceGroups
    choices: Choices
    seen: Observed
    priced: Index
    score: Array
    arranger: Arranger
    elites: list[Priced] = field(default_factory=list)

    def search(
        self, rounds: int, rng: np.random.Generator, start: list[Priced]
    ) -> None:
        """Improve the elites by small changes, from them and from others.

        Meshes for which something better than the plain orders was found get that
        price.

        Args:
            rounds: Of :func:`planner.search.arranging.climb.climb`.
            rng: Of the changes.
            start: What to begin with besides.
        """
        layouts = self.arranger.layouts
        plain = Priced(
            layout=np.arange(len(layouts)),
            sequence=layouts.sequence,
            row=layouts.starts[:-1].copy(),
            score=layouts.score,
        )
        everything = joined([plain, *start, *self.elites])
        found = climb(self.arranger, everything, rng, Limits(rounds=rounds))
        kept = best_of(joined([found, *self.elites]), _ELITES, of_layout=2)
        self.elites[:] = [kept]
        choice = layouts.choice[kept.layout]
        at = np.searchsorted(self.priced, choice)
        np.minimum.at(self.score, at, kept.score)


def prepare_lesson(
    world: World, rng: np.random.Generator, graphs: GraphStore | None = None
) -> Lesson | None:
    """Price meshes of a world under plain orders of its devices.

    Args:
        world: The problem.
        rng: Draws the meshes where there are too many.
        graphs: Where the model's graph is kept.
    Returns:
        None if nothing fits.
    """
    request = world.request(graphs)
    groups = group_devices(request.setting)
    choices = list_choices(request, groups)
    many = min(len(choices), _MOST_MESHES)
    chosen = np.sort(rng.choice(len(choices), size=many, replace=False))
    arranger = open_arranger(request, choices, groups, chosen)
    if arranger is None:
        return None
    score = np.full(len(choices), np.inf)
    score[arranger.layouts.choice] = arranger.layouts.score
    return Lesson(
        request=request,
        groups=groups,
        choices=choices,
        seen=observe(request, groups, choices),
        priced=chosen,
        score=score[chosen],
        arranger=arranger.with_best(_MOST_LAYOUTS),
    )
