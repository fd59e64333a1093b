"""A step of any rank of a plan in one process, on no devices.

The trainer that trains is run in a world that is not there: a fake process group, fake
tensors, and stand-ins for what reads values. What it would take is counted.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executors.dryrun.run import dry_run, dry_runs

__all__ = ["dry_run", "dry_runs"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'executors.dryrun' has no attribute {name!r}")
    return getattr(importlib.import_module("executors.dryrun.run"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
