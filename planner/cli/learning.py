"""Options and checks of the commands train and evaluate."""

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

#: Subcommands of train and evaluate.
WORLDS = {
    "train": ("partition", "job-stream", "job-stream-world", "elastic"),
    "evaluate": ("partition", "job-stream", "job-stream-world", "elastic"),
}

RunFolder = Annotated[
    str,
    tyro.conf.arg(
        metavar="FOLDER",
        help="Folder of the run: settings, checkpoints, TensorBoard's files, and the "
        "policy. A run that was stopped is resumed.",
    ),
]
WeightsFolder = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="FOLDER",
        help="Folder of weights that training saved; by default those that ship.",
        help_behavior_hint="",
    ),
]


def require_learning() -> None:
    """Check that the packages for learning are installed.

    Raises:
        StrategyError: With the command that installs them.
    """
    try:
        import gymnasium  # noqa: F401
        import sb3_contrib  # noqa: F401
        import tensorboard  # noqa: F401
    except ImportError as error:
        raise StrategyError(
            f"{error.name} is not installed; learning needs pip install "
            f"'meshwright[learn]'"
        ) from error


def processes(workers: int) -> int:
    """Return the number of processes for ``--workers``; 0 for one a core.

    Raises:
        StrategyError: If it is below 0.
    """
    if workers < 0:
        raise StrategyError(f"workers={workers}; give 0 or more processes")
    return workers or max(1, int(usable_cores()))


def read_seeds(text: str, what: str = "seeds") -> range:
    """Read seeds, or other numbers, written ``FIRST:COUNT``.

    Raises:
        StrategyError: If they are written otherwise.
    """
    first, _, count = text.partition(":")
    if not (first.isdigit() and count.isdigit() and int(count) > 0):
        raise StrategyError(
            f"{what} {text!r}; write FIRST:COUNT, for instance 600:4 for 600 to 603"
        )
    return range(int(first), int(first) + int(count))
