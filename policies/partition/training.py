"""Train the partitioner's network, from nothing or from weights.

A run is a folder: ``config.json`` (all settings and versions), ``checkpoint.pt``,
``progress.jsonl``, ``board/`` (for TensorBoard), ``graphs/`` (models that were read)
and, at the end, ``policy/``. The same call resumes it where it stopped. Without a limit
of minutes the same settings give the same weights, with any number of processes and
whether or not the run was interrupted.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from planner import __version__
from planner.errors import StrategyError
from planner.schema import write_atomically
from policies.partition.examples import Example, ExampleStore, Preparer
from policies.partition.learning import Judged, judge, orders_matter, study
from policies.partition.network import (
    PartitionNetwork,
    SavedNetwork,
    load_network,
    save_network,
)
from policies.partition.settings import PartitionTrainConfig, worlds_of
from policies.run_folder import RunLog, describe_run

__all__ = [
    "Learner",
    "Watch",
    "WatchedStep",
    "new_learner",
    "read_state",
    "train_partition",
    "write_state",
]


_FILE = "checkpoint.pt"
#: Errors of reading a file that is cut off, or holds something else.
_DAMAGED = (
    OSError,
    EOFError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


@dataclass(eq=False, slots=True, kw_only=True)
class Learner:
    """A network in training.

    Attributes:
        network: Current network.
        optimizer: Its optimizer.
        step: Steps done.
        seconds: Time spent on them.
        best: Best weights by validation; None before the first validation.
        best_value: Their :attr:`policies.partition.learning.Judged.value`.
        best_step: Steps after which they were reached.
        best_figures: Result of their validation.
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
        """Keep the weights if they are the best so far."""
        if self.best is not None and judged.value <= self.best_value:
            return
        self.best = deepcopy(self.network.state_dict())
        self.best_value, self.best_step = judged.value, self.step
        self.best_figures = judged.as_data()

    def best_network(self) -> PartitionNetwork:
        """Return the network with the best weights."""
        made = PartitionNetwork(self.network.config)
        made.load_state_dict(self.best or self.network.state_dict())
        return made.eval()


def new_learner(config: PartitionTrainConfig, start: SavedNetwork | None) -> Learner:
    """Make a learner at step 0.

    Args:
        config: Sizes and seed of a new network.
        start: Weights to begin with, of any sizes; None for a new network.
    """
    if start is None:
        # The random numbers of the process stay as if there were no training.
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


def write_state(folder: Path, learner: Learner, store: ExampleStore) -> None:
    """Write a checkpoint; if killed meanwhile, the one before stays."""
    state = {
        "network": learner.network.state_dict(),
        "optimizer": learner.optimizer.state_dict(),
        "step": learner.step,
        "seconds": learner.seconds,
        "best": learner.best,
        "best_value": learner.best_value,
        "best_step": learner.best_step,
        "best_figures": learner.best_figures,
        "examples": store.state(),
    }
    written = io.BytesIO()
    torch.save(state, written)
    write_atomically(folder / _FILE, written.getvalue())


def read_state(folder: Path, learner: Learner, store: ExampleStore) -> None:
    """Restore the folder's checkpoint, if there is one.

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
        learner.step, learner.seconds = int(state["step"]), float(state["seconds"])
        learner.best, learner.best_value = state["best"], state["best_value"]
        learner.best_step = state["best_step"]
        learner.best_figures = state["best_figures"]
        # Older runs call them lessons.
        store.restore(state.get("examples") or state["lessons"])
    except _DAMAGED as error:
        raise StrategyError(
            f"{path} is damaged ({' '.join(str(error).split())[:120]}); remove it, and "
            f"the run begins anew"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedStep:
    """State of a run after a step.

    Attributes:
        step: Steps done.
        steps: Steps in all, unless minutes end it before.
        examples: Examples that are kept.
        loss: Mean over the examples of the step.
        judged: Result of a validation after this step, if there was one.
        best: Step after which validation was best.
    """

    step: int
    steps: int
    examples: int
    loss: float
    judged: Judged | None
    best: int


#: Called after each step.
Watch = Callable[[WatchedStep], None]


def train_partition(
    config: PartitionTrainConfig,
    out: str | Path,
    *,
    watch: Watch | None = None,
    workers: int = 1,
    ray: str | None = None,
) -> SavedNetwork:
    """Train, or resume a run.

    Args:
        config: Settings; the same ones to resume a run.
        out: Folder of the run, made if it does not exist.
        watch: Called after each step.
        workers: Processes; all but one prepare examples.
        ray: Address of a Ray cluster whose CPUs prepare them instead; ``"auto"`` for
            the one that this machine belongs to, ``"local"`` for one started here.
    Returns:
        The network that is best on the validation worlds, also in ``policy/``.
    Raises:
        StrategyError: If the folder holds a run of other settings, or no world gives an
            example.
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
        Preparer(config, run / "graphs", workers - 1, ray) as preparer,
        _Run(config, run, preparer, start, watch) as training,
    ):
        return training.finish()


