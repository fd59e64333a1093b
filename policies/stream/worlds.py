"""Worlds of the job stream: clusters with their jobs."""

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

#: Jobs that the shipped policy has never seen: three captured models and five of
#: PipeDream's graphs, from every family with more than one member.
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

#: Least and largest load in training.
_LOADS = (0.35, 1.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamWorld:
    """A cluster and the jobs that may arrive at it.

    Attributes:
        cluster: A cluster as :meth:`planner.cluster.Cluster.parse` reads it.
        models: Names of built-in jobs, and ``pipedream-<name>`` for PipeDream's.
        max_waiting: Places in the queue.
    """

    cluster: str
    models: tuple[str, ...]
    max_waiting: int = 0

    def config(
        self, law: StreamLaw, intervals: float, *, observe: bool = False
    ) -> StreamConfig:
        """Return the configuration of an environment.

        Args:
            law: Law of the arrivals.
            intervals: Length of an episode in mean times between arrivals.
            observe: See :class:`envs.stream.session.StreamConfig`.

        Raises:
            UnknownNameError: If there is no such job.
            CaptureError: If a profile is missing.
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
        """Return the world's session, made once a process, for episodes of any law."""
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


#: Worlds of the shipped policy's training. Their prices ship.
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
    """Look jobs up by their names.

    Args:
        models: Names of built-in jobs, or ``pipedream-<name>``.

    Raises:
        UnknownNameError: If there is no such job.
        StrategyError: If there are none.
        CaptureError: If a profile is missing.
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
    """Draw a law with a load from 0.35 to 1.8.

    Loads are log-uniform: at low load a decision makes less of a difference, and more
    of them are needed to learn from. Half of the laws have uniform deadlines, the
    others skewed ones; in a quarter of them jobs arrive in bursts.

    Args:
        generator: Generator to draw with.
    """
    load = float(np.exp(generator.uniform(*np.log(_LOADS))))
    bursty = generator.random() < 0.25
    law = StreamLaw(load=load, process="bursty" if bursty else "poisson")
    if generator.random() < 0.5:
        return law
    beta = BetaLaw(skewness=float(generator.uniform(-6.0, 6.0)))
    return StreamLaw(load=load, process=law.process, beta=beta)
