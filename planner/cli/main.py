"""``meshwright``: parse, run one command, turn errors into one line and an exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

import tyro

from planner import __version__
from planner.cli.clusters import ClustersCommand
from planner.cli.explain import ExplainCommand
from planner.cli.export import ExportCommand
from planner.cli.models import ModelsCommand
from planner.cli.output import note
from planner.cli.plan import PlanCommand
from planner.cli.predict import PredictCommand
from planner.cli.probe import ProbeCommand
from planner.cli.run import RunCommand
from planner.errors import MeshwrightError

__all__ = ["main"]

_COMMANDS = {
    "plan": PlanCommand,
    "predict": PredictCommand,
    "run": RunCommand,
    "probe": ProbeCommand,
    "explain": ExplainCommand,
    "export": ExportCommand,
    "models": ModelsCommand,
    "clusters": ClustersCommand,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Without the program's name; ``sys.argv`` if None.
    Returns:
        0 done, 1 error, 2 no feasible plan.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given in (["--version"], ["-V"]):
        print(f"meshwright {__version__}")
        return 0
    level = os.environ.get("MESHWRIGHT_LOG", "WARNING").upper()
    logging.basicConfig(level=level, stream=sys.stderr)
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            _COMMANDS,
            prog="meshwright",
            description="Plan how a large torch model is split, and run the plan.",
            args=given,
        )
    except SystemExit as error:
        # tyro exits with 2 on a wrong flag; here 2 means that nothing fits.
        return 1 if error.code else 0
    try:
        command.run()
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


if __name__ == "__main__":
    sys.exit(main())
