"""Start local processes, one a rank, and answer for every one of them.

Whatever happens (a rank that dies, Ctrl-C, SIGTERM, a launcher killed outright), no
process is left behind.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import planner.errors
from executors.worker import ENTRY, MESSAGES, PARENT
from planner.errors import ExecutionError, MeshwrightError, RankFailedError

__all__ = ["launch"]

_LOG = logging.getLogger(__name__)

#: Output lines of each rank kept for the message, should it die.
_KEPT_LINES = 40
#: After a first failure, how long others may fail too, in seconds: the culprit is
#: not always the first to be seen.
_GRACE_S = 0.5
#: What a rank says whose peer died: a consequence, not a cause.
_CONSEQUENCE = re.compile(
    r"closed by peer|Connection reset|Broken pipe|Connection refused|DistNetworkError"
    r"|Socket|NCCL .*remote|timed out",
    re.IGNORECASE,
)


@dataclass(kw_only=True)
class _Rank:
    """A process, and what is known of it."""

    index: int
    process: subprocess.Popen[bytes]
    messages: int
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    result: Any = None
    error: dict[str, str] | None = None
    pending: dict[int, bytes] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        code = self.process.poll()
        return self.error is not None or (code is not None and code != 0)

    @property
    def blame(self) -> int:
        """How likely it is the cause: killed 0, its own error 1, consequence 2."""
        code = self.process.poll()
        if code is not None and code < 0 and self.error is None:
            return 0
        text = self.error["text"] if self.error else "\n".join(self.lines)
        return 2 if _CONSEQUENCE.search(text) else 1


def launch(
    entry: str,
    args: Mapping[str, Any],
    *,
    processes: int,
    on_message: Callable[[int, Any], None] | None = None,
    threads: int = 1,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> list[Any]:
    """Call a function in each of several new processes that can form a group.

    Each has the environment that torchrun gives (RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR, MASTER_PORT), a session of its own, and this process's ``sys.path``.

    Args:
        entry: ``module:function``; called as ``function(args, emit)``, where ``emit``
            sends any JSON value to ``on_message``.
        args: JSON values, the same for all.
        processes: How many.
        on_message: Called as ``on_message(rank, value)``, in this thread.
        threads: OMP_NUM_THREADS of each.
        env: Environment variables on top of this process's.
        timeout_s: Longest that all of it may take, in seconds; None for ever.

    Returns:
        What each call returned, by rank.

    Raises:
        RankFailedError: If a rank died or raised: which one, how, its last words. The
            others have been ended.
        MeshwrightError: The very error, if that is what a rank raised.
        ExecutionError: If the time was not enough.
    """
    if processes < 1:
        raise ExecutionError(f"processes={processes}; launch at least 1")
    ranks: list[_Rank] = []
    with _sigterm_raises(), tempfile.TemporaryFile() as arguments:
        arguments.write(json.dumps(dict(args)).encode())
        arguments.flush()
        try:
            port = _free_port()
            for index in range(processes):
                variables = _environment(
                    entry,
                    index=index,
                    processes=processes,
                    port=port,
                    threads=threads,
                    env=env,
                )
                ranks.append(_start(index, variables, arguments.fileno()))
            _attend(ranks, on_message, timeout_s)
        finally:
            _end(ranks)
    return [rank.result for rank in ranks]


def _environment(
    entry: str,
    *,
    index: int,
    processes: int,
    port: int,
    threads: int,
    env: Mapping[str, str] | None,
) -> dict[str, str]:
    path = [folder or str(Path.cwd()) for folder in sys.path]
    variables = {
        **os.environ,
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(path),
        ENTRY: entry,
        PARENT: str(os.getpid()),
    }
    if sys.platform == "linux" and Path("/sys/class/net/lo").exists():
        # gloo would look its own host name up, which not every machine can.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return variables | dict(env or {})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _start(index: int, variables: dict[str, str], arguments: int) -> _Rank:
    read, write = os.pipe()
    try:
        # A description of its own: one that is inherited shares its position.
        with open(f"/dev/fd/{arguments}", "rb") as stdin:
            process = subprocess.Popen(
                [sys.executable, "-m", "executors.worker"],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**variables, MESSAGES: str(write)},
                pass_fds=(write,),
                start_new_session=True,
            )
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    return _Rank(index=index, process=process, messages=read)


def _attend(
    ranks: list[_Rank],
    on_message: Callable[[int, Any], None] | None,
    timeout_s: float | None,
) -> None:
    """Read what the ranks say until all are done, or raise for the one that failed."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    failed_at: float | None = None
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            assert rank.process.stdout is not None
            for stream in (rank.messages, rank.process.stdout.fileno()):
                os.set_blocking(stream, False)
                selector.register(stream, selectors.EVENT_READ, rank)
        while True:
            for key, _ in selector.select(timeout=0.05):
                if not _read(key.data, key.fd, on_message):
                    selector.unregister(key.fd)
            now = time.monotonic()
            if failed_at is None and any(rank.failed for rank in ranks):
                failed_at = now
            if failed_at is not None and now - failed_at > _GRACE_S:
                _raise_for(ranks)
            if all(rank.process.poll() == 0 for rank in ranks):
                _drain(selector, on_message)
                return
            if deadline is not None and now > deadline:
                raise ExecutionError(
                    f"{len(ranks)} ranks did not end within {timeout_s:g} s and were "
                    f"stopped; allow more time, or look at what they wait for"
                )


