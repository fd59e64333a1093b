"""Train the pointer network by reinforcement learning, from where a scorer has come to.

sb3-contrib's MaskablePPO over episodes side by side. A checkpoint is written at every
evaluation, and training that was stopped goes on from the last one.
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
from policies.actor import PointerPolicy
from policies.learned import PointerDecider
from policies.pointer import PointerConfig, PointerNetwork
from policies.ramp.evaluation import Validation
from policies.scorer import Scorer

__all__ = ["PPOConfig", "Progress", "reinforce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """How the network is trained.

    Attributes:
        steps: Decisions in all; 0 leaves the network as the scorer made it.
        value_steps: The first of them, in which the critic alone learns: before it
            knows what states are worth, it would lead the actor astray.
        evaluate_every: Decisions between evaluations and checkpoints.
        num_envs: Episodes side by side.
        n_steps: Decisions of each between updates.
        batch_size: Decisions of a step of the optimizer.
        n_epochs: How often an update goes through its decisions.
        learning_rate: Of the optimizer; it falls to 0 linearly.
        gamma: By which a later decision's reward counts less.
        gae_lambda: Of the advantage estimates.
        clip_range: Of the ratio of new to old probabilities.
        ent_coef: Weight of the entropy.
        target_kl: An update stops where the policy has moved this far.
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
        for name in ("evaluate_every", "num_envs", "n_steps", "batch_size", "n_epochs"):
            if getattr(self, name) < 1:
                raise StrategyError(
                    f"{name}={getattr(self, name)} of training; it is at least 1"
                )
        if min(self.steps, self.value_steps) < 0:
            raise StrategyError(
                f"steps={self.steps} and value_steps={self.value_steps} of training "
                f"are not negative"
            )
        if not 0.0 < self.learning_rate < math.inf:
            raise StrategyError(
                f"learning_rate={self.learning_rate}; give a positive number"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What an evaluation found.

    Attributes:
        steps: Decisions so far.
        gains: On the validation streams, for each law.
        best: Whether it is the best mean so far.
    """

    steps: int
    gains: tuple[float, ...]
    best: bool

    @property
    def gain(self) -> float:
        """Mean over the laws."""
        return sum(self.gains) / len(self.gains)


class _Watcher(BaseCallback):  # type: ignore[misc]  # of an extra
    """Evaluates now and then, keeps checkpoints, and frees the actor when it is time.

    Args:
        config: Of the training.
        judged: Streams to evaluate on.
        folder: For checkpoints.
        best: Mean gain of the best so far.
        report: Told of each evaluation.
    """

    def __init__(
        self,
        config: PPOConfig,
        judged: Validation,
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
        # Between updates, so that a checkpoint is of a whole number of them.
        self._hold(self.num_timesteps < self.config.value_steps)
        if self.num_timesteps >= self._due:
            self.evaluate()
            self._due += self.config.evaluate_every

    def _hold(self, held: bool) -> None:
        for part in _actor(self.model.policy.network):
            part.requires_grad_(not held)

    def evaluate(self) -> None:
        """Now; and keep what has been learned."""
        network = self.model.policy.network
        gains = self.judged.gains(lambda _: PointerDecider(network))
        self.model.policy.set_training_mode(True)
        gain = sum(gains) / len(gains)
        better = gain > self.best
        self.best = max(gain, self.best)
        for name in ("last.zip", *(("best.zip",) if better else ())):
            _save(self.model, self.folder / name)
        for law, one in zip(self.judged.laws, gains, strict=True):
            self.logger.record(f"validation/gain_{law}", one)
        self.logger.record("validation/gain", gain)
        self.report(Progress(steps=self.num_timesteps, gains=gains, best=better))


def _actor(network: PointerNetwork) -> Iterable[nn.Parameter]:
    """All but what values states."""
    state = {id(part) for part in network.state.parameters()}
    return [part for part in network.parameters() if id(part) not in state]


def _save(model: MaskablePPO, path: Path) -> None:
    part = path.with_name(f".{path.stem}.part.zip")
    model.save(part)
    part.replace(path)


def _fresh(
    config: PPOConfig,
    env: RampVecEnv,
    network: PointerConfig,
    scorer: Scorer,
    seed: int,
    board: Path,
) -> MaskablePPO:
    model = MaskablePPO(
        PointerPolicy,
        env,
        n_steps=config.n_steps,
        batch_size=config.batch_size,
        n_epochs=config.n_epochs,
        learning_rate=_Falling(config.learning_rate),
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        clip_range=config.clip_range,
        ent_coef=config.ent_coef,
        target_kl=config.target_kl,
        seed=seed,
        device="cpu",
        tensorboard_log=str(board),
        policy_kwargs={
            "features_extractor_kwargs": {
                "graphs": env.graphs,
                "device_edges": env.device_graph,
                "config": network,
            }
        },
    )
    model.policy.network.start_from(scorer)
    return model


class _Falling:
    """A learning rate that falls to 0; a class, so that checkpoints can hold it."""

    def __init__(self, start: float) -> None:
        self.start = start

    def __call__(self, left: float) -> float:
        return self.start * left


def reinforce(
    config: PPOConfig,
    network: PointerConfig,
    env: RampVecEnv,
    scorer: Scorer,
    judged: Validation,
    folder: Path,
    *,
    seed: int,
    report: Callable[[Progress], None],
    callbacks: Iterable[Any] = (),
) -> PointerNetwork:
    """Train, or go on with what ``folder`` has.

    Args:
        config: How.
        network: Sizes, of which ``hidden`` is the scorer's.
        env: To train in.
        scorer: To begin from.
        judged: Streams to evaluate on.
        folder: For ``last.zip``, ``best.zip`` and what TensorBoard shows.
        seed: Of everything that is drawn.
        report: Told of each evaluation, the one before the first step included.
        callbacks: More of stable-baselines3's.
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
        model = _fresh(config, env, network, scorer, seed, folder)
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
