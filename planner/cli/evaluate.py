"""The command ``meshwright evaluate``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from planner.cli.evaluate_job_stream import EvaluateJobStream, EvaluateJobStreamWorld
from planner.cli.evaluate_partition import EvaluatePartition

__all__ = ["EvaluateCommand"]

_World = (
    Annotated[EvaluatePartition, tyro.conf.subcommand("partition", prefix_name=False)]
    | Annotated[
        EvaluateJobStream, tyro.conf.subcommand("job-stream", prefix_name=False)
    ]
    | Annotated[
        EvaluateJobStreamWorld,
        tyro.conf.subcommand("job-stream-world", prefix_name=False),
    ]
)


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Evaluate a policy on worlds that it was not trained on."""

    world: Annotated[_World, tyro.conf.arg(name="")]

    def run(self) -> None:
        """Evaluate, and print."""
        self.world.run()
