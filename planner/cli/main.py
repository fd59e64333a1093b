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
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

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


_T = TypeVar("_T")
#: Columns in which tyro breaks no line of an error.
_WIDE = 10_000
#: What is written otherwise; no one types the choice of no value.
_REWORDED = {
    "{None}|": "",
    "'None', ": "",
    "; argument helptext: ": "; give ",
    "; for full helptext, see ": "; for full helptext, run ",
    "; for full helptext, run: ": "; for full helptext, run ",
}


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
        SystemExit: After help: code 0 if it was asked for.
        MeshwrightError: If an option is wrong or missing, with exit code 1: tyro's own
            2 means here that nothing fits.
        UnknownNameError: If there is no such command, or no such world to learn in.
    """
    config = (tyro.conf.FlagCreatePairsOff,)
    if given and not given[0].startswith("-"):
        name, *rest = given
        if name not in _COMMANDS:
            raise UnknownNameError("command", name, _COMMANDS)
        if name in _WORLDS_OF and rest and not rest[0].startswith("-"):
            _check_world(name, rest[0])
        kind, prog = _load(name), f"meshwright {name}"
        return _in_one_line(lambda: tyro.cli(kind, prog=prog, args=rest, config=config))
    # Without a command, help is more useful than an error; it is still no result,
    # and does not go to stdout.
    commands: dict[str, Callable[..., _Command]]
    commands = {name: _load(name) for name in _COMMANDS}
    with contextlib.redirect_stdout(sys.stdout if given else sys.stderr):
        try:
            _in_one_line(
                lambda: tyro.extras.subcommand_cli_from_dict(
                    commands,
                    prog="meshwright",
                    description=" ".join(_DESCRIPTION.split()),
                    args=given or ["--help"],
                    config=config,
                )
            )
        except SystemExit:
            if given:
                raise
    raise SystemExit(1)


def _in_one_line(parse: Callable[[], _T]) -> _T:
    """Parse options, and raise what tyro says of wrong ones as one line.

    tyro writes a box as wide as the terminal, whose lines break in the middle of words:
    its text is taken from a second call, without a terminal.

    Args:
        parse: Calls tyro.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = parse()
        if said.getvalue():
            note(said.getvalue())
        return found
    except SystemExit as error:
        if not error.code:
            raise
    said, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(_WIDE)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            parse()
    except SystemExit:
        raise MeshwrightError(_flattened(said.getvalue())) from None
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    raise AssertionError("options were wrong, then right")


def _flattened(box: str) -> str:
    """Return the text of a box of tyro's: title, message, near names, where help is.

    Explanations of options are left out; ``--help`` has them.
    """
    first, *lines = box.splitlines()
    title = first.strip("+-╭─╮ ")
    sections: list[tuple[str, list[str]]] = [("", [])]
    for line in (edged[1:-1] for edged in lines[:-1]):
        text, indent = line.strip(), len(line) - len(line.lstrip()) - 1
        head, items = sections[-1]
        if not set(text) - set("-─"):
            sections.append(("", []))
        elif indent == 0:
            sections[-1] = (f"{head} {text}".strip(), items)
        elif indent == 4 and not (items and head.startswith("Argument helptext")):
            items.append(text)
    texts = [
        f"{head[0].lower()}{head[1:]} {', '.join(items)}".strip().rstrip(".")
        for head, items in sections
        if head and not head.startswith("Got errors")
    ] or [" ".join(lines)]
    if not any(word in texts[0] for word in title.lower().split()):
        texts[0] = f"{title.lower()}: {texts[0]}"
    said = "; ".join(texts)
    for written, wanted in _REWORDED.items():
        said = said.replace(written, wanted)
    return said


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
