"""What a training run learns, and its checkpoints."""

from __future__ import annotations

import io
import pickle
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.errors import StrategyError
from planner.schema import write_atomically
from policies.partition.book import LessonBook
from policies.partition.network import PartitionNetwork
from policies.partition.saved import SavedNetwork
from policies.partition.settings import PartitionTrainConfig
from policies.partition.validating import Judged

__all__ = ["Learner", "new_learner", "read_state", "write_state"]

_FILE = "checkpoint.pt"


@dataclass(eq=False, slots=True, kw_only=True)
class Learner:
    """A network that learns.

    Attributes:
        network: As it is now.
        optimizer: Of it.
        step: Steps done.
        seconds: Spent on them.
        best: Weights that validation found most of; None before the first one.
        best_value: See :attr:`policies.partition.validating.Judged.value`.
        best_step: Steps after which they were reached.
        best_figures: What validation found of them.
    """

    network: PartitionNetwork
    optimizer: torch.optim.Adam
    step: int = 0
    seconds: float = 0.0
    best: dict[str, Tensor] | None = None
    best_value: float = float("-inf")
    best_step: int = 0
    best_figures: dict[str, float] = field(default_factory=dict)

    def keep_if_best(self, judged: Judged) -> None:
        """Keep the weights if no others were validated as better."""
        if self.best is not None and judged.value <= self.best_value:
            return
        self.best = deepcopy(self.network.state_dict())
        self.best_value, self.best_step = judged.value, self.step
        self.best_figures = judged.as_data()

    def best_network(self) -> PartitionNetwork:
        """The network with the best weights."""
        made = PartitionNetwork(self.network.config)
        made.load_state_dict(self.best or self.network.state_dict())
        return made.eval()


def new_learner(config: PartitionTrainConfig, start: SavedNetwork | None) -> Learner:
    """A learner at step 0.

    Args:
        config: Sizes and seed of a network that begins anew.
        start: Weights to begin with, of whatever sizes they are.
    """
    if start is None:
        # The process's own random numbers go on as if there were no training.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            network = PartitionNetwork(config.network)
    else:
        network = PartitionNetwork(start.network.config)
        network.load_state_dict(start.network.state_dict())
    return Learner(
        network=network.train(),
        optimizer=torch.optim.Adam(network.parameters(), lr=config.first_rate),
    )


def write_state(folder: Path, learner: Learner, book: LessonBook) -> None:
    """Write a checkpoint; a run that is killed meanwhile keeps the one before."""
    state = {
        "network": learner.network.state_dict(),
        "optimizer": learner.optimizer.state_dict(),
        "step": learner.step,
        "seconds": learner.seconds,
        "best": learner.best,
        "best_value": learner.best_value,
        "best_step": learner.best_step,
        "best_figures": learner.best_figures,
        "lessons": book.state(),
    }
    written = io.BytesIO()
    torch.save(state, written)
    write_atomically(folder / _FILE, written.getvalue())


def read_state(folder: Path, learner: Learner, book: LessonBook) -> None:
    """Go on from the folder's checkpoint; nothing happens if there is none.

    Raises:
        StrategyError: If it is damaged.
    """
    path = folder / _FILE
    if not path.exists():
        return
    try:
        # Tensors and plain values alone: a checkpoint cannot run code.
        state: dict[str, Any] = torch.load(path, weights_only=True)
        learner.network.load_state_dict(state["network"])
        learner.optimizer.load_state_dict(state["optimizer"])
        learner.step, learner.seconds = state["step"], state["seconds"]
        learner.best, learner.best_value = state["best"], state["best_value"]
        learner.best_step = state["best_step"]
        learner.best_figures = state["best_figures"]
        book.restore(state["lessons"])
    except (OSError, EOFError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        raise StrategyError(
            f"{path} is damaged ({' '.join(str(error).split())[:120]}); remove it, and "
            f"the run begins anew"
        ) from error
