"""Standard output while a compiled solver prints."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PRINTS = """
import ctypes, os
from planner.search.quiet_stdout import quiet_stdout
c = ctypes.CDLL(None)
print("before")
try:
    with quiet_stdout():
        os.write(1, b"descriptor\\n")
        c.printf(b"buffered\\n")
        {inside}
except ValueError:
    pass
print("after")
c.printf(b"c after\\n")
"""


@pytest.mark.parametrize("inside", ["print('python')", "raise ValueError"])
def test_what_a_solver_prints_does_not_reach_stdout(inside: str) -> None:
    code = _PRINTS.format(inside=inside)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert sorted(ended.stdout.splitlines()) == ["after", "before", "c after"]
    assert {"descriptor", "buffered"} <= set(ended.stderr.splitlines())


def test_a_closed_stdout_is_no_error() -> None:
    code = (
        "import os\n"
        "from planner.search.quiet_stdout import quiet_stdout\n"
        "os.close(1)\n"
        "with quiet_stdout():\n    os.write(2, b'inside')\n"
        "try:\n    os.fstat(1)\nexcept OSError:\n    os.write(2, b' closed')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ended.stderr.startswith("inside closed")
