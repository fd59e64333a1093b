"""Processes of ``meshwright run`` that are disturbed: started, watched, and counted."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

__all__ = ["ROOT", "Ended", "Started", "free_port", "rank_places"]

ROOT = Path(__file__).parents[1]
#: Longest that one command may take, in seconds.
LIMIT_S = 240.0
#: In this time what an ended command had started must end too, in seconds.
_ORPHAN_S = 10.0
_MARK = "MESHWRIGHT_FAULTS_MARK"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that has ended.

    Attributes:
        code: Exit code; below 0 if a signal ended it.
        out: Standard output.
        lines: Lines of standard error.
        orphans: Processes that it had started and that outlived it.
        took_s: Time until its end, from the fault if there was one, else its start.
        hung: True if it was killed because it did not end.
    """

    code: int
    out: str
    lines: tuple[str, ...]
    orphans: int
    took_s: float
    hung: bool

    @property
    def error(self) -> str:
        """The line that says why it failed; empty if none does."""
        own = [line for line in self.lines if line.startswith("meshwright: ")]
        return own[-1].removeprefix("meshwright: ") if own else ""

    @property
    def traceback(self) -> bool:
        """True if a Python traceback was printed."""
        return any(line.startswith("Traceback") for line in self.lines)


@dataclass(kw_only=True)
class Started:
    """A command that runs, in a session of its own, and all that it starts.

    Args:
        words: Of ``meshwright``.
        places: Environment of each process to start; one with nothing more by default.
    """

    words: Sequence[str]
    places: Sequence[Mapping[str, str]] = ({},)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    fault_at: float | None = None

    def __post_init__(self) -> None:
        self.begin = time.monotonic()
        self.lines: list[list[str]] = [[] for _ in self.places]
        self._out: list[str] = ["" for _ in self.places]
        self.processes = [self._start(place) for place in self.places]
        self._readers = [
            threading.Thread(target=read, args=(number,), daemon=True)
            for number in range(len(self.places))
            for read in (self._read_lines, self._read_out)
        ]
        for reader in self._readers:
            reader.start()

    def _start(self, place: Mapping[str, str]) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        return subprocess.Popen(
            [sys.executable, "-m", "planner.cli.main", *self.words],
            env={**environment, **place, _MARK: self.mark},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _read_lines(self, number: int) -> None:
        stream = self.processes[number].stderr
        assert stream is not None
        self.lines[number].extend(())
        for line in stream:
            self.lines[number].append(line.rstrip())

    def _read_out(self, number: int) -> None:
        stream = self.processes[number].stdout
        assert stream is not None
        self._out[number] = stream.read()

    @property
    def running(self) -> bool:
        """True while one of its processes has not ended."""
        return any(process.poll() is None for process in self.processes)

    def wait_for_step(self, step: int) -> bool:
        """Wait until a step is reported; False if the command ends before."""
        wanted = f"step {step} of "
        while self.running:
            if any(line.startswith(wanted) for line in list(self.lines[0])):
                return True
            self._require_time()
            time.sleep(0.005)
        return False

    def wait_for_ranks(self, world: int) -> list[psutil.Process]:
        """Wait until the ranks are started; none if the command ends before."""
        while self.running:
            found = self.ranks()
            if len(found) == world:
                return found
            self._require_time()
            time.sleep(0.02)
        return []

    def ranks(self) -> list[psutil.Process]:
        """Processes below the launcher that have started none themselves."""
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(self.processes[0].pid).children(recursive=True)
            spawners = {process.ppid() for process in below}
            return [one for one in below if one.pid not in spawners]
        return []

    def _require_time(self) -> None:
        if time.monotonic() - self.begin > LIMIT_S:
            for process in self.processes:
                process.kill()

    def fault(self) -> None:
        """Note that the fault is made now."""
        self.fault_at = time.monotonic()

    def end(self) -> list[Ended]:
        """Wait for the end, count what is left, and kill that."""
        ends, hung = [], []
        for process in self.processes:
            left = self.begin + LIMIT_S - time.monotonic()
            try:
                process.wait(max(0.1, left))
                hung.append(False)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                hung.append(True)
            ends.append(time.monotonic() - (self.fault_at or self.begin))
        orphans = self._orphans()
        for reader in self._readers:
            reader.join(10.0)
        return [
            Ended(
                code=process.returncode,
                out=self._out[number],
                lines=tuple(self.lines[number]),
                orphans=orphans if number == 0 else 0,
                took_s=ends[number],
                hung=hung[number],
            )
            for number, process in enumerate(self.processes)
        ]

    def _orphans(self) -> int:
        deadline = time.monotonic() + _ORPHAN_S
        while (left := list(self._marked())) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return len(left)

    def _marked(self) -> Iterator[psutil.Process]:
        """Living processes with this command's mark in their environment."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get(_MARK) == self.mark:
                    yield process


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def rank_places(world: int, port: int) -> list[dict[str, str]]:
    """Environments of ranks that are started one by one, as srun does."""
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        for rank in range(world)
    ]
