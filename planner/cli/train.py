"""The command ``meshwright train``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from planner.cli.train_job_stream import TrainJobStream, TrainJobStreamWorld
from planner.cli.train_partition import TrainPartition

__all__ = ["TrainCommand"]

_World = (
    Annotated[TrainPartition, tyro.conf.subcommand("partition", prefix_name=False)]
    | Annotated[TrainJobStream, tyro.conf.subcommand("job-stream", prefix_name=False)]
    | Annotated[
        TrainJobStreamWorld,
        tyro.conf.subcommand("job-stream-world", prefix_name=False),
    ]
)


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a policy; the same command resumes a run that was stopped."""

    world: Annotated[_World, tyro.conf.arg(name="")]

    def run(self) -> None:
        """Train."""
        self.world.run()
