"""Train a policy of the job stream, from nothing to weights that can be shipped.

A run is a folder: ``config.json`` (all settings, and what it ran with), ``rounds/`` (of
policy iteration), ``ppo/`` (checkpoints), ``progress.jsonl`` and, at the end,
``policy/``. Calling it again goes on where it stopped.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pydantic_core
import torch

from envs.ramp.profiles import MODELS, read_jobs
from envs.ramp.session import ReplayConfig
from envs.ramp.vector import RampVecEnv
from planner.errors import StrategyError, UnknownNameError
from planner.schema import write_atomically
from policies.evaluation import Validation, validation
from policies.improvement import ImprovementConfig, Round, improve
from policies.pointer import PointerConfig
from policies.reinforcement import PPOConfig, Progress, reinforce
from policies.saved import SavedPolicy, save_policy

__all__ = ["TrainConfig", "read_config", "train"]

#: Told of a stage, steps done, steps in all, and gains on the validation streams.
Watch = Callable[[str, int, int, tuple[float, ...]], None]


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
        if self.network.hidden != self.improvement.fit.hidden:
            raise StrategyError(
                f"network.hidden={self.network.hidden} and improvement.fit.hidden="
                f"{self.improvement.fit.hidden} differ; the network begins as the "
                f"scorer that was fitted"
            )
        if self.validation_count < 1 or self.validation_first < 0:
            raise StrategyError(
                f"validation_first={self.validation_first} is not negative, "
                f"validation_count={self.validation_count} at least 1"
            )


def read_config(path: str | Path) -> TrainConfig:
    """Read settings from a JSON file; what it leaves out is as by default.

    Raises:
        StrategyError: If it cannot be read, or a field is unknown or of a wrong value.
    """
    file = Path(path)
    try:
        data = pydantic_core.from_json(file.read_bytes())
        _know(data, TrainConfig(), "")
        return pydantic.TypeAdapter(TrainConfig).validate_python(data)
    except OSError as error:
        raise StrategyError(
            f"settings {file} cannot be read ({error.strerror}); give a JSON file"
        ) from error
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise StrategyError(f"settings {file}: {where}: {first['msg']}") from error
    except (ValueError, UnknownNameError) as error:
        raise StrategyError(f"settings {file}: {error}") from error


def _know(data: Any, like: Any, where: str) -> None:
    """Refuse names that settings do not have: pydantic leaves them out silently.

    Raises:
        UnknownNameError: If there is one.
    """
    if not isinstance(data, dict):
        return
    known = [one.name for one in fields(like)]
    for name, value in data.items():
        if name not in known:
            raise UnknownNameError(f"setting{where}", name, known)
        inner = getattr(like, name)
        if is_dataclass(inner):
            _know(value, inner, f"{where or ' of'} {name}")


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
    run.mkdir(parents=True, exist_ok=True)
    _describe(config, run)
    torch.set_num_threads(1)
    seeds = range(
        config.validation_first, config.validation_first + config.validation_count
    )
    jobs = read_jobs(config.profiles, config.models)
    judged = validation(jobs, config.laws, seeds, config.horizon_s)
    told = _Told(run, watch)
    best = improve(
        config.improvement,
        judged,
        run / "rounds",
        seed=config.seed,
        profiles=config.profiles,
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


def _as_json(data: Any) -> bytes:
    return (json.dumps(data, indent=2, default=str) + "\n").encode()


def _describe(config: TrainConfig, run: Path) -> None:
    """Write the settings down, or see that they are those of the run."""
    path = run / "config.json"
    settings = json.loads(json.dumps(asdict(config)))
    if path.exists():
        held = json.loads(path.read_text(encoding="utf-8"))["settings"]
        if held != settings:
            changed = sorted(k for k in settings if settings[k] != held.get(k))
            raise StrategyError(
                f"{run} holds a run of other settings ({', '.join(changed)} differ); "
                f"give its own, or another folder"
            )
        return
    packages = ("meshwright", "torch", "torch-geometric", "sb3-contrib", "numpy")
    made = {
        "settings": settings,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()}",
        "packages": {name: version(name) for name in packages},
    }
    write_atomically(path, _as_json(made))


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


class _Told:
    """Passes progress on, and writes it down."""

    def __init__(self, run: Path, watch: Watch | None) -> None:
        self._path, self._watch = run / "progress.jsonl", watch

    def round(self, done: Round, rounds: int) -> None:
        self._tell("improve", done.number + 1, rounds, done.gains, loss=done.loss)

    def evaluation(self, found: Progress, steps: int) -> None:
        self._tell("reinforce", found.steps, steps, found.gains, best=found.best)

    def _tell(
        self, stage: str, done: int, of: int, gains: tuple[float, ...], **more: Any
    ) -> None:
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "stage": stage,
            "done": done,
            "gains": [round(gain, 4) for gain in gains],
            "gain": round(float(np.mean(gains)), 4),
            **more,
        }
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        if self._watch is not None:
            self._watch(stage, done, of, gains)
