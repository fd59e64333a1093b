"""Sessions of the replay, shared by its single and its vectorised environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.ramp.arrivals import ArrivalLaw, EpisodeSource
from envs.ramp.episodes import OUTCOMES, RampEpisodes, ReplayLog
from envs.ramp.jobs import MODELS, RampJobs, ramp_tables, read_jobs
from envs.ramp.observation import MaskKind, RampObserver
from envs.ramp.record import ramp_record
from envs.ramp.state import RampState, exact_state
from envs.ramp.topology import RampTopology
from envs.ramp.world import Outcome
from planner.errors import StrategyError

__all__ = ["ReplayConfig", "ReplaySession", "Step"]

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float32]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """Configuration of a replay: stream, cluster and rewards.

    Attributes:
        law: ``"A"`` to ``"D"``, an ArrivalLaw, or several to draw episodes from.
        trace: CSV file of arrivals, or several, instead of a law.
        horizon_s: End of an episode.
        interval_s: Mean time between arrivals, which scales observations; by default
            that of the law or the trace.
        folder: Folder of PipeDream profiles; that of MESHWRIGHT_DATA by default.
        models: Names of the profiles that may arrive.
        topology: Topology of the cluster; the benchmark's by default.
        jobs: Jobs that have been read already, instead of the last three.
        mask: Actions that :meth:`action_masks` allows, ``"possible"`` or
            ``"benchmark"``.
        observe: Whether observations are encoded in full; see RampObserver.
        accepted_reward: Reward of a job that is placed and ends by the horizon.
        blocked_reward: Reward of any other job.
        record: Whether to keep the fate of every job; at the end of an episode
            ``info["record"]`` then is a :class:`planner.schema.stream.StreamRecord`.
    """

    law: str | ArrivalLaw | Sequence[str | ArrivalLaw] = "A"
    trace: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    horizon_s: float = 1e6
    interval_s: float | None = None
    folder: str | os.PathLike[str] | None = None
    models: tuple[str, ...] = MODELS
    topology: RampTopology | None = None
    jobs: RampJobs | None = None
    mask: MaskKind = "possible"
    observe: bool = True
    accepted_reward: float = 1.0
    blocked_reward: float = -1.0
    record: bool = False

    def __post_init__(self) -> None:
        for name in ("accepted_reward", "blocked_reward"):
            if not np.isfinite(getattr(self, name)):
                raise StrategyError(
                    f"{name}={getattr(self, name)}; a reward is a finite number"
                )

    def source(self, jobs: RampJobs) -> EpisodeSource:
        """Return the source of the configured episodes."""
        law, trace = self.law, self.trace
        traces: Sequence[str | os.PathLike[str]] = ()
        if trace is not None:
            traces = [trace] if isinstance(trace, str | os.PathLike) else trace
        laws = [law] if isinstance(law, str | ArrivalLaw) else law
        return EpisodeSource(
            jobs,
            laws=() if traces else laws,
            traces=traces,
            horizon_s=self.horizon_s,
            interval_s=self.interval_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Result of one decision in each episode. Shapes [b].

    Attributes:
        reward: Reward of the decision.
        over: True if the episode has ended.
        outcome: Number of the outcome in OUTCOMES.
        degree: Requested degree; 0 for turning away.
    """

    reward: Floats
    over: Flags
    outcome: Index
    degree: Index


class ReplaySession:
    """Episodes side by side, drawn, decided, rewarded and observed.

    Args:
        config: Configuration of the replay.
        count: Number of episodes.

    Raises:
        ClusterError: As :func:`envs.ramp.jobs.ramp_tables`.
        CaptureError: If a profile is missing.
        UnknownNameError: If a law, a mask or a trace's model is not known.
        StrategyError: As :class:`envs.ramp.arrivals.EpisodeSource`.
    """

    def __init__(self, config: ReplayConfig, count: int) -> None:
        self.config = config
        self.jobs = config.jobs or read_jobs(
            config.folder, config.models, config.topology
        )
        self.tables = ramp_tables(self.jobs)
        self.source = config.source(self.jobs)
        self.observer = RampObserver(
            self.tables, observe=config.observe, mask=config.mask
        )
        self.episodes = RampEpisodes(
            self.jobs,
            [[]] * count,
            config.horizon_s,
            self.tables,
            ReplayLog() if config.record else None,
        )
        self.interval_s: Array = np.ones(count)

    def begin(self, row: int, generator: np.random.Generator) -> None:
        """Restart one episode, with the next stream that is drawn."""
        episode = self.source.draw(generator)
        self.interval_s[row] = episode.interval_s
        self.episodes.restart(row, episode.arrivals)

    def state(self) -> RampState:
        """Return the state before the next decisions."""
        return exact_state(self.episodes, self.interval_s)

    def see(self) -> tuple[dict[str, Floats], Flags]:
        """Return observations and masks before the next decisions; see RampObserver."""
        return self.observer.see(self.state())

    def decide(self, actions: Index) -> Step:
        """Take one decision in each episode.

        Args:
            actions: 0 turns the job away, 1 + i runs it at the i-th degree. Shape [b].

        Raises:
            StrategyError: If an action is out of range, or an episode has ended.
        """
        actions = np.asarray(actions)
        choices = len(self.tables.degrees) + 1
        if actions.size and not 0 <= actions.min() <= actions.max() < choices:
            raise StrategyError(
                f"actions from {actions.min()} to {actions.max()}; give 0 to turn the "
                f"job away or 1 to {choices - 1} for a degree of "
                f"{self.tables.degrees.tolist()}"
            )
        if self.episodes.over.any():
            raise StrategyError("an episode has ended; reset it")
        before = self.episodes.unfinished
        choice = actions.astype(np.int64) - 1
        outcome = self.episodes.decide(choice)
        met = (outcome == 0) & (self.episodes.unfinished == before)
        rewards = (self.config.blocked_reward, self.config.accepted_reward)
        degrees = np.concatenate([[0], self.tables.degrees])
        return Step(
            reward=np.array(rewards, dtype=np.float32)[met.astype(np.int64)],
            over=self.episodes.over,
            outcome=outcome,
            degree=degrees[choice + 1],
        )

    def infos(self, step: Step) -> list[dict[str, Any]]:
        """Return the infos of each decision."""
        names: tuple[Outcome | str, ...] = OUTCOMES
        made = [
            {"outcome": names[outcome], "degree": degree}
            for outcome, degree in zip(
                step.outcome.tolist(), step.degree.tolist(), strict=True
            )
        ]
        for row in np.flatnonzero(step.over).tolist():
            summary = self.episodes.summary(row)
            made[row]["summary"] = {
                **asdict(summary),
                "blocking_rate": summary.blocking_rate,
            }
            if self.config.record:
                interval_s = float(self.interval_s[row])
                made[row]["record"] = ramp_record(self.episodes, row, interval_s)
        return made
