"""The processes that ``launch`` starts: a spawner, and the ranks that it forks.

``python -m executors.launching.worker`` reads a job from stdin and forks. Nobody
outlives its parent. Imports nothing heavy before the fork: threads that an import
starts do not live on in a forked process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import IO, Any

from executors.exception_chain import explain, own_error

__all__ = ["main"]

#: Linux: ask for a signal when the parent dies. Source: linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        # It died before the request was made.
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


class _Lines:
    """JSON lines to the launcher."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, kind: str, value: Any) -> None:
        line = json.dumps({"kind": kind, "value": value})
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()


def _call(job: dict[str, Any], messages: int) -> int:
    """Call the entry as one rank; exit code 0 if it returned."""
    with os.fdopen(messages, "w", encoding="utf-8") as stream:
        lines = _Lines(stream)

        def emit(value: Any) -> None:
            lines.send("message", value)

        module, _, name = job["entry"].partition(":")
        # What imports make stays; going through it is a quarter of their time.
        gc.disable()
        try:
            function = getattr(importlib.import_module(module), name)
            gc.freeze()
            gc.enable()
            lines.send("result", function(job["args"], emit))
        except BaseException as error:  # all of it belongs to the launcher
            traceback.print_exc()
            own = own_error(error)
            lines.send(
                "error",
                {
                    "type": type(own or error).__name__,
                    "text": str(own) if own else explain(error),
                    "traceback": traceback.format_exc(),
                },
            )
            return 1
    return 0


def _fork(job: dict[str, Any], index: int, spawner: int) -> int:
    """Start one rank.

    Returns:
        Its process id in the spawner; in the rank, 0.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    _die_with_parent(spawner)
    rank = job["ranks"][index]
    os.dup2(rank["output"], 1)
    os.dup2(rank["output"], 2)
    for other in job["ranks"]:
        os.close(other["output"])
        if other is not rank:
            os.close(other["messages"])
    os.close(job["control"])
    os.environ.update(rank["env"])
    return 0


def main() -> int:
    """Read a job from stdin and do it, as the spawner or as one of its ranks."""
    _die_with_parent(int(sys.argv[1]))
    job = json.load(sys.stdin)
    # Of a signal to all processes of a job only the ranks take notice, when they can.
    signal.pthread_sigmask(signal.SIG_BLOCK, job["blocked"])
    ranks = {_start(job, index): index for index in range(len(job["ranks"]))}
    left = dict.fromkeys(ranks.values(), job["restarts"])
    if not job["restarts"]:
        for rank in job["ranks"]:
            os.close(rank["messages"])
            os.close(rank["output"])
    with os.fdopen(job["control"], "w", encoding="utf-8") as stream:
        lines = _Lines(stream)
        for pid, index in ranks.items():
            lines.send("started", {"rank": index, "pid": pid})
        while ranks:
            pid, status = os.wait()
            if pid not in ranks:
                continue
            index, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            again = code != 0 and left[index] > 0
            lines.send("ended", {"rank": index, "code": code, "again": again})
            if again:
                left[index] -= 1
                pid = _start(job, index)
                ranks[pid] = index
                lines.send("started", {"rank": index, "pid": pid})
    return 0


def _start(job: dict[str, Any], index: int) -> int:
    """Fork one rank, which does the job and exits; its process id."""
    pid = _fork(job, index, os.getpid())
    if not pid:
        code = _call(job, job["ranks"][index]["messages"])
        sys.stdout.flush()
        sys.stderr.flush()
        # Taking a large interpreter apart takes seconds, and serves nobody.
        os._exit(code)
    return pid


if __name__ == "__main__":
    sys.exit(main())
