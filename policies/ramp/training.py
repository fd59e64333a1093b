"""Train a policy of the job stream, from nothing to weights that can be shipped.

A run is a folder: ``config.json`` (all settings, and what it ran with), ``rounds/`` (of
policy iteration), ``ppo/`` (checkpoints), ``progress.jsonl`` and, at the end,
``policy/``. Calling it again goes on where it stopped.
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
from policies.pointer import PointerConfig
from policies.ramp.evaluation import Validation, validation
from policies.ramp.labels import ReplayWorld
from policies.ramp.reinforcement import PPOConfig, reinforce
from policies.run_folder import (
    RunLog,
    Watch,
    check_training,
    describe_run,
    read_settings,
)
from policies.saved import SavedPolicy, save_policy
from policies.scored import ScorerPolicy

__all__ = ["TrainConfig", "read_config", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of a training run.

    Attributes:
        seed: Of everything that is drawn.
        laws: Names of the laws that reinforcement learning and validation are on.
        profiles: Folder of the jobs' profiles; by default that of MESHWRIGHT_DATA.
        models: Names of the profiles that may arrive.
        horizon_s: Of the episodes.
        validation_first: First of the validation seeds. They choose among the networks
            of a run; judge a policy on others.
        validation_count: How many there are, of each law.
        improvement: Of policy iteration.
        network: Sizes; ``hidden`` is that of ``improvement.fit``.
        ppo: Of reinforcement learning.
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
            self.improvement.fit.hidden,
            range(self.validation_first, self.validation_first + self.validation_count),
        )


def read_config(path: str | Path) -> TrainConfig:
    """Read settings from a JSON file; what it leaves out is as by default.

    Raises:
        StrategyError: If it cannot be read, or a field is unknown or of a wrong value.
    """
    return read_settings(path, TrainConfig())


def train(
    config: TrainConfig,
    folder: str | Path,
    *,
    workers: int = 1,
    watch: Watch | None = None,
    callbacks: tuple[Any, ...] = (),
) -> SavedPolicy:
    """Train, or go on with a run that was stopped.

    Args:
        config: Settings; those of a run that is gone on with must be the same.
        folder: Of the run, made if it is not there.
        workers: Processes that label decisions. What comes out does not depend on it.
        watch: Told of each round and each evaluation.
        callbacks: Of stable-baselines3, for reinforcement learning.
    Returns:
        The policy that is best on the validation streams, also in ``policy/``.
    Raises:
        StrategyError: If the folder holds a run of other settings.
        CaptureError: If a profile is not there.
    """
    run = Path(folder)
    describe_run(config, run)
    torch.set_num_threads(1)
    seeds = range(
        config.validation_first, config.validation_first + config.validation_count
    )
    jobs = read_jobs(config.profiles, config.models)
    judged = validation(jobs, config.laws, seeds, config.horizon_s)
    told = RunLog(run, watch)
    best = improve(
        config.improvement,
        ReplayWorld(
            profiles=config.profiles, models=config.models, horizon_s=config.horizon_s
        ),
        lambda scorer: judged.gains(lambda _: ScorerPolicy(scorer)),
        run / "rounds",
        seed=config.seed,
        workers=workers,
        watch=lambda done: told.round(done, config.improvement.rounds),
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
        report=lambda found: told.evaluation(found, config.ppo.steps),
        callbacks=callbacks,
    )
    made = SavedPolicy(
        network=network, scorer=best.scorer, notes=_notes(config, judged)
    )
    save_policy(made, run / "policy")
    return made


def _notes(config: TrainConfig, judged: Validation) -> dict[str, Any]:
    """What the weights' own description says of the run."""
    return {
        "trained_on": {
            "laws": list(config.laws),
            "models": list(config.models),
            "seed": config.seed,
        },
        "validated_on": {
            "seeds": [judged.seeds.start, judged.seeds.stop - 1],
            "best_constants": dict(zip(judged.laws, judged.constants, strict=True)),
        },
    }
