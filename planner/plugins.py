"""Objects that other packages register, looked up once.

Reading the metadata of all that is installed takes 20 ms, and a plan asks several
times: a fifth of the time of a small one.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import lru_cache
from importlib.metadata import EntryPoint
from importlib.metadata import entry_points as read_entry_points
from typing import Any

__all__ = ["entry_points", "load_object"]


def entry_points(*, group: str) -> tuple[EntryPoint, ...]:
    """Entry points of a group; read again when something was installed.

    Installing changes a folder of ``sys.path``, so that their times are looked at.

    Args:
        group: ``meshwright.partitioners``, for one.
    """
    return _read(group, tuple((path, _changed(path)) for path in sys.path))


@lru_cache(maxsize=16)
def _read(group: str, _: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    return tuple(read_entry_points(group=group))


def load_object(path: str) -> Any:
    """Import the object that ``module:name`` names, as a registry row gives it.

    Raises:
        ImportError: If there is no such module.
        AttributeError: If the module has no such name.
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _changed(path: str) -> int:
    try:
        return os.stat(path or ".").st_mtime_ns  # noqa: PTH116 -- half of a Path's time
    except OSError:
        return 0
