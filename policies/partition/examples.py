"""Training examples: planning problems with priced meshes, prepared ahead and kept.

An :class:`Example` is one problem, a :class:`Preparer` makes them in other processes,
and an :class:`ExampleStore` keeps those that steps draw from.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from envs.partition.features import Observed, observe
from envs.partition.graphs import GraphStore
from envs.partition.world import World
from planner.errors import StrategyError
from planner.search import Request
from planner.search.device_order.climb import Limits, best_of, climb, joined
from planner.search.device_order.groups import DeviceGroups, group_devices
from planner.search.device_order.pricer import OrderPricer, Priced, open_order_pricer
from planner.search.device_order.subsets import Choices, list_choices
from policies.partition.settings import PartitionTrainConfig, WorldSource, worlds_of

if TYPE_CHECKING:
    from policies.ray_pool import RayPool

__all__ = [
    "Example",
    "ExampleStore",
    "Preparer",
    "prepare_example",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Meshes of one problem that are priced with all their rows.
_MOST_MESHES = 400
#: Layouts of one problem for which orders are learned.
_MOST_LAYOUTS = 32
#: Best arrangements of one problem that are kept.
_ELITES = 6


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Example:
    """A planning problem in numbers, with the prices of some of its meshes.

    Attributes:
        request: The request.
        groups: Groups of its devices.
        choices: All meshes.
        seen: Input of the network.
        priced: Meshes that were priced. Shape [n].
        score: Best price of each so far; infinite if nothing fits. Shape [n].
        pricer: Prices arrangements of the best layouts.
        elites: Best arrangements found by search so far; they improve in training.
    """

    request: Request
    groups: DeviceGroups
    choices: Choices
    seen: Observed
    priced: Index
    score: Array
    pricer: OrderPricer
    elites: list[Priced] = field(default_factory=list)

    def search(
        self, rounds: int, rng: np.random.Generator, start: list[Priced]
    ) -> None:
        """Improve the elites by small changes.

        The price of a mesh falls to that of the best arrangement found.

        Args:
            rounds: Rounds of :func:`planner.search.device_order.climb.climb`.
            rng: Draws the changes.
            start: Further arrangements to begin with.
        """
        layouts = self.pricer.layouts
        plain = Priced(
            layout=np.arange(len(layouts)),
            sequence=layouts.sequence,
            row=layouts.starts[:-1].copy(),
            score=layouts.score,
        )
        everything = joined([plain, *start, *self.elites])
        found = climb(self.pricer, everything, rng, Limits(rounds=rounds))
        kept = best_of(joined([found, *self.elites]), _ELITES, of_layout=2)
        self.elites[:] = [kept]
        choice = layouts.choice[kept.layout]
        at = np.searchsorted(self.priced, choice)
        np.minimum.at(self.score, at, kept.score)


def prepare_example(
    world: World, rng: np.random.Generator, graphs: GraphStore | None = None
) -> Example | None:
    """Price meshes of a world under plain orders of its devices.

    Args:
        world: The problem.
        rng: Draws the meshes where there are too many.
        graphs: Store of model graphs.
    Returns:
        None if nothing fits.
    """
    request = world.request(graphs)
    groups = group_devices(request.context)
    choices = list_choices(request, groups)
    many = min(len(choices), _MOST_MESHES)
    chosen = np.sort(rng.choice(len(choices), size=many, replace=False))
    pricer = open_order_pricer(request, choices, groups, chosen)
    if pricer is None:
        return None
    score = np.full(len(choices), np.inf)
    score[pricer.layouts.choice] = pricer.layouts.score
    return Example(
        request=request,
        groups=groups,
        choices=choices,
        seen=observe(request, groups, choices),
        priced=chosen,
        score=score[chosen],
        pricer=pricer.with_best(_MOST_LAYOUTS),
    )


Split = Literal["train", "validation"]
_Key = tuple[Split, int]


class _Maker:
    """Prepares examples of the worlds of one run, in any process."""

    def __init__(self, config: PartitionTrainConfig, folder: Path) -> None:
        self._graphs = GraphStore(folder)
        self._sources: dict[Split, WorldSource] = {
            "train": worlds_of(config, "train", self._graphs),
            "validation": worlds_of(config, "validation", self._graphs),
        }

    def make(self, split: Split, index: int) -> Example | None:
        world = self._sources[split].world(index)
        return prepare_example(world, np.random.default_rng(index), self._graphs)


@cache
def _maker(config: PartitionTrainConfig, folder: Path) -> _Maker:
    return _Maker(config, folder)


def _make(
    config: PartitionTrainConfig, folder: Path, split: Split, index: int
) -> Example | None:
    return _maker(config, folder).make(split, index)


def _begin() -> None:
    """Set a process up: one thread, silent when interrupted, ends with its parent."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _ray_pool(address: str) -> RayPool:
    try:
        from policies.ray_pool import RayPool
    except ImportError as error:
        raise StrategyError(
            f"ray={address!r}: ray is not installed; pip install 'meshwright[ray]'"
        ) from error
    return RayPool(address)


#: Least number of new examples that are prepared ahead.
_AHEAD = 4


