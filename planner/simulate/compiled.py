"""Machine code for the hot loops, kept between runs where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

__all__ = ["compiled", "copy_into", "inlined"]

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    """Compile on first call, with the result kept on disk for later runs.

    An install that cannot be written to, with a home that cannot either, leaves numba
    no place to keep code; it then compiles once in each process.
    """
    try:
        kept: _Function = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        kept = numba.njit(nogil=True)(function)
    return kept


def inlined(function: _Function) -> _Function:
    """Compile into each compiled function that calls it.

    Left to itself the compiler decides by size, and a call that hands over a dozen
    arrays costs more than what it does.
    """
    part: _Function = numba.njit(nogil=True, forceinline=True)(function)
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
