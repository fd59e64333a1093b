"""Machine code for the hot loops, kept between runs where that is possible."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numba.core.caching import FunctionCache
from numba.core.runtime import rtsys
from numpy.typing import NDArray

__all__ = ["compiled", "copy_into", "inlined", "inner"]

_log = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., object])


class _Kept(FunctionCache):  # type: ignore[misc]
    """Code on disk, dropped when anything that it was made from has changed.

    numba looks at the function's own file alone, though constants and functions of
    other files are compiled in, too. It reads the whole index of a function, types of
    arguments included, before it looks whether the source has changed: a type that has
    moved since is no error here. Seen with numba 0.61 to 0.66.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)
        index = self._cache_file
        index._source_stamp = (index._source_stamp, _compiled_in(function))

    def load_overload(self, signature: object, target_context: object) -> object:
        """Code for types of arguments; None if there is none to be used.

        numba's own function first loads all that compiling needs, a third of a second;
        code that is there already needs the runtime alone.
        """
        rtsys.initialize(target_context)
        try:
            with self._guard_against_spurious_io_errors():
                found: object = self._load_overload(signature, target_context)
                if found is not None:
                    return found
        except (ImportError, AttributeError):
            self.flush()
        _announce(kept=True)
        return None


def _compiled_in(function: Callable[..., object]) -> tuple[object, ...]:
    """List what a function's code has from outside its own file.

    Files of the functions that it calls, and of those that they call, each with its
    time and size; constants, and names of fields, that they take from modules.
    """
    found: list[object] = []
    waiting, seen = [function], {function}
    while waiting:
        here = waiting.pop()
        for name in here.__code__.co_names:
            value = here.__globals__.get(name)
            constant = value if isinstance(value, tuple) else (value,)
            if all(isinstance(one, int | float | str) for one in constant):
                found.append((name, *constant))
            elif fields := getattr(value, "_fields", None):
                found.append((name, fields))
            part = getattr(value, "py_func", None)
            if part is not None and part not in seen:
                seen.add(part)
                waiting.append(part)
                with suppress(OSError):
                    file = Path(part.__code__.co_filename).stat()
                    found.append((name, file.st_mtime, file.st_size))
    return tuple(found)


@cache
def _announce(*, kept: bool) -> None:
    """Log, once in a process, that kernels are compiled now."""
    if kept:
        _log.info("compiling kernels once, about 10 s; kept for later runs ...")
    else:
        _log.info(
            "compiling kernels, about 10 s in every run, as no folder can be written "
            "to; set NUMBA_CACHE_DIR to one"
        )


def compiled(function: _Function) -> _Function:
    """Compile on first call, with the result kept on disk for later runs.

    An install that cannot be written to, with a home that cannot either, leaves numba
    no place to keep code; it then compiles once in each process.
    """
    return _kept(function, numba.njit(nogil=True, no_cfunc_wrapper=True))


def inner(function: _Function) -> _Function:
    """Compile as :func:`compiled` does, to be called by compiled code alone.

    Taking Python's arguments apart would be an eighth of all that is compiled.
    """
    made = numba.njit(nogil=True, no_cfunc_wrapper=True, no_cpython_wrapper=True)
    return _kept(function, made)


def _kept(function: _Function, compiler: Callable[[_Function], Any]) -> _Function:
    made = compiler(function)
    try:
        made._cache = _Kept(function)
    except RuntimeError:
        _announce(kept=False)
    kept: _Function = made
    return kept


def inlined(function: _Function) -> _Function:
    """Compile into each compiled function that calls it.

    Left to itself the compiler decides by size, and a call that hands over a dozen
    arrays costs more than what it does.
    """
    made = numba.njit(nogil=True, forceinline=True, no_cfunc_wrapper=True)
    part: _Function = made(function)
    return part


@inlined
def copy_into(row: NDArray[np.generic], values: NDArray[np.generic]) -> None:
    """Make the first values of a row those of another.

    Assigned as a slice they could be of another shape, and the text of that error takes
    two to three seconds to compile, in each function that assigns one.

    Args:
        row: At least as long as ``values``; a longer one keeps what is behind.
        values: Shape [n].
    """
    for index in range(len(values)):
        row[index] = values[index]