class Preparer:
    """Prepares examples by split and place, the same in any process.

    Args:
        config: Settings of the run.
        folder: Folder of model graphs.
        processes: Worker processes; with 0, examples are prepared here when needed.
        ray: Address of a Ray cluster that prepares them instead, on all its CPUs; see
            :class:`policies.ray_pool.RayPool`. None for none.
    """

    def __init__(
        self,
        config: PartitionTrainConfig,
        folder: Path,
        processes: int,
        ray: str | None = None,
    ) -> None:
        self._config, self._folder, self._processes = config, folder, processes
        self._ray = ray
        self._pool: Executor | None = None
        self._begun: dict[_Key, Future[Example | None]] = {}

    @property
    def ahead(self) -> int:
        """New examples to prepare ahead."""
        return max(_AHEAD, 2 * self._processes)

    def __enter__(self) -> Preparer:
        if self._ray is not None:
            self._pool = pool = _ray_pool(self._ray)
            self._processes = pool.cpus
        elif self._processes:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self._processes, context, initializer=_begin
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._begun.clear()

    def ask(self, split: Split, indices: Iterable[int]) -> None:
        """Start preparing, in this order, as many as keep the processes busy."""
        if self._pool is None:
            return
        waiting = sum(not one.done() for one in self._begun.values())
        for index in indices:
            if waiting >= 2 * self._processes:
                return
            if (split, index) not in self._begun:
                self._begun[split, index] = self._pool.submit(
                    _make, self._config, self._folder, split, index
                )
                waiting += 1

    def take(self, split: Split, index: int) -> Example | None:
        """Wait for an example and return it; None if nothing fits in its world."""
        begun = self._begun.pop((split, index), None)
        if begun is not None:
            return begun.result()
        if self._pool is None:
            return _make(self._config, self._folder, split, index)
        return self._pool.submit(
            _make, self._config, self._folder, split, index
        ).result()


#: Worlds in a row without an example before that is an error.
_IN_VAIN = 50


class ExampleStore:
    """Keeps the examples that training steps draw from.

    Studying an example changes it: search finds better orders. A resumed run prepares
    its examples again when they are drawn, and restores what search had found.

    Args:
        config: Settings of the run.
        preparer: Prepares examples of split ``train``.
    """

    def __init__(self, config: PartitionTrainConfig, preparer: Preparer) -> None:
        self._config, self._preparer = config, preparer
        self._held: list[int] = []
        self._next = 0
        self._examples: dict[int, Example] = {}
        self._found: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def worlds(self) -> int:
        """Number of worlds drawn so far."""
        return self._next

    def grow(self, step: int) -> None:
        """Prepare the examples that are due before a step.

        Raises:
            StrategyError: If too many worlds in a row give no example.
        """
        while len(self._held) < self._config.first_examples:
            self._add()
        if step and step % self._config.example_every == 0:
            self._add()
        self._look_ahead()

    def draw(self, rng: np.random.Generator) -> list[Example]:
        """Draw the examples of a step."""
        places = rng.integers(len(self._held), size=self._config.batch)
        return [self._example(self._held[place]) for place in places.tolist()]

    def _example(self, index: int) -> Example:
        if index not in self._examples:
            made = self._preparer.take("train", index)
            if made is None:
                raise StrategyError(
                    f"world {index} of the run gave an example and gives none now; "
                    f"with another version, begin a run in another folder"
                )
            _restore(made, self._found.pop(index, None))
            self._examples[index] = made
        return self._examples[index]

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
                f"{_IN_VAIN} worlds in a row gave no example; nothing fits on them, "
                f"give other clusters or models"
            )
        self._held.append(index)
        self._examples[index] = made
        if len(self._held) > self._config.examples:
            oldest = self._held.pop(0)
            self._examples.pop(oldest, None)
            self._found.pop(oldest, None)

    def _look_ahead(self) -> None:
        """Start preparing the next worlds, then examples that a resumed run lacks."""
        ahead = self._preparer.ahead
        self._preparer.ask("train", range(self._next, self._next + ahead))
        self._preparer.ask(
            "train", (index for index in self._held if index not in self._examples)
        )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        found = dict(self._found)
        for index, example in self._examples.items():
            if example.elites:
                found[index] = _found(example)
        return {"held": list(self._held), "next": self._next, "found": found}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._held, self._next = list(state["held"]), state["next"]
        self._examples, self._found = {}, dict(state["found"])


def _found(example: Example) -> dict[str, Any]:
    (elites,) = example.elites
    return {
        # A copy: search goes on to change the example's.
        "prices": torch.from_numpy(example.score.copy()),
        "layout": torch.from_numpy(elites.layout),
        "sequence": torch.from_numpy(elites.sequence),
        "row": torch.from_numpy(elites.row),
        "score": torch.from_numpy(elites.score),
    }


def _restore(example: Example, found: dict[str, Any] | None) -> None:
    if found is None:
        return
    example.score[:] = found["prices"].numpy()
    example.elites[:] = [
        Priced(
            layout=found["layout"].numpy(),
            sequence=found["sequence"].numpy(),
            row=found["row"].numpy(),
            score=found["score"].numpy(),
        )
    ]
