"""Train a policy of the job stream on any cluster.

A run is a folder as that of :mod:`policies.ramp.training`, without ``ppo/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch

from planner.errors import StrategyError
from policies.actor import widths_of
from policies.fitting import FitConfig
from policies.improvement import ImprovementConfig, improve
from policies.labels import LabelConfig
from policies.pointer import PointerConfig, PointerNetwork
from policies.run_folder import (
    RunLog,
    Watch,
    check_training,
    describe_run,
    read_settings,
)
from policies.saved import SavedPolicy, save_policy
from policies.scorer import Scorer
from policies.stream.evaluation import StreamCase, StreamValidation, stream_validation
from policies.stream.labels import StreamWorlds
from policies.stream.worlds import TRAINED_ON, StreamWorld

__all__ = ["StreamTrainConfig", "read_stream_config", "train_stream"]


def _improvement() -> ImprovementConfig:
    return ImprovementConfig(
        first_rounds=1,
        rounds=9,
        episodes=160,
        kept=8,
        first=LabelConfig(futures=8, arrivals=32, labelled=0.1),
        later=LabelConfig(futures=8, arrivals=32, labelled=0.1),
        fit=FitConfig(steps=800, noise=0.01),
        last=FitConfig(steps=6000, weight_decay=0.1, noise=0.01),
        last_fits=4,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTrainConfig:
    """Settings of a training run.

    Attributes:
        seed: Of everything that is drawn.
        worlds: Clusters with their jobs, to train in and to choose the best round by.
        intervals: Mean times between arrivals that an episode of training lasts.
        validation_loads: Of the validation streams.
        validation_first: First of the validation seeds; judge a policy on others.
        validation_count: How many there are, of each world and load.
        validation_intervals: Mean times between arrivals that each lasts.
        improvement: Of policy iteration.
        network: Sizes; ``hidden`` is what ``improvement`` ends with.
    """

    seed: int = 0
    worlds: tuple[StreamWorld, ...] = TRAINED_ON
    intervals: float = 400.0
    validation_loads: tuple[float, ...] = (0.5, 1.0, 1.5)
    validation_first: int = 5000
    validation_count: int = 4
    validation_intervals: float = 500.0
    improvement: ImprovementConfig = field(default_factory=_improvement)
    network: PointerConfig = field(default_factory=lambda: PointerConfig(hidden=128))

    def __post_init__(self) -> None:
        check_training(
            self.network.hidden,
            self.improvement.hidden,
            range(self.validation_first, self.validation_first + self.validation_count),
        )
        if not self.worlds or not self.validation_loads:
            raise StrategyError(
                f"{len(self.worlds)} worlds and {len(self.validation_loads)} "
                f"validation_loads; give at least one of each"
            )

    @property
    def cases(self) -> tuple[StreamCase, ...]:
        """What rounds are judged by."""
        return tuple(
            StreamCase(world=world, load=load, intervals=self.validation_intervals)
            for world in self.worlds
            for load in self.validation_loads
        )


def read_stream_config(path: str | Path) -> StreamTrainConfig:
    """Read settings from a JSON file; what it leaves out is as by default.

    Raises:
        StrategyError: If it cannot be read, or a field is unknown or of a wrong value.
    """
    return read_settings(path, StreamTrainConfig())


def train_stream(
    config: StreamTrainConfig,
    folder: str | Path,
    *,
    workers: int = 1,
    watch: Watch | None = None,
) -> SavedPolicy:
    """Train, or go on with a run that was stopped.

    Args:
        config: Settings; those of a run that is gone on with must be the same.
        folder: Of the run, made if it is not there.
        workers: Processes that label decisions. What comes out does not depend on it.
        watch: Told of each round.
    Returns:
        The policy that :func:`policies.improvement.improve` chooses, also in
        ``policy/``.
    Raises:
        StrategyError: If the folder holds a run of other settings.
        UnknownNameError: If a world has an unknown job.
        CaptureError: If a profile is not there.
    """
    run = Path(folder)
    describe_run(config, run)
    torch.set_num_threads(1)
    log, how = RunLog(run, watch), config.improvement
    rounds = how.rounds + (how.last is not None)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        judged = stream_validation(config.cases, _seeds(config), pool)
        best = improve(
            how,
            StreamWorlds(worlds=config.worlds, intervals=config.intervals),
            lambda scorer: judged.gains(scorer, pool),
            run / "rounds",
            seed=config.seed,
            workers=workers,
            watch=lambda done: log.round(done, rounds),
        )
    made = SavedPolicy(
        network=_network(config.cases[0], config.network, best.scorer),
        scorer=best.scorer,
        notes=_notes(config, judged, best.gains),
    )
    save_policy(made, run / "policy")
    return made


def _seeds(config: StreamTrainConfig) -> range:
    first = config.validation_first
    return range(first, first + config.validation_count)


def _network(case: StreamCase, config: PointerConfig, scorer: Scorer) -> PointerNetwork:
    """A pointer network that decides as the scorer does."""
    env = case.env(observe=True)
    network = PointerNetwork(
        env.graphs, env.device_graph, widths_of(env.observation_space), config
    )
    network.start_from(scorer)
    return network


def _notes(
    config: StreamTrainConfig, judged: StreamValidation, gains: Sequence[float]
) -> dict[str, object]:
    """What the weights' own description says of the run."""
    return {
        "trained_on": {
            "worlds": [
                {
                    "cluster": world.cluster,
                    "models": list(world.models),
                    "max_waiting": world.max_waiting,
                }
                for world in config.worlds
            ],
            "seed": config.seed,
        },
        "validated_on": {
            "seeds": list(_seeds(config)),
            "cases": [
                {
                    "cluster": case.world.cluster,
                    "models": len(case.world.models),
                    "max_waiting": case.world.max_waiting,
                    "load": case.load,
                    "best_baseline": name,
                    "blocked": least,
                    "gain": gain,
                }
                for case, name, least, gain in zip(
                    judged.cases, judged.names, judged.baselines, gains, strict=True
                )
            ],
        },
    }
