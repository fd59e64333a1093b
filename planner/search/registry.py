"""Partitioners by name, found through their entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint

from planner.errors import MeshwrightError, UnknownNameError
from planner.plugins import entry_points
from planner.search.base import Partitioner

__all__ = ["GROUP", "get_partitioner", "partitioner_names"]

#: Entry-point group under which anyone can ship a partitioner.
GROUP = "meshwright.partitioners"


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def partitioner_names() -> tuple[str, ...]:
    """Names of all installed partitioners, sorted."""
    return tuple(sorted(_registered()))


def get_partitioner(name: str) -> Partitioner:
    """Load a partitioner; its module is imported now, not before.

    Raises:
        UnknownNameError: If none of that name is installed.
        MeshwrightError: If its package needs something that is not installed.
    """
    points = _registered()
    if name not in points:
        raise UnknownNameError("partitioner", name, points)
    try:
        made = points[name].load()()
    except ImportError as error:
        raise MeshwrightError(
            f"partitioner {name!r} needs {error.name!r}, which is not installed; "
            f"install it, or choose another partitioner"
        ) from error
    if not isinstance(made, Partitioner):
        raise MeshwrightError(
            f"partitioner {name!r} ({points[name].value}) has no search(request); "
            f"see planner.search.base.Partitioner"
        )
    return made
