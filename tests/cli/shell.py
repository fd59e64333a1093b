"""Running the command line: in this process, or as users do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planner.cli.main import main

__all__ = ["Answer", "ask", "meshwright", "start"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """All of stdout, which must be one document."""
        assert self.out, self.err
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line that says what was wrong, without the program's name."""
        assert self.code in (1, 2), self
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("meshwright: ")
        return lines[0].removeprefix("meshwright: ")


def ask(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Answer:
    """Run ``meshwright`` with these words in this process."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    return Answer(code=code, out=said.out, err=_lasting(said.err))


def _lasting(err: str) -> str:
    """Return stderr without the note that kernels are compiled, said the first time."""
    lines = err.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("compiling kernels"))


def _command(words: Sequence[str | Path]) -> list[str]:
    return [sys.executable, "-m", "planner.cli.main", *map(str, words)]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def meshwright(*words: str | Path, cwd: Path | None = None) -> Answer:
    """Run ``meshwright`` as a process of its own."""
    ran = subprocess.run(
        _command(words),
        cwd=cwd,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    return Answer(code=ran.returncode, out=ran.stdout, err=_lasting(ran.stderr))


def start(*words: str | Path) -> subprocess.Popen[str]:
    """Start ``meshwright`` and do not wait for it."""
    return subprocess.Popen(
        _command(words),
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
