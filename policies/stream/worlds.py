"""Worlds of the job stream that a policy is trained, chosen or judged in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from envs.ramp.arrivals import BetaLaw
from envs.stream.arrivals import StreamLaw
from envs.stream.jobs import BUILT_IN, PROFILES, JobType, built_in_jobs, profiled_jobs
from envs.stream.session import StreamConfig, StreamSession
from planner.errors import StrategyError, UnknownNameError

__all__ = ["HELD_OUT", "TRAINED_ON", "StreamWorld", "draw_stream_law", "world_jobs"]

_PROFILED = tuple(f"pipedream-{name}" for name in PROFILES)
_CAPTURED = tuple(job.name for job in BUILT_IN)

#: Jobs that the shipped policy has never seen: three of those captured from real
#: models and five of PipeDream's graphs, of every family that has more than one member.
HELD_OUT = (
    "vit-l",
    "whisper-large-v3",
    "llama3.2-3b",
    "pipedream-gnmt_large",
    "pipedream-inception_v3",
    "pipedream-resnet101",
    "pipedream-squeezenet1_0",
    "pipedream-vgg16",
)
_KNOWN = tuple(name for name in (*_CAPTURED, *_PROFILED) if name not in HELD_OUT)
_KNOWN_CAPTURED = tuple(name for name in _KNOWN if name in _CAPTURED)

#: Least and most load that a policy is trained at.
_LOADS = (0.35, 1.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamWorld:
    """A cluster and the jobs that may arrive at it.

    Attributes:
        cluster: As :meth:`planner.cluster.Cluster.parse` reads it.
        models: Names of built-in jobs, and of PipeDream's as ``pipedream-<name>``.
        max_waiting: Jobs that may wait.
    """

    cluster: str
    models: tuple[str, ...]
    max_waiting: int = 0

    def config(
        self, law: StreamLaw, intervals: float, *, observe: bool = False
    ) -> StreamConfig:
        """Of an environment.

        Args:
            law: Of the arrivals.
            intervals: Mean times between arrivals that an episode lasts.
            observe: See :class:`envs.stream.session.StreamConfig`.

        Raises:
            UnknownNameError: If a model is none of the known jobs.
            CaptureError: If a profile is asked for and is not there.
        """
        session = _session(self)
        interval_s = law.mean_interval_s(session.names, session.tables)
        return StreamConfig(
            cluster=self.cluster,
            jobs=session.jobs,
            law=law,
            horizon_s=intervals * interval_s,
            max_waiting=self.max_waiting,
            observe=observe,
        )

    def session(self) -> StreamSession:
        """Tables of the world, made once in a process; its episodes are of any law."""
        return _session(self)


@lru_cache(maxsize=32)
def _session(world: StreamWorld) -> StreamSession:
    return StreamSession(
        StreamConfig(
            cluster=world.cluster,
            jobs=world_jobs(world.models),
            max_waiting=world.max_waiting,
            observe=False,
        )
    )


#: Where the shipped policy was trained. Source: prices of these ship.
TRAINED_ON = (
    StreamWorld(cluster="dgx-a100:2", models=_KNOWN),
    StreamWorld(cluster="dgx-a100:4", models=_KNOWN),
    StreamWorld(cluster="dgx-a100:8", models=_KNOWN),
    StreamWorld(cluster="dgx-a100:4", models=_KNOWN_CAPTURED),
    StreamWorld(cluster="dgx-a100:10", models=_KNOWN_CAPTURED),
    StreamWorld(cluster="dgx-h100:3", models=_KNOWN_CAPTURED),
    StreamWorld(cluster="dgx-h100:7", models=_KNOWN_CAPTURED),
    StreamWorld(cluster="a40-pcie:4", models=_KNOWN_CAPTURED),
    StreamWorld(cluster="dgx-a100:4", models=_KNOWN, max_waiting=8),
    StreamWorld(cluster="dgx-h100:3", models=_KNOWN_CAPTURED, max_waiting=8),
    StreamWorld(cluster="dgx-a100:8", models=_KNOWN, max_waiting=8),
)


def world_jobs(models: Sequence[str]) -> tuple[JobType, ...]:
    """Jobs by their names.

    Args:
        models: Of built-in jobs, or ``pipedream-<name>``.

    Raises:
        UnknownNameError: If there is no such job.
        StrategyError: If there are none.
        CaptureError: If a profile is asked for and is not there.
    """
    if not models:
        raise StrategyError("models=(); a world has at least one job")
    known = {job.name: job for job in built_in_jobs()}
    if any(name in _PROFILED for name in models):
        known |= {job.name: job for job in profiled_jobs()}
    for name in models:
        if name not in known:
            raise UnknownNameError("job of a world", name, (*_CAPTURED, *_PROFILED))
    return tuple(known[name] for name in models)


def draw_stream_law(generator: np.random.Generator) -> StreamLaw:
    """Anything from half to one and a half of what the cluster can do, and beyond.

    Loads are drawn by their logarithms: where less is offered, a decision makes less of
    a difference, and more of them are needed to see it. Half of the deadlines are
    uniform, the others skewed to short or long ones; a quarter of the streams come in
    bursts.

    Args:
        generator: To draw with.
    """
    load = float(np.exp(generator.uniform(*np.log(_LOADS))))
    bursty = generator.random() < 0.25
    law = StreamLaw(load=load, process="bursty" if bursty else "poisson")
    if generator.random() < 0.5:
        return law
    beta = BetaLaw(skewness=float(generator.uniform(-6.0, 6.0)))
    return StreamLaw(load=load, process=law.process, beta=beta)
