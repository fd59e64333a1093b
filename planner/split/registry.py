"""Solvers found by name through entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Generic, TypeVar

from planner.errors import MeshwrightError, UnknownNameError
from planner.plugins import entry_points

__all__ = ["Registry"]

_Solver = TypeVar("_Solver")


class Registry(Generic[_Solver]):
    """The solvers of one entry-point group.

    Args:
        group: Entry-point group.
        kind: What they are called in errors.
        protocol: What each has to be, checkable at run time.
    """

    def __init__(self, group: str, kind: str, protocol: type[_Solver]) -> None:
        self.group, self._kind, self._protocol = group, kind, protocol

    def _points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}

    def names(self) -> tuple[str, ...]:
        """Of all that are installed, sorted."""
        return tuple(sorted(self._points()))

    def get(self, name: str) -> _Solver:
        """Load a solver; its module is imported now, not before.

        Raises:
            UnknownNameError: If none of that name is installed.
            MeshwrightError: If its package needs something that is not installed, or
                it cannot be called.
        """
        points = self._points()
        if name not in points:
            raise UnknownNameError(self._kind, name, points)
        try:
            solver = points[name].load()
        except ImportError as error:
            raise MeshwrightError(
                f"{self._kind} {name!r} needs {error.name!r}, which is not installed; "
                f"pip install 'meshwright[learn]' or choose another solver"
            ) from error
        if not isinstance(solver, self._protocol):
            raise MeshwrightError(
                f"{self._kind} {name!r} ({points[name].value}) cannot be called; see "
                f"{self._protocol.__module__}.{self._protocol.__name__}"
            )
        return solver
