"""What a launched process does: call a function, report, not outlive its parent.

Run as ``python -m executors.worker`` by :func:`executors.launch`, which says the rest
in the environment. Imports nothing heavy before it is tied to its parent.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import IO, Any

__all__ = ["ENTRY", "MESSAGES", "PARENT", "main"]

#: Environment: ``module:function`` to call, file descriptor to write messages to,
#: process id of the launcher.
ENTRY = "MESHWRIGHT_ENTRY"
MESSAGES = "MESHWRIGHT_MESSAGES"
PARENT = "MESHWRIGHT_PARENT"

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


class _Messages:
    """JSON lines to the launcher."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, kind: str, value: Any) -> None:
        line = json.dumps({"kind": kind, "value": value})
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()


def main() -> int:
    """Call the entry with the arguments on stdin; exit code 0 if it returned."""
    _die_with_parent(int(os.environ[PARENT]))
    arguments = json.load(sys.stdin)
    with os.fdopen(int(os.environ[MESSAGES]), "w", encoding="utf-8") as stream:
        messages = _Messages(stream)

        def emit(value: Any) -> None:
            messages.send("message", value)

        module, _, name = os.environ[ENTRY].partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
            messages.send("result", function(arguments, emit))
        except BaseException as error:  # all of it belongs to the launcher
            traceback.print_exc()
            text = str(error).strip() or type(error).__name__
            messages.send("error", {"type": type(error).__name__, "text": text})
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
