"""Train the split policy on random tasks.

python -m policies.split.training --out runs/split [--settings FILE.json]

A run is a folder: ``config.json`` (settings), ``checkpoint/``, TensorBoard events and,
at the end, ``policy/``. Calling it again goes on where it stopped. What a step draws
depends on its number alone, so that a run that was stopped ends as one that was not.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from planner.errors import MeshwrightError, StrategyError
from planner.schema import write_atomically
from policies.run_folder import describe_run, read_settings
from policies.split.features import Observation
from policies.split.hits import Hits
from policies.split.learning import (
    WORST,
    Lesson,
    draw_lessons,
    hits_loss,
    order_slopes,
)
from policies.split.network import NetworkConfig, SplitNetwork, batch_of
from policies.split.saved import SavedSplitPolicy, save_policy
from policies.split.solver import SearchConfig, best_by_network
from policies.split.worlds import WorldConfig

__all__ = ["TrainConfig", "Validation", "main", "train"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of a training run.

    Attributes:
        seed: Of everything that is drawn.
        steps: Of the optimiser.
        tasks: Whose orders a step learns from.
        samples: Orders by each head of a task.
        order_weight: How much slopes by orders count, against those by moves: an
            order is as many draws as there are groups, and its slope as noisy.
        best_share: How much an order's part in the best of its task counts, against
            what it is on the mean of its head.
        examples: Splits whose hits a step learns from.
        splits: Most splits of a task that hits are looked for from.
        tries: Orders looked at for each.
        pool: Tasks to train on.
        validation: Tasks to validate on.
        every: Steps between validations.
        rate: Of learning at first; it falls to nothing along a cosine.
        decay: Of weights.
        network: Sizes.
        world: What tasks are drawn from.
    """

    seed: int = 0
    steps: int = 1000
    tasks: int = 8
    samples: int = 2
    order_weight: float = 0.1
    best_share: float = 0.5
    examples: int = 24
    splits: int = 3
    tries: int = 96
    pool: int = 4000
    validation: int = 128
    every: int = 100
    rate: float = 1.5e-3
    decay: float = 3e-2
    network: NetworkConfig = field(default_factory=NetworkConfig)
    world: WorldConfig = field(default_factory=WorldConfig)

    def __post_init__(self) -> None:
        counts = (self.steps, self.tasks, self.examples, self.splits, self.tries)
        sizes = (self.pool, self.validation, self.every)
        if min(*counts, *sizes) < 1 or self.samples < 2:
            raise StrategyError(
                f"steps, tasks, examples, splits, tries = {counts}, pool, validation, "
                f"every = {sizes} are at least 1, samples={self.samples} at least 2"
            )
        if not 0 <= self.best_share <= 1 or min(self.order_weight, self.decay) < 0:
            raise StrategyError(
                f"best_share={self.best_share} is between 0 and 1, order_weight="
                f"{self.order_weight} and decay={self.decay} are not negative"
            )
        if not self.rate > 0:
            raise StrategyError(f"rate={self.rate}; must be above 0")


class Validation:
    """Judges networks on tasks that none is trained on.

    Args:
        count: Of tasks.
        world: What they are drawn from.
        search: How each is solved; so many orders and no more.
    """

    def __init__(
        self, count: int, world: WorldConfig, search: SearchConfig | None = None
    ) -> None:
        self._lessons = draw_lessons(count, "validation", world)
        self._search = search or SearchConfig(rounds=6, patience=6)

    def gain(self, network: SplitNetwork) -> float:
        """Mean log of the load along standard orders over that of the network's."""
        gains = []
        for lesson in self._lessons:
            split = best_by_network(network, lesson.groups, search=self._search)
            load = WORST * lesson.load_ms if split is None else split.load_ms
            gains.append(np.log(lesson.load_ms / load))
        return float(np.mean(gains))


@dataclass(slots=True, kw_only=True)
class _Run:
    """Where a run stands."""

    network: SplitNetwork
    optimiser: torch.optim.Optimizer
    best: dict[str, torch.Tensor]
    best_gain: float = -np.inf
    done: int = 0

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "next.pt"
        torch.save(
            {
                "network": self.network.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "best": self.best,
                "best_gain": self.best_gain,
                "done": self.done,
            },
            path,
        )
        write_atomically(folder / "run.pt", path.read_bytes())
        path.unlink()

    def load(self, folder: Path) -> None:
        held: dict[str, Any] = torch.load(folder / "run.pt", weights_only=True)
        self.network.load_state_dict(held["network"])
        self.optimiser.load_state_dict(held["optimiser"])
        self.best, self.best_gain = held["best"], float(held["best_gain"])
        self.done = int(held["done"])

    def judge(self, gain: float) -> None:
        if gain > self.best_gain:
            self.best_gain = gain
            state = self.network.state_dict()
            self.best = {name: part.clone() for name, part in state.items()}


def _rate(step: int, config: TrainConfig) -> float:
    return config.rate * 0.5 * (1 + float(np.cos(np.pi * step / config.steps)))


