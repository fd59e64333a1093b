"""What the commands that train and judge have in common."""

from __future__ import annotations

from typing import Annotated

import tyro

from planner.cluster.detect import usable_cores
from planner.errors import StrategyError

__all__ = [
    "WORLDS",
    "RunFolder",
    "WeightsFolder",
    "processes",
    "read_seeds",
    "require_learning",
]

#: What is learned: the first word after train and evaluate.
WORLDS = ("partition", "job-stream", "job-stream-world")

RunFolder = Annotated[
    str,
    tyro.conf.arg(
        metavar="FOLDER",
        help="Of the run: settings, checkpoints, TensorBoard's files, and the policy. "
        "Given again, a run that was stopped goes on.",
    ),
]
WeightsFolder = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="FOLDER",
        help="Weights that training saved; those shipped by default.",
        help_behavior_hint="",
    ),
]


def require_learning() -> None:
    """Refuse before long work where the packages that learn are not installed.

    Raises:
        StrategyError: With the command that installs them.
    """
    try:
        import gymnasium  # noqa: F401
        import sb3_contrib  # noqa: F401
        import tensorboard  # noqa: F401
        import torch_geometric  # noqa: F401
    except ImportError as error:
        raise StrategyError(
            f"{error.name} is not installed; learning needs pip install "
            f"'meshwright[learn]'"
        ) from error


def processes(workers: int) -> int:
    """Processes behind ``--workers``: as many as there are cores for 0.

    Raises:
        StrategyError: If it is below 0.
    """
    if workers < 0:
        raise StrategyError(f"workers={workers}; give 0 or more processes")
    return workers or max(1, int(usable_cores()))


def read_seeds(text: str) -> range:
    """Seeds written ``FIRST:COUNT``.

    Raises:
        StrategyError: If they are written otherwise.
    """
    first, _, count = text.partition(":")
    if not (first.isdigit() and count.isdigit() and int(count) > 0):
        raise StrategyError(
            f"seeds {text!r}; write FIRST:COUNT, for instance 600:4 for 600 to 603"
        )
    return range(int(first), int(first) + int(count))
