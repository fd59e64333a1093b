"""Train the Piper policy on random tasks.

python -m policies.piper.training --out runs/piper [--settings FILE.json]

A run is a folder: ``config.json`` (settings), ``checkpoint/``, TensorBoard events and,
at the end, ``policy/``. Calling it again goes on where it stopped.
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
from policies.piper.learning import (
    WORST,
    Lesson,
    draw_lessons,
    imitation_loss,
    set_loss,
    time_loss,
)
from policies.piper.network import NetworkConfig, PiperNetwork, batch_of
from policies.piper.saved import SavedPiperPolicy, save_policy
from policies.piper.solver import SearchConfig, best_by_network
from policies.piper.worlds import PiperWorld
from policies.run_folder import describe_run
from policies.stepwise import Steps, StepwiseRun, drawn, run_from_shell

__all__ = ["TrainConfig", "Validation", "main", "train"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of a training run.

    Attributes:
        seed: Of everything that is drawn.
        steps: Of the optimiser.
        tasks: That a step learns from.
        judged: Of these, whose sets of cuts are drawn and judged.
        samples: Sets of cuts drawn of each.
        fewest: Suffixes kept, at least.
        most: Suffixes kept, at most; how many is drawn anew each time.
        set_weight: How much slopes by drawn sets count, against those by the time.
        imitation_weight: How much those by the best pipeline's cuts do.
        pool: Tasks to train on.
        validation: Tasks to validate on.
        every: Steps between validations.
        rate: Of learning at first; it falls to nothing along a cosine.
        decay: Of weights.
        network: Sizes.
        world: What tasks are drawn from.
    """

    seed: int = 0
    steps: int = 12000
    tasks: int = 16
    judged: int = 1
    samples: int = 4
    fewest: int = 8
    most: int = 96
    set_weight: float = 1.0
    imitation_weight: float = 0.1
    pool: int = 4000
    validation: int = 100
    every: int = 1000
    rate: float = 3e-3
    decay: float = 3e-2
    network: NetworkConfig = field(default_factory=NetworkConfig)
    world: PiperWorld = field(default_factory=PiperWorld)

    def __post_init__(self) -> None:
        counts = (self.steps, self.tasks, self.pool, self.validation, self.every)
        if min(counts) < 1 or not 0 <= self.judged <= self.tasks or self.samples < 2:
            raise StrategyError(
                f"steps, tasks, pool, validation, every = {counts} are at least 1, "
                f"judged={self.judged} is at most tasks={self.tasks}, samples="
                f"{self.samples} at least 2"
            )
        if not 1 <= self.fewest <= self.most:
            raise StrategyError(
                f"fewest={self.fewest} is at least 1, most={self.most} not below it"
            )
        if min(self.set_weight, self.imitation_weight, self.decay) < 0:
            raise StrategyError(
                f"set_weight={self.set_weight}, imitation_weight="
                f"{self.imitation_weight}, decay={self.decay}; none is negative"
            )
        if not self.rate > 0:
            raise StrategyError(f"rate={self.rate}; must be above 0")


class Validation:
    """Judges networks on tasks that none is trained on.

    Args:
        count: Of tasks.
        world: What they are drawn from.
        search: How each is planned.
    """

    def __init__(
        self, count: int, world: PiperWorld, search: SearchConfig | None = None
    ) -> None:
        self._lessons = draw_lessons(count, "validation", world)
        self._search = search or SearchConfig()

    def gain(self, network: PiperNetwork) -> float:
        """Mean log of the best time known over the network's; 0 is as good as known."""
        gains = []
        for lesson in self._lessons:
            plan = best_by_network(network, lesson.task, search=self._search)
            ratio = plan.time_per_sample / lesson.best
            gains.append(-min(float(np.log(ratio)), WORST))
        return float(np.mean(gains))


def _step(
    run: StepwiseRun,
    network: PiperNetwork,
    lessons: Sequence[Lesson],
    config: TrainConfig,
) -> dict[str, float]:
    """The slopes of one step; rewards of sets, and the losses of the others."""
    rng = np.random.default_rng([config.seed, run.done])
    chosen = [lessons[i] for i in drawn(len(lessons), config.tasks, rng)]
    span = np.log([config.fewest, config.most + 1])
    kept = [int(np.exp(rng.uniform(*span))) for _ in chosen]
    scores, times = network(batch_of([lesson.seen for lesson in chosen]))
    late = time_loss(chosen, times)
    missed = sum(
        (imitation_loss(*one) for one in zip(chosen, scores, kept, strict=True)),
        start=late.new_zeros(()),
    ) / len(chosen)
    loss, rewards = late + config.imitation_weight * missed, []
    for lesson, row, some in list(zip(chosen, scores, kept, strict=True))[
        : config.judged
    ]:
        slope, reward = set_loss(
            lesson, row, samples=config.samples, kept=some, rng=rng
        )
        loss = loss + config.set_weight / config.tasks * slope
        rewards.append(reward)
    torch.autograd.backward(loss)
    return {
        "reward": float(np.mean(rewards)) if rewards else 0.0,
        "time_loss": float(late.detach()),
        "imitation_loss": float(missed.detach()),
    }


def train(
    config: TrainConfig,
    folder: str | Path,
    *,
    watch: Callable[[int, float, float, float, float], None] | None = None,
    stop_after: int | None = None,
) -> SavedPiperPolicy:
    """Train, or go on with a run that was stopped.

    Args:
        config: Settings; those of a run that is gone on with must be the same.
        folder: Of the run, made if it is not there.
        watch: Told of steps done, of the last ones' mean reward by sets and losses by
            time and by imitation, and of validation's gain.
        stop_after: Steps after which to stop, to be gone on with later.

    Returns:
        The policy, also in ``policy/``.

    Raises:
        StrategyError: If the folder holds a run of other settings.
    """
    run = Path(folder)
    describe_run(config, run)
    torch.manual_seed(config.seed)
    network = PiperNetwork(config.network)
    optimiser = torch.optim.AdamW(
        network.parameters(), lr=config.rate, weight_decay=config.decay
    )
    state = StepwiseRun(network=network, optimiser=optimiser)
    validation = Validation(config.validation, config.world)
    state.begin(run, lambda: validation.gain(network))
    lessons = draw_lessons(config.pool, "train", config.world)
    state.go(
        run,
        Steps(
            count=config.steps,
            every=config.every,
            rate=config.rate,
            # What is found is bracketed: a network that expects wrong times costs
            # time, which validation does not see.
            keep_last=True,
            stop_after=stop_after,
        ),
        step=lambda: _step(state, network, lessons, config),
        gain=lambda: validation.gain(network),
        watch=watch,
    )
    made = SavedPiperPolicy(network=network.eval(), notes=_notes(config, state))
    save_policy(made, run / "policy")
    return made


def _notes(config: TrainConfig, state: StepwiseRun) -> dict[str, Any]:
    """What the weights' own description says of the run."""
    return {
        "trained_on": {"seed": config.seed, "tasks": config.pool, "steps": state.done},
        "validated_on": {
            "tasks": config.validation,
            "gain_over_best_known": round(state.best_gain, 5),
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


def _tell(done: int, reward: float, late: float, missed: float, gain: float) -> None:
    _log.info(
        "step %d: sets %.4f, time %.4f, imitation %.4f, validation %.5f",
        done,
        reward,
        late,
        missed,
        gain,
    )


if __name__ == "__main__":
    raise SystemExit(main())
