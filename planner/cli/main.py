"""``meshwright``: parse, run one command, make errors one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

import tyro

from planner import __version__
from planner.cli.output import note
from planner.errors import MeshwrightError, UnknownNameError

__all__ = ["main"]

#: Class of each command; only the one that is asked for is imported.
_COMMANDS: Mapping[str, str] = {
    "plan": "planner.cli.plan:PlanCommand",
    "admit": "planner.cli.admit:AdmitCommand",
    "serve": "planner.cli.serve:ServeCommand",
    "federate": "planner.cli.federate:FederateCommand",
    "predict": "planner.cli.strategies:PredictCommand",
    "run": "planner.cli.run:RunCommand",
    "convert": "planner.cli.convert:ConvertCommand",
    "verify": "planner.cli.verify:VerifyCommand",
    "probe": "planner.cli.machines:ProbeCommand",
    "calibrate": "planner.cli.machines:CalibrateCommand",
    "explain": "planner.cli.plan_files:ExplainCommand",
    "export": "planner.cli.plan_files:ExportCommand",
    "import": "planner.cli.strategies:ImportCommand",
    "compare": "planner.cli.strategies:CompareCommand",
    "report": "planner.cli.plan_files:ReportCommand",
    "train": "planner.cli.train:TrainCommand",
    "evaluate": "planner.cli.evaluate:EvaluateCommand",
    "methods": "planner.cli.strategies:MethodsCommand",
    "models": "planner.cli.machines:ModelsCommand",
    "clusters": "planner.cli.machines:ClustersCommand",
}
#: Logs when code is compiled, which takes seconds.
_COMPILING = "planner.simulate.compiled"
_WORLDS_OF = ("train", "evaluate")

_DESCRIPTION = """Plan how a large torch model is split over the machines you have, and
run the plan. Exit codes: 0 done, 1 error, 2 no feasible plan, 3 a loss that is not
finite, 75 stopped by a signal after a checkpoint. --version prints the
version; MESHWRIGHT_LOG=INFO shows what happens."""


class _Command(Protocol):
    def run(self) -> None: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Without the program's name; ``sys.argv`` if None.
    Returns:
        0 done, 1 error, 2 no feasible plan, 3 a loss that is not finite, 75 stopped by
        a signal after a checkpoint, 130 interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:
        # Whoever started this has closed it.
        sys.stdout = io.TextIOWrapper(io.BytesIO())
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
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # The reader of stdout has gone, or its disk is full; nothing more can be
        # written there, as Python would try when it ends.
        if error.errno == errno.ENOSPC:
            note("meshwright: no space is left where the result goes; free some")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _parse(given: Sequence[str]) -> _Command:
    """The command with its options.

    Raises:
        SystemExit: After help (code 0), or after naming the mistake (another code).
        UnknownNameError: If there is no such command, or no such world to learn in.
    """
    config = (tyro.conf.FlagCreatePairsOff,)
    if given and not given[0].startswith("-"):
        name, *rest = given
        if name not in _COMMANDS:
            raise UnknownNameError("command", name, _COMMANDS)
        if name in _WORLDS_OF and rest and not rest[0].startswith("-"):
            _check_world(name, rest[0])
        command: _Command = tyro.cli(
            _load(name), prog=f"meshwright {name}", args=rest, config=config
        )
        return command
    # Without a command, help is more useful than an error; it is still no result,
    # and does not go to stdout.
    with contextlib.redirect_stdout(sys.stdout if given else sys.stderr):
        try:
            tyro.extras.subcommand_cli_from_dict(
                {name: _load(name) for name in _COMMANDS},
                prog="meshwright",
                description=" ".join(_DESCRIPTION.split()),
                args=given or ["--help"],
                config=config,
            )
        except SystemExit:
            if given:
                raise
    raise SystemExit(1)


def _load(name: str) -> type[_Command]:
    """Import the class of a command."""
    module, _, command = _COMMANDS[name].partition(":")
    found: type[_Command] = getattr(importlib.import_module(module), command)
    return found


def _check_world(name: str, world: str) -> None:
    from planner.cli.learning import WORLDS

    if world not in WORLDS[name]:
        raise UnknownNameError(f"world of {name}", world, WORLDS[name])


class _Progress(logging.Handler):
    """Writes what takes long to stderr, as commands write it themselves."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


def _start_logging() -> None:
    name = os.environ.get("MESHWRIGHT_LOG", "WARNING").upper()
    levels = logging.getLevelNamesMapping()
    logging.basicConfig(level=levels.get(name, logging.WARNING), stream=sys.stderr)
    if name not in levels:
        note(f"meshwright: MESHWRIGHT_LOG={name} is no level; use {', '.join(levels)}")
    compiling = logging.getLogger(_COMPILING)
    compiling.setLevel(logging.INFO)
    compiling.handlers, compiling.propagate = [_Progress()], False


if __name__ == "__main__":
    sys.exit(main())
