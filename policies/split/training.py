"""Train the split policy: REINFORCE over orders and moves in random tasks.

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
from planner.split import Groups, Split, best_along, best_linear
from planner.split.task import Array, Index
from policies.run_folder import describe_run, read_settings
from policies.split.features import Observation, observe
from policies.split.moves import sample_moves
from policies.split.network import NetworkConfig, SplitNetwork, batch_of
from policies.split.orders import sample_orders
from policies.split.saved import SavedSplitPolicy, save_policy
from policies.split.solver import SearchConfig, best_by_network
from policies.split.standing import STANDING, stand
from policies.split.worlds import WorldConfig, draw_groups

__all__ = ["TrainConfig", "Validation", "credit", "main", "train"]

_WORST = 1.5  # times the load along standard orders: what is worse counts as this

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of a training run.

    Attributes:
        seed: Of everything that is drawn.
        steps: Of the optimiser.
        tasks: In a step.
        samples: Orders by each head of a task.
        moved: Orders by moves from a task's split.
        order_weight: How much slopes by orders count, against those by moves: an
            order is as many draws as there are groups, and its slope as noisy.
        again: How often moves start from a fresh split rather than the best so far.
        pool: Tasks to train on.
        validation: Tasks to validate on.
        every: Steps between validations.
        rate: Of learning at first; it falls to nothing along a cosine.
        best_share: How much an order's part in the best of its task counts, against
            what it is on the mean of its head.
        network: Sizes.
        world: What tasks are drawn from.
    """

    seed: int = 0
    steps: int = 2000
    tasks: int = 16
    samples: int = 2
    moved: int = 24
    order_weight: float = 0.1
    again: float = 0.15
    pool: int = 2048
    validation: int = 96
    every: int = 100
    rate: float = 1e-3
    best_share: float = 0.5
    network: NetworkConfig = field(default_factory=NetworkConfig)
    world: WorldConfig = field(default_factory=WorldConfig)

    def __post_init__(self) -> None:
        counts = (self.steps, self.tasks, self.pool, self.validation, self.every)
        if min(counts) < 1 or self.samples < 2 or not self.rate > 0:
            raise StrategyError(
                f"steps, tasks, pool, validation, every = {counts} are at least 1, "
                f"samples={self.samples} at least 2, rate={self.rate} above 0"
            )
        shares = (self.best_share, self.again)
        if not 0 <= min(shares) <= max(shares) <= 1 or self.moved < 2:
            raise StrategyError(
                f"best_share, again = {shares} are between 0 and 1, moved="
                f"{self.moved} at least 2"
            )


@dataclass(slots=True, kw_only=True, eq=False)
class _Lesson:
    """A task to learn from.

    Attributes:
        groups: What it is.
        seen: What is seen of it.
        load_ms: Along standard orders.
        order: Of the split that moves start from.
        split: That split; None before there is one.
    """

    groups: Groups
    seen: Observation
    load_ms: float
    order: Index
    split: Split | None = None


def _lessons(count: int, part: str, world: WorldConfig) -> list[_Lesson]:
    found = []
    for groups in draw_groups(0, count, part, world):
        split = best_linear(groups)
        if split is not None:
            lesson = _Lesson(
                groups=groups,
                seen=observe(groups),
                load_ms=split.load_ms,
                order=np.arange(0),
            )
            found.append(lesson)
    return found


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
        self._lessons = _lessons(count, "validation", world)
        self._search = search or SearchConfig(rounds=6, patience=6)

    def gain(self, network: SplitNetwork) -> float:
        """Mean log of the load along standard orders over that of the network's."""
        gains = []
        for lesson in self._lessons:
            split = best_by_network(network, lesson.groups, search=self._search)
            load = _WORST * lesson.load_ms if split is None else split.load_ms
            gains.append(np.log(lesson.load_ms / load))
        return float(np.mean(gains))


def credit(rewards: Array, best_share: float) -> Array:
    """How much more likely each order of a task should become.

    One part is the reward over the mean of the same head's other orders; the other is
    what the best reward of all would lose without the order, which makes the heads
    differ. Both have the expectation of a gradient: of the mean, and of the best.

    Args:
        rewards: Shape [heads, samples], 2 samples at least.
        best_share: Weight of the second part, 0 to 1.

    Returns:
        Shape [heads, samples], about 1 in size where rewards differ.
    """
    samples = rewards.shape[1]
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / (samples - 1)
    flat = np.sort(rewards, axis=None)
    alone = np.where(rewards == flat[-1], flat[-1] - flat[-2], 0.0)
    mixed = (1 - best_share) * (rewards - others) + best_share * rewards.size * alone
    spread = float(rewards.std()) + 1e-2
    found: Array = mixed / spread
    return found


def _practise(
    lesson: _Lesson, scores: Array, config: TrainConfig, rng: np.random.Generator
) -> tuple[Array, float]:
    """Slope of the task's objective by scores of orders [heads, m]; mean reward.

    The split of the best order is left to the lesson if it has none or is to have a
    fresh one.
    """
    heads = len(scores)
    orders, slopes = sample_orders(
        lesson.groups, np.repeat(scores, config.samples, axis=0), rng
    )
    if rng.random() < config.again:
        lesson.split = None
    fresh = lesson.split is None
    bound = _WORST * lesson.load_ms
    rewards = np.full(len(orders), -np.log(_WORST))
    for row, order in enumerate(orders):
        split = best_along(lesson.groups, order, bound, check=False)
        if split is None:
            continue
        rewards[row] = np.log(lesson.load_ms / split.load_ms)
        if fresh and rewards[row] == rewards.max():
            lesson.order, lesson.split = order, split
    wanted = credit(rewards.reshape(heads, config.samples), config.best_share)
    weighed = wanted.reshape(-1, 1) * slopes
    slope = weighed.reshape(heads, config.samples, -1).mean(axis=1)
    return slope, float(rewards.mean())


