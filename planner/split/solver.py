"""What solves a split task, found by name through an entry point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from planner.split.registry import Registry
from planner.split.task import Index, SplitTask

__all__ = ["GROUP", "Solution", "SplitSolver", "get_solver", "solver_names"]

#: Entry-point group under which anyone can ship a solver.
GROUP = "meshwright.split_solvers"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """A legal split.

    Attributes:
        load_ms: Of the busiest device.
        assignment: Device of each node. Shape [n].
        optimal: Whether it is proven that no split is better.
        found_by: Name of the solver that made it.
        seconds: Taken; filled in by :func:`planner.split.solve.solve`.
    """

    load_ms: float
    assignment: Index
    optimal: bool = False
    found_by: str = ""
    seconds: float = 0.0


@runtime_checkable
class SplitSolver(Protocol):
    """A function that splits; an entry point of :data:`GROUP` names one."""

    def __call__(
        self, task: SplitTask, *, time_limit_s: float, seed: int
    ) -> Solution | None:
        """Split a task.

        Args:
            task: What is split.
            time_limit_s: Time there is.
            seed: Of all that is left to chance.

        Returns:
            A legal split; None if it did not finish.
        """
        ...


_SOLVERS: Registry[SplitSolver] = Registry(GROUP, "split solver", SplitSolver)  # type: ignore[type-abstract]


def solver_names() -> tuple[str, ...]:
    """Names of all installed solvers, sorted."""
    return _SOLVERS.names()


def get_solver(name: str) -> SplitSolver:
    """Load a solver; see :meth:`planner.split.registry.Registry.get`."""
    return _SOLVERS.get(name)
