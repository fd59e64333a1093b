"""``meshwright``: parse, run one command, make errors one line and an exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tyro

from planner import __version__
from planner.cli.calibrate import CalibrateCommand
from planner.cli.clusters import ClustersCommand
from planner.cli.compare import CompareCommand
from planner.cli.evaluate import EvaluateCommand
from planner.cli.explain import ExplainCommand
from planner.cli.export import ExportCommand
from planner.cli.import_config import ImportCommand
from planner.cli.learning import WORLDS
from planner.cli.models import ModelsCommand
from planner.cli.output import note
from planner.cli.plan import PlanCommand
from planner.cli.predict import PredictCommand
from planner.cli.probe import ProbeCommand
from planner.cli.report import ReportCommand
from planner.cli.run import RunCommand
from planner.cli.train import TrainCommand
from planner.cli.verify import VerifyCommand
from planner.errors import MeshwrightError, UnknownNameError

__all__ = ["main"]

_COMMANDS: Mapping[str, Callable[..., Any]] = {
    "plan": PlanCommand,
    "predict": PredictCommand,
    "run": RunCommand,
    "verify": VerifyCommand,
    "probe": ProbeCommand,
    "calibrate": CalibrateCommand,
    "explain": ExplainCommand,
    "export": ExportCommand,
    "import": ImportCommand,
    "compare": CompareCommand,
    "report": ReportCommand,
    "train": TrainCommand,
    "evaluate": EvaluateCommand,
    "models": ModelsCommand,
    "clusters": ClustersCommand,
}

_DESCRIPTION = """Plan how a large torch model is split over the machines you have, and
run the plan. Exit codes: 0 done, 1 error, 2 no feasible plan. --version prints the
version; MESHWRIGHT_LOG=INFO shows what happens."""


class _Command(Protocol):
    def run(self) -> None: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Without the program's name; ``sys.argv`` if None.
    Returns:
        0 done, 1 error, 2 no feasible plan, 130 interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given in (["--version"], ["-V"]):
        print(f"meshwright {__version__}")
        return 0
    _start_logging()
    try:
        try:
            command = _parse(given)
        except SystemExit as error:
            # tyro exits with 2 on a wrong flag; here 2 means that nothing fits.
            return 1 if error.code else 0
        command.run()
        sys.stdout.flush()
    except MeshwrightError as error:
        note(f"meshwright: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        note("meshwright: interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of stdout has gone; nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _parse(given: Sequence[str]) -> _Command:
    """The command with its options.

    Raises:
        SystemExit: After help (code 0), or after saying what is wrong (another code).
        UnknownNameError: If there is no such command, or no such world to learn in.
    """
    # Without a command the help says more than an error would; it is still not a
    # result, and does not go to stdout.
    help_only = not given
    if given and not given[0].startswith("-") and given[0] not in _COMMANDS:
        raise UnknownNameError("command", given[0], _COMMANDS)
    if given and given[0] in {"train", "evaluate"} and len(given) > 1:
        world = given[1]
        if not world.startswith("-") and world not in WORLDS:
            raise UnknownNameError(f"world of {given[0]}", world, WORLDS)
    with contextlib.redirect_stdout(sys.stderr if help_only else sys.stdout):
        try:
            command: _Command = tyro.extras.subcommand_cli_from_dict(
                dict(_COMMANDS),
                prog="meshwright",
                description=" ".join(_DESCRIPTION.split()),
                args=["--help"] if help_only else list(given),
                config=(tyro.conf.FlagCreatePairsOff,),
            )
        except SystemExit:
            if help_only:
                raise SystemExit(1) from None
            raise
    return command


def _start_logging() -> None:
    name = os.environ.get("MESHWRIGHT_LOG", "WARNING").upper()
    levels = logging.getLevelNamesMapping()
    logging.basicConfig(level=levels.get(name, logging.WARNING), stream=sys.stderr)
    if name not in levels:
        note(f"meshwright: MESHWRIGHT_LOG={name} is no level; use {', '.join(levels)}")


if __name__ == "__main__":
    sys.exit(main())