def _improve(
    lesson: _Lesson, scores: Array, config: TrainConfig, rng: np.random.Generator
) -> tuple[Array, float]:
    """Slope of the task's objective by scores of moves [m, 2]; the gain it brought.

    The lesson's split becomes the best that was met.
    """
    if lesson.split is None:
        return np.zeros_like(scores), 0.0
    orders, slopes = sample_moves(
        lesson.groups, lesson.order, scores, config.moved, rng
    )
    start = lesson.split.load_ms
    rewards = np.zeros(config.moved)
    for row, order in enumerate(orders):
        # What is no better is not looked at: it counts for nothing.
        split = best_along(lesson.groups, order, start, check=False)
        if split is None:
            continue
        rewards[row] = np.log(start / split.load_ms)
        if rewards[row] == rewards.max():
            lesson.order, lesson.split = order, split
    spread = float(rewards.std())
    if spread == 0.0:
        return np.zeros_like(scores), 0.0
    wanted = credit(rewards[None, :], config.best_share)[0] * 1e-2 / (spread + 1e-3)
    slope: Array = (wanted[:, None, None] * slopes).mean(axis=0)
    return slope, float(rewards.max())


def _standing(lesson: _Lesson) -> Array:
    if lesson.split is None:
        return np.zeros((len(lesson.groups), len(STANDING)), dtype=np.float32)
    return stand(lesson.groups, lesson.order, lesson.split)


def _step(
    network: SplitNetwork,
    optimiser: torch.optim.Optimizer,
    lessons: Sequence[_Lesson],
    config: TrainConfig,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """One step; returns the mean reward of orders, and what moves gained."""
    picked = rng.choice(len(lessons), min(config.tasks, len(lessons)), replace=False)
    chosen = [lessons[i] for i in picked]
    batch = batch_of([lesson.seen for lesson in chosen])
    ends = np.cumsum(batch.sizes)[:-1]
    encoded = network.encode(batch)
    scores = network.orders(batch, encoded)
    drawn = [
        _practise(lesson, part.T, config, rng)
        for lesson, part in zip(chosen, _parts(scores, ends), strict=True)
    ]
    standing = np.concatenate([_standing(lesson) for lesson in chosen])
    odds = network.moves(batch, encoded, torch.from_numpy(standing))
    moved = [
        _improve(lesson, part, config, rng)
        for lesson, part in zip(chosen, _parts(odds, ends), strict=True)
    ]
    by_order = np.concatenate([slope.T for slope, _ in drawn]) * config.order_weight
    by_move = np.concatenate([slope for slope, _ in moved])
    wanted = [
        -torch.from_numpy(slopes).float() / len(chosen) for slopes in (by_order, by_move)
    ]
    optimiser.zero_grad()
    torch.autograd.backward([scores, odds], wanted)
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimiser.step()
    return float(np.mean([r for _, r in drawn])), float(np.mean([r for _, r in moved]))


def _parts(scores: torch.Tensor, ends: Index) -> list[Array]:
    """Scores of each task. Shapes [m, k]."""
    return list(np.split(scores.detach().numpy().astype(np.float64), ends))


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
        watch: Told of steps done, of the last ones' mean reward by orders and gain by
            moves, and of validation's gain.
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
    optimiser = torch.optim.Adam(network.parameters(), lr=config.rate)
    state = _Run(network=network, optimiser=optimiser, best={})
    validation = Validation(config.validation, config.world)
    if (run / "checkpoint" / "run.pt").exists():
        state.load(run / "checkpoint")
    else:
        state.judge(validation.gain(network))
    lessons = _lessons(config.pool, "train", config.world)
    rewards: list[tuple[float, float]] = []
    with SummaryWriter(str(run / "events")) as events:
        while state.done < min(config.steps, stop_after or config.steps):
            rng = np.random.default_rng([config.seed, state.done])
            for part in optimiser.param_groups:
                part["lr"] = _rate(state.done, config)
            rewards.append(_step(network, optimiser, lessons, config, rng))
            state.done += 1
            if state.done % config.every and state.done < config.steps:
                continue
            gain = validation.gain(network)
            reward, moved = np.mean(rewards, axis=0).tolist()
            rewards.clear()
            state.judge(gain)
            state.save(run / "checkpoint")
            events.add_scalar("train/reward", reward, state.done)
            events.add_scalar("train/moves_gain", moved, state.done)
            events.add_scalar("validation/gain", gain, state.done)
            if watch is not None:
                watch(state.done, reward, moved, gain)
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
        _log.error("%s", error)  # noqa: TRY400 the line says it all
        return error.exit_code
    return 0


def _tell(done: int, reward: float, moved: float, gain: float) -> None:
    _log.info(
        "step %d: orders %.4f, moves %.5f, validation %.5f", done, reward, moved, gain
    )


if __name__ == "__main__":
    raise SystemExit(main())