def _drain(
    selector: selectors.BaseSelector, on_message: Callable[[int, Any], None] | None
) -> None:
    for key in list(selector.get_map().values()):
        while _read(key.data, key.fd, on_message):
            pass


def _read(
    rank: _Rank, stream: int, on_message: Callable[[int, Any], None] | None
) -> bool:
    """Take in what there is; False at the end of the stream."""
    try:
        data = os.read(stream, 1 << 16)
    except BlockingIOError:
        # Kept open by a process that the rank started: nothing more to come.
        return False
    *lines, rest = (rank.pending.pop(stream, b"") + data).split(b"\n")
    rank.pending[stream] = rest
    for line in lines:
        text = line.decode(errors="replace")
        if stream != rank.messages:
            rank.lines.append(text)
            _LOG.debug("rank %d: %s", rank.index, text)
            continue
        message = json.loads(text)
        if message["kind"] == "message":
            if on_message is not None:
                on_message(rank.index, message["value"])
        elif message["kind"] == "result":
            rank.result = message["value"]
        else:
            rank.error = message["value"]
    return bool(data)


def _raise_for(ranks: list[_Rank]) -> None:
    rank = min((r for r in ranks if r.failed), key=lambda r: (r.blame, r.index))
    if rank.error is not None:
        kind = getattr(planner.errors, rank.error["type"], None)
        if isinstance(kind, type) and issubclass(kind, MeshwrightError):
            # Some are made of parts; none is remade out of its text.
            raise kind.__new__(kind, rank.error["text"])
        first = rank.error["text"].splitlines()[0]
        raise RankFailedError(
            f"rank {rank.index} of {len(ranks)} raised {rank.error['type']}: {first}; "
            f"the other ranks were stopped"
        )
    code = rank.process.poll()
    assert code is not None
    how = (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited {code}"
    )
    said = " | ".join(line.strip() for line in list(rank.lines)[-3:] if line.strip())
    raise RankFailedError(
        f"rank {rank.index} of {len(ranks)} {how}; the other ranks were stopped"
        + (f"; its last output: {said}" if said else "")
    )


def _end(ranks: list[_Rank]) -> None:
    """Kill whatever is left, with all that it started, and close every pipe."""
    for rank in ranks:
        # Also where the rank itself is gone: what it started may still run.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
        os.close(rank.messages)
        if rank.process.stdout is not None:
            rank.process.stdout.close()


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that ``finally`` runs, for the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
