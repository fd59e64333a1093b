"""Train a policy of the job stream on any cluster.

A run is a folder like that of :mod:`policies.ramp.training`, without ``ppo/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch

from planner.errors import StrategyError
from policies.fitting import FitConfig, LabelConfig
from policies.improvement import ImprovementConfig, improve
from policies.pointer import (
    PointerConfig,
    PointerNetwork,
    SavedPolicy,
    save_policy,
    widths_of,
)
from policies.run_folder import (
    RunLog,
    Watch,
    check_training,
    describe_run,
)
from policies.scorer import Scorer
from policies.stream.evaluation import StreamCase, StreamValidation, stream_validation
from policies.stream.labels import StreamWorlds
from policies.stream.worlds import TRAINED_ON, StreamWorld

__all__ = ["StreamTrainConfig", "train_stream"]


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
        seed: Seed of everything that is drawn.
        worlds: Clusters with their jobs, to train in and to validate on.
        intervals: Length of a training episode in mean times between arrivals.
        validation_loads: Loads of the validation streams.
        validation_first: First of the validation seeds; evaluate a policy on others.
        validation_count: Number of validation seeds of each world and load.
        validation_intervals: Length of a validation stream.
        improvement: Settings of policy iteration.
        network: Sizes; ``hidden`` is that of ``improvement``.
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
            self.seeds,
        )
        if not self.worlds or not self.validation_loads:
            raise StrategyError(
                f"{len(self.worlds)} worlds and {len(self.validation_loads)} "
                f"validation_loads; give at least one of each"
            )

    @property
    def seeds(self) -> range:
        """Validation seeds of each case."""
        first = self.validation_first
        return range(first, first + self.validation_count)

    @property
    def cases(self) -> tuple[StreamCase, ...]:
        """Cases that rounds are validated on."""
        return tuple(
            StreamCase(world=world, load=load, intervals=self.validation_intervals)
            for world in self.worlds
            for load in self.validation_loads
        )


def train_stream(
    config: StreamTrainConfig,
    folder: str | Path,
    *,
    workers: int = 1,
    watch: Watch | None = None,
) -> SavedPolicy:
    """Train, or resume a run.

    Args:
        config: Settings; the same ones to resume a run.
        folder: Folder of the run, made if it does not exist.
        workers: Processes that label decisions. The result does not depend on it.
        watch: Called after each round.
    Returns:
        The policy that :func:`policies.improvement.improve` chooses, also in
        ``policy/``.
    Raises:
        StrategyError: If the folder holds a run of other settings.
        UnknownNameError: If a world has an unknown job.
        CaptureError: If a profile is missing.
    """
    run = Path(folder)
    describe_run(config, run)
    torch.set_num_threads(1)
    log, how = RunLog(run, watch), config.improvement
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        judged = stream_validation(config.cases, config.seeds, pool)
        best = improve(
            how,
            StreamWorlds(worlds=config.worlds, intervals=config.intervals),
            lambda scorer: judged.gains(scorer, pool),
            run / "rounds",
            seed=config.seed,
            workers=workers,
            watch=lambda done: log.stage(
                "improve", done.number + 1, how.all_rounds, done.gains, loss=done.loss
            ),
        )
    made = SavedPolicy(
        network=_network(config, best.scorer),
        scorer=best.scorer,
        notes=_notes(config, judged, best.gains),
    )
    save_policy(made, run / "policy")
    return made


def _network(config: StreamTrainConfig, scorer: Scorer) -> PointerNetwork:
    """Make a pointer network that decides as the scorer does."""
    env = config.cases[0].env(observe=True)
    # Encoders keep random weights, which the scorer's zeros make irrelevant.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = PointerNetwork(
            env.graphs,
            env.device_graph,
            widths_of(env.observation_space),
            config.network,
        )
    network.start_from(scorer)
    return network


def _notes(
    config: StreamTrainConfig, judged: StreamValidation, gains: Sequence[float]
) -> dict[str, object]:
    """Notes on the run for the description of the weights."""
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
            "seeds": list(config.seeds),
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
