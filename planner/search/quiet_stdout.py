"""Standard output kept free of what compiled solvers print."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

__all__ = ["quiet_stdout"]


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send what is written to file descriptor 1 to standard error.

    HiGHS, which ``scipy.optimize.milp`` calls, prints some lines there whatever its
    options are, and a command's JSON would no longer be JSON.

    The descriptor belongs to the whole process: what another thread prints meanwhile
    goes to standard error, too, and two threads must not be in here at once.
    """
    _flush()
    try:
        kept = os.dup(1)
    except OSError:
        # Nothing can arrive at a closed descriptor.
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        # C keeps what it prints to a pipe or a file, and would write it later.
        _flush()
        os.dup2(kept, 1)
        os.close(kept)


def _flush() -> None:
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()
    if sys.platform != "win32":
        ctypes.CDLL(None).fflush(None)
