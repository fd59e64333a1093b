"""The command ``meshwright train``: one command a world."""

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
    """Train a policy of one's own; called again with the same --out, it goes on."""

    world: Annotated[_World, tyro.conf.arg(name="")]

    def run(self) -> None:
        """Train."""
        self.world.run()
