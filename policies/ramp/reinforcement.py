"""Train the pointer network by reinforcement learning, beginning as a scorer.

sb3-contrib's MaskablePPO over episodes side by side. A checkpoint is written at every
evaluation, and training can be resumed from the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sb3_contrib import MaskablePPO
from stable_baselines3.common.callbacks import BaseCallback
from torch import nn

from envs.ramp.vector import RampVecEnv
from planner.errors import StrategyError
from policies.actor import PointerPolicy, PPOSettings, make_ppo
from policies.compact import PointerDecider
from policies.pointer import PointerConfig, PointerNetwork
from policies.ramp.evaluation import ReplayValidation
from policies.scorer import Scorer

__all__ = ["PPOConfig", "Progress", "reinforce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig(PPOSettings):
    """Settings of reinforcement learning.

    Attributes:
        steps: Decisions in all; 0 leaves the network as the scorer made it.
        value_steps: First decisions, in which the critic alone learns: before it
            knows the value of states, it would lead the actor astray.
        evaluate_every: Decisions between evaluations and checkpoints.
        learning_rate: At the start; it falls to 0 linearly.
        target_kl: Divergence from the old policy at which an update stops.
    """

    steps: int = 262_144
    value_steps: int = 65_536
    evaluate_every: int = 65_536
    num_envs: int = 64
    n_steps: int = 256
    batch_size: int = 4096
    n_epochs: int = 3
    learning_rate: float = 1e-4
    gamma: float = 0.98
    gae_lambda: float = 0.95
    clip_range: float = 0.1
    ent_coef: float = 0.0
    target_kl: float | None = 0.02

    def __post_init__(self) -> None:
        PPOSettings.__post_init__(self)
        if min(self.steps, self.value_steps) < 0 or self.evaluate_every < 1:
            raise StrategyError(
                f"steps={self.steps} and value_steps={self.value_steps} of training "
                f"are not negative, evaluate_every={self.evaluate_every} is at least 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Result of an evaluation.

    Attributes:
        steps: Decisions so far.
        gains: Gain on the validation streams of each law.
        best: Whether the mean is the best so far.
    """

    steps: int
    gains: tuple[float, ...]
    best: bool

    @property
    def gain(self) -> float:
        """Mean gain over the laws."""
        return sum(self.gains) / len(self.gains)


class _Watcher(BaseCallback):  # type: ignore[misc]  # of an extra
    """Evaluates at intervals, writes checkpoints, and unfreezes the actor.

    Args:
        config: Settings of the training.
        judged: Streams to evaluate on.
        folder: Folder of checkpoints.
        best: Mean gain of the best so far.
        report: Called after each evaluation.
    """

    def __init__(
        self,
        config: PPOConfig,
        judged: ReplayValidation,
        folder: Path,
        best: float,
        report: Callable[[Progress], None],
    ) -> None:
        super().__init__()
        self.config, self.judged, self.folder = config, judged, folder
        self.best, self.report = best, report
        self._due = 0

    def _on_training_start(self) -> None:
        self._due = self.num_timesteps + self.config.evaluate_every
        self._hold(self.num_timesteps < self.config.value_steps)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        # Between updates, so that a checkpoint holds a whole number of them.
        self._hold(self.num_timesteps < self.config.value_steps)
        if self.num_timesteps >= self._due:
            self.evaluate()
            self._due += self.config.evaluate_every

    def _hold(self, held: bool) -> None:
        for part in _actor(self.model.policy.network):
            part.requires_grad_(not held)

    def evaluate(self) -> None:
        """Evaluate now, and write a checkpoint."""
        network = self.model.policy.network
        gains = self.judged.gains(lambda _: PointerDecider(network))
        self.model.policy.set_training_mode(True)
        gain = sum(gains) / len(gains)
        better = gain > self.best
        self.best = max(gain, self.best)
        for name in ("last.zip", *(("best.zip",) if better else ())):
            _save(self.model, self.folder / name)
        for law, one in zip(self.judged.cases, gains, strict=True):
            self.logger.record(f"validation/gain_{law}", one)
        self.logger.record("validation/gain", gain)
        self.report(Progress(steps=self.num_timesteps, gains=gains, best=better))


def _actor(network: PointerNetwork) -> Iterable[nn.Parameter]:
    """Return all parameters except those that value states."""
    state = {id(part) for part in network.state.parameters()}
    return [part for part in network.parameters() if id(part) not in state]


def _save(model: MaskablePPO, path: Path) -> None:
    part = path.with_name(f".{path.stem}.part.zip")
    model.save(part)
    part.replace(path)


class _Falling:
    """A learning rate that falls to 0; a class, because checkpoints pickle it."""

    def __init__(self, start: float) -> None:
        self.start = start

    def __call__(self, left: float) -> float:
        return self.start * left


def reinforce(
    config: PPOConfig,
    network: PointerConfig,
    env: RampVecEnv,
    scorer: Scorer,
    judged: ReplayValidation,
    folder: Path,
    *,
    seed: int,
    report: Callable[[Progress], None],
    callbacks: Iterable[Any] = (),
) -> PointerNetwork:
    """Train, or resume from the checkpoints of ``folder``.

    Args:
        config: Settings.
        network: Sizes; ``hidden`` is that of the scorer.
        env: Episodes to train in.
        scorer: Initial weights.
        judged: Streams to evaluate on.
        folder: For ``last.zip``, ``best.zip`` and TensorBoard's files.
        seed: Seed of everything that is drawn.
        report: Called after each evaluation, also the one before the first step.
        callbacks: Further callbacks of stable-baselines3.
    Returns:
        The best network on the validation streams.
    Raises:
        StrategyError: If the scorer is of another size than the network.
    """
    folder.mkdir(parents=True, exist_ok=True)
    last, best = folder / "last.zip", folder / "best.zip"
    if last.exists():
        model = MaskablePPO.load(last, env=env, device="cpu")
    else:
        model = make_ppo(
            PointerPolicy,
            env,
            config,
            {
                "graphs": env.graphs,
                "device_edges": env.device_graph,
                "config": network,
            },
            learning_rate=_Falling(config.learning_rate),
            target_kl=config.target_kl,
            seed=seed,
            tensorboard_log=str(folder),
        )
        model.policy.network.start_from(scorer)
    watcher = _Watcher(config, judged, folder, -math.inf, report)
    watcher.init_callback(model)
    if best.exists():
        kept = MaskablePPO.load(best, device="cpu").policy.network
        gains = judged.gains(lambda _: PointerDecider(kept))
        watcher.best = sum(gains) / len(gains)
    if not last.exists():
        model.set_logger(_logger(folder))
        watcher.evaluate()
    left = config.steps - model.num_timesteps
    if left > 0:
        model.learn(
            left,
            callback=[watcher, *callbacks],
            reset_num_timesteps=False,
            tb_log_name="ppo",
        )
        watcher.evaluate()
    found: PointerNetwork = MaskablePPO.load(best, device="cpu").policy.network
    return found


def _logger(folder: Path) -> Any:
    from stable_baselines3.common.logger import configure

    return configure(str(folder), ["tensorboard"])
