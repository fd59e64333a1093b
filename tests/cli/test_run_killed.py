"""No process is left of a run that ends early."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cli.shell import start


@pytest.fixture
def running(plan_file: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that is far from its end when it first speaks."""
    # Programs that a shell puts in the background inherit a SIGINT that is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with start("run", plan_file, "--steps", "200") as process:
        signal.signal(signal.SIGINT, before)
        yield process
        process.kill()


def _none_left(ranks: list[psutil.Process]) -> None:
    """None of them runs any more.

    One whose launcher was killed is a zombie until the first process of the system,
    which in a container may take its time, has asked after it.
    """
    deadline = time.monotonic() + 10
    while alive := [rank for rank in ranks if _runs(rank)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _leaves(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Processes below the launcher that have started none themselves: the ranks."""
    try:
        below = psutil.Process(process.pid).children(recursive=True)
        return [one for one in below if not one.children()]
    except psutil.NoSuchProcess:
        return []


def _started(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Everything below the launcher, as soon as both ranks are there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if len(_leaves(process)) == 2:
            return psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    pytest.fail("two ranks were not started within a minute")


def _wait_for_step(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            return
    pytest.fail("the run ended before it trained")


def test_a_killed_rank_ends_the_run(running: subprocess.Popen[str]) -> None:
    _wait_for_step(running)
    ranks = _leaves(running)
    assert len(ranks) == 2
    ranks[1].kill()
    out, err = running.communicate(timeout=30)
    assert running.returncode == 1
    assert out == ""
    last = err.splitlines()[-1]
    assert re.match(r"meshwright: rank [01] of 2 was killed by SIGKILL; ", last)
    assert "Traceback" not in err
    _none_left(ranks)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_leaves_nothing(
    number: signal.Signals, code: int, running: subprocess.Popen[str]
) -> None:
    ranks = _started(running)
    running.send_signal(number)
    _, err = running.communicate(timeout=30)
    assert running.returncode == code
    assert "Traceback" not in err
    _none_left(ranks)


def test_a_killed_launcher_takes_its_ranks_along(
    running: subprocess.Popen[str],
) -> None:
    ranks = _started(running)
    running.kill()
    running.communicate(timeout=30)
    _none_left(ranks)
