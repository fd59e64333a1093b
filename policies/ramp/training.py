"""Train a policy of the job stream on RAMP.

A run is a folder: ``config.json`` (all settings and versions), ``rounds/`` (of policy
iteration), ``ppo/`` (checkpoints), ``progress.jsonl`` and, at the end, ``policy/``. The
same call resumes it where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from envs.ramp.jobs import MODELS, read_jobs
from envs.ramp.session import ReplayConfig
from envs.ramp.vector import RampVecEnv
from policies.improvement import ImprovementConfig, improve
from policies.pointer import PointerConfig, SavedPolicy, save_policy
from policies.ramp.evaluation import ReplayValidation, validation
from policies.ramp.labels import ReplayWorld
from policies.ramp.reinforcement import PPOConfig, reinforce
from policies.run_folder import (
    RunLog,
    Watch,
    check_training,
    describe_run,
)
from policies.scorer import ScorerPolicy

__all__ = ["TrainConfig", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of a training run.

    Attributes:
        seed: Seed of everything that is drawn.
        laws: Names of the laws of reinforcement learning and validation.
        profiles: Folder of the jobs' profiles; by default that of MESHWRIGHT_DATA.
        models: Names of the profiles that may arrive.
        horizon_s: End of the episodes.
        validation_first: First of the validation seeds. They choose among the networks
            of a run; evaluate a policy on others.
        validation_count: Number of validation seeds of each law.
        improvement: Settings of policy iteration.
        network: Sizes; ``hidden`` is that of ``improvement``.
        ppo: Settings of reinforcement learning.
    """

    seed: int = 0
    laws: tuple[str, ...] = ("A", "B", "C", "D")
    profiles: str | None = None
    models: tuple[str, ...] = MODELS
    horizon_s: float = 1e6
    validation_first: int = 5000
    validation_count: int = 12
    improvement: ImprovementConfig = field(default_factory=ImprovementConfig)
    network: PointerConfig = field(default_factory=PointerConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)

    def __post_init__(self) -> None:
        check_training(
            self.network.hidden,
            self.improvement.hidden,
            self.seeds,
        )

    @property
    def seeds(self) -> range:
        """Validation seeds."""
        first = self.validation_first
        return range(first, first + self.validation_count)


def train(
    config: TrainConfig,
    folder: str | Path,
    *,
    workers: int = 1,
    watch: Watch | None = None,
    callbacks: tuple[Any, ...] = (),
) -> SavedPolicy:
    """Train, or resume a run.

    Args:
        config: Settings; the same ones to resume a run.
        folder: Folder of the run, made if it does not exist.
        workers: Processes that label decisions. The result does not depend on it.
        watch: Called after each round and each evaluation.
        callbacks: Callbacks of stable-baselines3, for reinforcement learning.
    Returns:
        The policy that is best on the validation streams, also in ``policy/``.
    Raises:
        StrategyError: If the folder holds a run of other settings.
        CaptureError: If a profile is missing.
    """
    run = Path(folder)
    describe_run(config, run)
    torch.set_num_threads(1)
    jobs = read_jobs(config.profiles, config.models)
    judged = validation(jobs, config.laws, config.seeds, config.horizon_s)
    log, how = RunLog(run, watch), config.improvement
    best = improve(
        how,
        ReplayWorld(
            profiles=config.profiles, models=config.models, horizon_s=config.horizon_s
        ),
        lambda scorer: judged.gains(lambda _: ScorerPolicy(scorer)),
        run / "rounds",
        seed=config.seed,
        workers=workers,
        watch=lambda done: log.stage(
            "improve", done.number + 1, how.all_rounds, done.gains, loss=done.loss
        ),
    )
    env = RampVecEnv(
        config.ppo.num_envs,
        ReplayConfig(law=config.laws, jobs=jobs, horizon_s=config.horizon_s),
        seed=config.seed,
    )
    network = reinforce(
        config.ppo,
        config.network,
        env,
        best.scorer,
        judged,
        run / "ppo",
        seed=config.seed,
        report=lambda found: log.stage(
            "reinforce", found.steps, config.ppo.steps, found.gains, best=found.best
        ),
        callbacks=callbacks,
    )
    made = SavedPolicy(
        network=network, scorer=best.scorer, notes=_notes(config, judged)
    )
    save_policy(made, run / "policy")
    return made


def _notes(config: TrainConfig, judged: ReplayValidation) -> dict[str, Any]:
    """Notes on the run for the description of the weights."""
    return {
        "trained_on": {
            "laws": list(config.laws),
            "models": list(config.models),
            "seed": config.seed,
        },
        "validated_on": {
            "seeds": [judged.seeds[0], judged.seeds[-1]],
            "best_constants": dict(zip(judged.cases, judged.baselines, strict=True)),
        },
    }
