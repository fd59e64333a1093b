"""Train the split policy on random tasks.

python -m policies.split.training --out runs/split [--settings FILE.json]

A run is a folder: ``config.json`` (settings), ``checkpoint/``, TensorBoard events and,
at the end, ``policy/``. Calling it again goes on where it stopped. What a step draws
depends on its number alone, so that a run that was stopped ends as one that was not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from planner.errors import StrategyError
from policies.run_folder import describe_run
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
from policies.stepwise import Steps, StepwiseRun, drawn, run_from_shell

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


def _examples(lessons: Sequence[Lesson]) -> list[tuple[Observation, Hits]]:
    return [(lesson.seen, hits) for lesson in lessons for hits in lesson.hits]


def _step(
    run: StepwiseRun,
    network: SplitNetwork,
    lessons: Sequence[Lesson],
    config: TrainConfig,
) -> dict[str, float]:
    """The slopes of one step; the mean reward of orders, and the loss by hits."""
    rng = np.random.default_rng([config.seed, run.done])
    chosen = [lessons[i] for i in drawn(len(lessons), config.tasks, rng)]
    batch = batch_of([lesson.seen for lesson in chosen])
    scores = network.orders(batch, network.encode(batch))
    parts = batch.each(scores.detach().double())
    found = [
        order_slopes(
            lesson,
            part.numpy().T,
            samples=config.samples,
            best_share=config.best_share,
            rng=rng,
        )
        for lesson, part in zip(chosen, parts, strict=True)
    ]
    slopes = np.concatenate([slope.T for slope, _ in found]) / len(chosen)
    wanted = torch.from_numpy(-config.order_weight * slopes).float()
    torch.autograd.backward(scores, wanted)
    loss, examples = 0.0, _examples(lessons)
    if examples:
        picked = [examples[i] for i in drawn(len(examples), config.examples, rng)]
        missed = hits_loss(network, picked)
        torch.autograd.backward(missed)
        loss = float(missed.detach())
    return {"reward": float(np.mean([r for _, r in found])), "hits_loss": loss}


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
    state = StepwiseRun(network=network, optimiser=optimiser)
    validation = Validation(config.validation, config.world)
    state.begin(run, lambda: validation.gain(network))
    lessons = draw_lessons(
        config.pool,
        "train",
        config.world,
        seed=config.seed,
        splits=config.splits,
        tries=config.tries,
    )
    state.go(
        run,
        Steps(
            count=config.steps,
            every=config.every,
            rate=config.rate,
            stop_after=stop_after,
        ),
        step=lambda: _step(state, network, lessons, config),
        gain=lambda: validation.gain(network),
        watch=watch,
    )
    made = SavedSplitPolicy(network=network.eval(), notes=_notes(config, state))
    save_policy(made, run / "policy")
    return made


def _notes(config: TrainConfig, state: StepwiseRun) -> dict[str, Any]:
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
    return run_from_shell(
        arguments,
        __doc__,
        TrainConfig(),
        lambda config, out: train(config, out, watch=_tell),
        _log,
    )


def _tell(done: int, reward: float, loss: float, gain: float) -> None:
    _log.info(
        "step %d: orders %.4f, hits %.4f, validation %.5f", done, reward, loss, gain
    )


if __name__ == "__main__":
    raise SystemExit(main())