class _Run:
    """A run in progress."""

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
        self._store = ExampleStore(config, preparer)
        self._learner = new_learner(config, start)
        read_state(folder, self._learner, self._store)
        self._board = SummaryWriter(
            str(folder / "board"), purge_step=self._learner.step + 1
        )

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._board.close()

    def _share(self) -> float:
        """Share of the run that is done, between 0 and 1."""
        done = self._learner.step / self._config.steps
        if self._config.minutes is not None:
            done = max(done, self._learner.seconds / (60 * self._config.minutes))
        return min(done, 1.0)

    def finish(self) -> SavedNetwork:
        """Train to the end."""
        if self._share() < 1.0:
            examples = self._validation_examples()
            self._train(examples)
        policy = self._folder / "policy"
        network = self._learner.best_network()
        save_network(network, self._notes(), policy)
        return load_network(policy)

    def _validation_examples(self) -> list[Example]:
        count = self._config.validation_count
        self._preparer.ask("validation", range(count))
        found = []
        for index in range(count):
            self._preparer.ask("validation", range(index, count))
            found.append(self._preparer.take("validation", index))
        examples = [one for one in found if one is not None]
        if not examples:
            raise StrategyError(
                f"none of {count} validation worlds gave an example; nothing fits on "
                f"them, give other clusters or models"
            )
        return examples

    def _train(self, validation: list[Example]) -> None:
        learner, config = self._learner, self._config
        while (share := self._share()) < 1.0:
            began = time.perf_counter()
            self._store.grow(learner.step)
            loss = self._step(share)
            learner.step += 1
            learner.seconds += time.perf_counter() - began
            done = self._share() >= 1.0
            judged = None
            if done or learner.step % config.evaluate_every == 0:
                judged = self._judge(validation)
            if done or learner.step % config.checkpoint_every == 0:
                write_state(self._folder, learner, self._store)
            if self._watch is not None:
                self._watch(
                    WatchedStep(
                        step=learner.step,
                        steps=config.steps,
                        examples=len(self._store),
                        loss=loss,
                        judged=judged,
                        best=learner.best_step,
                    )
                )

    def _step(self, share: float) -> float:
        """Take one step of the optimizer on a few examples."""
        config, learner, board = self._config, self._learner, self._board
        # By seed and step alone, so that a resumed run draws the same.
        rng = np.random.default_rng([config.seed, learner.step])
        rate = config.last_rate + (config.first_rate - config.last_rate) * (1 - share)
        for group in learner.optimizer.param_groups:
            group["lr"] = rate
        learner.optimizer.zero_grad()
        examples = self._store.draw(rng)
        learned = []
        for example in examples:
            orders = orders_matter(example)
            one = study(learner.network, example, config.learning, rng, orders=orders)
            (one.loss / len(examples)).backward()  # type: ignore[no-untyped-call]
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

    def _judge(self, validation: list[Example]) -> Judged:
        """Validate, keep the network if it is the best so far, and log the result."""
        learner = self._learner
        began = time.perf_counter()
        judged = judge(learner.network, validation, self._config.learning)
        learner.seconds += time.perf_counter() - began
        learner.keep_if_best(judged)
        RunLog(self._folder).write(
            step=learner.step,
            minutes=round(learner.seconds / 60, 2),
            examples=len(self._store),
            worlds=self._store.worlds,
            best_step=learner.best_step,
            **judged.as_data(),
        )
        for name, value in judged.as_data().items():
            self._board.add_scalar(f"validation/{name}", value, learner.step)
        self._board.add_scalar("train/examples", len(self._store), learner.step)
        self._board.flush()
        return judged

    def _notes(self) -> dict[str, Any]:
        """Notes on the run for the description of the weights."""
        config, learner = self._config, self._learner
        trained: dict[str, Any] = {"kinds": list(config.kinds)}
        if config.own:
            trained = {"clusters": list(config.clusters), "models": list(config.models)}
        return {
            "trained_on": {
                **trained,
                "seed": config.seed,
                "worlds": self._store.worlds,
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
