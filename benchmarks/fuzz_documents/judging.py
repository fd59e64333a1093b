"""One document at a time, in a process of its own, within limits."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import random
import re
import resource
import shutil
import signal
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.fuzz_documents.kinds import KINDS
from benchmarks.fuzz_documents.mutations import mutate

__all__ = ["BAD", "OUTCOMES", "Worker", "judge", "keep", "mutation_path", "prepare"]

#: A document may take this long on a core of its own, this long by the clock of a
#: busy machine, and this much memory.
SECONDS, CLOCK_SECONDS, BYTES = 5.0, 60.0, 10**9
OUTCOMES = ("clean", "accepted", "traceback", "slow", "large")
#: Outcomes that fail.
BAD = OUTCOMES[2:]


class _LateError(BaseException):
    """Raised when a document takes too long; nothing catches it."""


def _late(*_: object) -> None:
    raise _LateError


def judge(kind: str, path: Path) -> tuple[str, str]:
    """Read one file as commands do, within the limit of time.

    Returns:
        A name of :data:`OUTCOMES`, and the message or the traceback.
    """
    from planner.errors import MeshwrightError

    before = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, CLOCK_SECONDS)
    try:
        KINDS[kind].read(path)
        found = "accepted", ""
    except MeshwrightError as error:
        found = "clean", str(error)
    except MemoryError:
        found = "large", traceback.format_exc()
    except _LateError:
        found = "slow", traceback.format_exc()
    except Exception:
        found = "traceback", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    took = time.process_time() - before
    return ("slow", f"{took:.1f} s") if took > SECONDS else found


def prepare(kind: str, folder: Path) -> list[str]:
    """Read the real documents of a kind, then limit time and memory of this process.

    Args:
        kind: A name of :data:`KINDS`.
        folder: Where they are written first.

    Returns:
        Those that are accepted: some are for another number of processes.
    """
    from planner.errors import MeshwrightError

    signal.signal(signal.SIGALRM, _late)
    path = folder / f"real{KINDS[kind].suffix}"
    found = {}
    for text in KINDS[kind].seeds():
        path.write_bytes(text.encode())
        # Once without a limit: libraries are loaded, and models are read.
        with contextlib.suppress(MeshwrightError):
            KINDS[kind].read(path)
        found[text] = judge(kind, path)
    originals = [text for text, (outcome, _) in found.items() if outcome == "accepted"]
    if not originals:
        raise SystemExit(f"{kind}: no real document is accepted: {found.popitem()[1]}")
    _limit_memory()
    return originals


def _limit_memory() -> None:
    """Allow a gigabyte above what the libraries have taken by now."""
    # Data, not addresses: libraries go on to map files of their own.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    taken = int(re.search(r"VmData:\s*(\d+)", status)[1]) * 1024  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_DATA, (taken + BYTES, taken + BYTES))


def mutation_path(kind: str, folder: Path) -> Path:
    """Return the file that holds the mutation which is judged now."""
    return folder / f"mutation{KINDS[kind].suffix}"


def keep(kind: str, folder: Path, number: int, outcome: str, why: str) -> None:
    """Keep a mutation that failed, and why: one for each last line of a traceback."""
    name = hashlib.sha256(why[-200:].encode(errors="replace")).hexdigest()[:8]
    path = folder / f"{outcome}-{name}{KINDS[kind].suffix}"
    if not path.exists():
        shutil.copy(mutation_path(kind, folder), path)
        path.with_suffix(".log").write_text(f"{number}\n{why}", errors="replace")


def _work(kind: str, folder: Path, pipe: Connection) -> None:
    """Judge the mutated file each time it is asked to; runs in a process of its own."""
    pipe.send(prepare(kind, folder))
    while pipe.recv():
        pipe.send(judge(kind, mutation_path(kind, folder)))


class Worker:
    """A process that judges mutations of one kind; it is started anew when it dies."""

    def __init__(self, kind: str, seed: int, folder: Path) -> None:
        self._kind, self._seed, self._folder = kind, seed, folder
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        arguments = (self._kind, self._folder, theirs)
        self._process = context.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(120):
            raise SystemExit(f"{self._kind}: the worker does not start")
        self._originals: list[str] = self._pipe.recv()

    def judge(self, number: int) -> tuple[str, str]:
        """Judge one mutation; a worker that dies or hangs is replaced."""
        rng = random.Random(f"{self._seed} {self._kind} {number}")
        raw = mutate(rng.choice(self._originals), self._kind, rng)
        mutation_path(self._kind, self._folder).write_bytes(raw)
        self._pipe.send(True)
        try:
            if self._pipe.poll(2 * CLOCK_SECONDS):
                found: tuple[str, str] = self._pipe.recv()
                return found
            found = "slow", f"no answer in {2 * CLOCK_SECONDS:g} s"
        except EOFError:
            found = "large", "the worker died"
        self._process.kill()
        self._process.join()
        self._start()
        return found

    def close(self) -> None:
        """End the process."""
        self._pipe.send(False)
        self._process.join(10)