def _examples(lessons: Sequence[Lesson]) -> list[tuple[Observation, Hits]]:
    return [(lesson.seen, hits) for lesson in lessons for hits in lesson.hits]


def _drawn(count: int, most: int, rng: np.random.Generator) -> list[int]:
    """Some of the numbers below ``count``, each once."""
    found: list[int] = rng.choice(count, min(count, most), replace=False).tolist()
    return found


def _step(
    run: _Run, lessons: Sequence[Lesson], config: TrainConfig
) -> tuple[float, float]:
    """One step; returns the mean reward of orders, and the loss by hits."""
    rng = np.random.default_rng([config.seed, run.done])
    network = run.network
    chosen = [lessons[i] for i in _drawn(len(lessons), config.tasks, rng)]
    batch = batch_of([lesson.seen for lesson in chosen])
    scores = network.orders(batch, network.encode(batch))
    parts = batch.each(scores.detach().double())
    drawn = [
        order_slopes(
            lesson,
            part.numpy().T,
            samples=config.samples,
            best_share=config.best_share,
            rng=rng,
        )
        for lesson, part in zip(chosen, parts, strict=True)
    ]
    slopes = np.concatenate([slope.T for slope, _ in drawn]) / len(chosen)
    wanted = torch.from_numpy(-config.order_weight * slopes).float()
    run.optimiser.zero_grad()
    torch.autograd.backward(scores, wanted)
    loss, examples = 0.0, _examples(lessons)
    if examples:
        picked = [examples[i] for i in _drawn(len(examples), config.examples, rng)]
        missed = hits_loss(network, picked)
        torch.autograd.backward(missed)
        loss = float(missed.detach())
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    run.optimiser.step()
    run.done += 1
    return float(np.mean([reward for _, reward in drawn])), loss


def train(
    config: TrainConfig,
    folder: str | Path,
    *,
    watch: Callable[[int, float, float, float], None] | None = None,
    stop_after: int | None = None,
) -> SavedSplitPolicy:
    """Train, or go on with a run that was stopped.

    Args:
        config: Settings; those of a run that is gone on with must be the same.
        folder: Of the run, made if it is not there.
        watch: Told of steps done, of the last ones' mean reward by orders and loss by
            hits, and of validation's gain.
        stop_after: Steps after which to stop, to be gone on with later.

    Returns:
        The policy that is best on the validation tasks, also in ``policy/``.

    Raises:
        StrategyError: If the folder holds a run of other settings.
    """
    run = Path(folder)
    describe_run(config, run)
    torch.manual_seed(config.seed)
    network = SplitNetwork(config.network)
    optimiser = torch.optim.AdamW(
        network.parameters(), lr=config.rate, weight_decay=config.decay
    )
    state = _Run(network=network, optimiser=optimiser, best={})
    validation = Validation(config.validation, config.world)
    if (run / "checkpoint" / "run.pt").exists():
        state.load(run / "checkpoint")
    else:
        state.judge(validation.gain(network))
    lessons = draw_lessons(
        config.pool,
        "train",
        config.world,
        seed=config.seed,
        splits=config.splits,
        tries=config.tries,
    )
    told: list[tuple[float, float]] = []
    with SummaryWriter(str(run / "events")) as events:
        while state.done < min(config.steps, stop_after or config.steps):
            for part in optimiser.param_groups:
                part["lr"] = _rate(state.done, config)
            told.append(_step(state, lessons, config))
            if state.done % config.every and state.done < config.steps:
                continue
            gain = validation.gain(network)
            reward, loss = np.mean(told, axis=0).tolist()
            told.clear()
            state.judge(gain)
            state.save(run / "checkpoint")
            events.add_scalar("train/reward", reward, state.done)
            events.add_scalar("train/hits_loss", loss, state.done)
            events.add_scalar("validation/gain", gain, state.done)
            if watch is not None:
                watch(state.done, reward, loss, gain)
    network.load_state_dict(state.best)
    made = SavedSplitPolicy(network=network.eval(), notes=_notes(config, state))
    save_policy(made, run / "policy")
    return made


def _notes(config: TrainConfig, state: _Run) -> dict[str, Any]:
    """What the weights' own description says of the run."""
    return {
        "trained_on": {"seed": config.seed, "tasks": config.pool, "steps": state.done},
        "validated_on": {
            "tasks": config.validation,
            "gain_over_standard_orders": round(state.best_gain, 5),
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """Train from the command line; the exit code of the error if an input is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--settings", metavar="FILE.json")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    try:
        config = TrainConfig()
        if options.settings:
            config = read_settings(options.settings, config)
        train(config, options.out, watch=_tell)
    except MeshwrightError as error:
        _log.error("%s", error)
        return error.exit_code
    return 0


def _tell(done: int, reward: float, loss: float, gain: float) -> None:
    _log.info(
        "step %d: orders %.4f, hits %.4f, validation %.5f", done, reward, loss, gain
    )


if __name__ == "__main__":
    raise SystemExit(main())
