"""What solves a Piper task, found by name through an entry point."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from planner.split.piper.plan import PiperPlan
from planner.split.piper.task import PiperTask
from planner.split.registry import Registry

__all__ = ["PIPER_GROUP", "PiperSolver", "get_piper_solver", "piper_solver_names"]

#: Entry-point group under which anyone can ship a solver.
PIPER_GROUP = "meshwright.piper_solvers"


@runtime_checkable
class PiperSolver(Protocol):
    """A function that plans; an entry point of :data:`PIPER_GROUP` names one."""

    def __call__(self, task: PiperTask, *, time_limit_s: float, seed: int) -> PiperPlan:
        """Plan a task.

        Args:
            task: What is planned.
            time_limit_s: Time there is.
            seed: Of all that is left to chance.

        Returns:
            A pipeline; :data:`planner.split.piper.plan.NO_PLAN` if none was found.
        """
        ...


_SOLVERS: Registry[PiperSolver] = Registry(PIPER_GROUP, "Piper solver", PiperSolver)  # type: ignore[type-abstract]


def piper_solver_names() -> tuple[str, ...]:
    """Names of all installed solvers, sorted."""
    return _SOLVERS.names()


def get_piper_solver(name: str) -> PiperSolver:
    """Load a solver; see :meth:`planner.split.registry.Registry.get`."""
    return _SOLVERS.get(name)
