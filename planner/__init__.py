"""Plan how a large torch model is split over the machines you have.

``from planner import plan, Cluster`` is the whole entrance. Names resolve lazily, so
that ``import executors`` (which needs only :mod:`planner.schema`) stays light.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Cluster": "planner.cluster",
    "Federation": "planner.schema",
    "ModelGraph": "planner.graph",
    "Plan": "planner.schema",
    "Strategy": "planner.schema",
    "admit": "planner.admission",
    "federate": "planner.federations",
    "plan": "planner.api",
    "predict": "planner.api",
}

__all__ = [  # noqa: PLE0604 - the names of _HOMES, in one place
    *_HOMES,
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
