"""What the checks of exporters share: environments, plans, and counting.

A check is one script a target, started with the project's Python. It exports plans,
installs the pinned target into an environment of its own, and starts itself there
with the folder of what was exported: the target's own code reads it, Meshwright's does
not. EXPORTER_VENVS names a folder to keep environments in; PIP_ARGS goes on to pip.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["check_in_environment", "export_plans", "judge", "same"]

ROOT = Path(__file__).parents[2]


def export_plans(target: str, plans: Mapping[str, Plan], out: Path) -> tuple[int, int]:
    """Export all plans that a target can express.

    Returns:
        How many were exported, how many were refused.
    """
    from planner.errors import ExportError

    refused = 0
    for name, plan in plans.items():
        try:
            plan.export(target, out / name.replace(" ", "-"))
        except ExportError as error:
            refused += 1
            print(f"refused {name}: {str(error).partition('. ')[0]}")
    return len(plans) - refused, refused


def check_in_environment(
    script: str,
    target: str,
    plans: Mapping[str, Plan],
    packages: Sequence[str],
    prepare: Callable[[Path, Path], None] | None = None,
) -> int:
    """Export, install, and start a script again with the target's own Python.

    Args:
        script: Path of the check.
        target: As people type it.
        plans: What is exported.
        packages: Requirements of the environment.
        prepare: Called with the environment's Python and the environment's folder.

    Returns:
        Exit code of the check.
    """
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        print(f"== exporting to {target}")
        exported, refused = export_plans(target, plans, out)
        print(f"{exported} exported, {refused} refused")
        kept = Path(os.environ.get("EXPORTER_VENVS", scratch)).absolute()
        folder = kept / target
        python = folder / "bin" / "python"
        print(f"== installing {' '.join(packages)}")
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        # Compiling all of torch's files takes three times as long as installing them.
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
        pip += ["--disable-pip-version-check"]
        extra = shlex.split(os.environ.get("PIP_ARGS", ""))
        subprocess.run([*pip, *extra, *packages], check=True)
        if prepare is not None:
            prepare(python, folder)
        print("== reading them with the target's own code")
        command = [str(python), "-W", "ignore", script, str(out)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return subprocess.run(command, env=environment, check=False).returncode


def judge(out: str, check: Callable[[Path, dict[str, Any]], None]) -> int:
    """Check every exported folder and count.

    Args:
        out: Holds a folder a plan.
        check: Raises if the folder does not say what the plan in it does.

    Returns:
        1 if any failed or there was nothing to check, else 0.
    """
    passed = failed = 0
    for folder in sorted(Path(out).iterdir()):
        plan = json.loads((folder / "plan.json").read_text())
        try:
            check(folder, plan)
        except BaseException as error:
            # A parser may leave by SystemExit; that is a failure like any other.
            if isinstance(error, KeyboardInterrupt):
                raise
            failed += 1
            traceback.print_exc()
            print(f"FAILED {folder.name}: {type(error).__name__}: {error}")
        else:
            passed += 1
            print(f"passed {folder.name}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


def same(what: str, have: Any, want: Any) -> None:
    """Raise unless the target reads what the plan says.

    Raises:
        AssertionError: With the beginning of both.
    """
    if have != want:
        both = [f"{value!r:.300}" for value in (have, want)]
        raise AssertionError(f"{what} is {both[0]}, the plan says {both[1]}")
