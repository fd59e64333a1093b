"""Everything Meshwright raises on purpose.

::

    MeshwrightError
    ├── CaptureError            a model could not be read
    │   └── OpBudgetError       tracing did not end within the op budget
    ├── ClusterError            a cluster description is wrong
    │   └── TopologyError       two devices that must talk have no link
    ├── UnknownNameError        a name that no registry holds (also a KeyError)
    ├── StrategyError           a strategy breaks a rule (also a ValueError)
    ├── NoFeasiblePlanError     nothing fits; says what lacks and what would fit
    ├── PlanFileError           a document could not be read or written
    │   └── FingerprintError    a plan made for another model or cluster
    ├── CalibrationError        measurements that cannot be read or fitted to
    ├── ExportError             a target cannot express the plan
    └── ExecutionError          a run failed
        ├── RankFailedError     a process died; the others were stopped
        ├── NonFiniteError      a loss, gradient or weight is not finite
        └── StoppedError        a signal ended a run, which had saved its state

A message says what, the values, the rule and the remedy, in one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

__all__ = [
    "CalibrationError",
    "CaptureError",
    "ClusterError",
    "ExecutionError",
    "ExportError",
    "FingerprintError",
    "MeshwrightError",
    "NoFeasiblePlanError",
    "NonFiniteError",
    "OpBudgetError",
    "PlanFileError",
    "RankFailedError",
    "StoppedError",
    "StrategyError",
    "TopologyError",
    "UnknownNameError",
]

#: Reasons and remedies.
_Diagnosis: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]


class MeshwrightError(Exception):
    """Base of every error that Meshwright raises on purpose.

    Attributes:
        exit_code: What the command line exits with when this error ends a command.
    """

    exit_code = 1


class CaptureError(MeshwrightError):
    """A model could not be read; the message names the op and the module."""


class OpBudgetError(CaptureError):
    """Tracing recorded more ops than the budget allows."""


class ClusterError(MeshwrightError, ValueError):
    """A cluster description is incomplete or contradicts itself."""


class TopologyError(ClusterError):
    """Two devices that must exchange data have no link."""


class UnknownNameError(MeshwrightError, KeyError):
    """A name that no registry holds; suggests the nearest known one.

    Args:
        kind: What was looked up, for example ``"cluster preset"``.
        name: The name that was not found.
        known: The names that exist.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.known = tuple(sorted(known))
        near = difflib.get_close_matches(name.lower(), self.known, n=1, cutoff=0.5)
        hint = (
            f"did you mean {near[0]!r}?" if near else f"known: {', '.join(self.known)}"
        )
        super().__init__(f"unknown {kind} {name!r}; {hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        # A process pool breaks on an error that cannot be made again from its message.
        return type(self), (self.kind, self.name, self.known)

    def __str__(self) -> str:
        return str(self.args[0])


class StrategyError(MeshwrightError, ValueError):
    """A strategy breaks a rule; the message gives value, rule and remedy."""


class NoFeasiblePlanError(MeshwrightError):
    """No strategy fits the cluster.

    Args:
        reasons: Why, most important first: which device lacks how many bytes, or
            which dimension no mesh divides.
        remedies: Changes that were evaluated and do fit, nearest first.
        diagnose: Finds both, in place of the two, when somebody first reads them: a
            search that goes on without what it could not plan never does.
    """

    exit_code = 2

    def __init__(
        self,
        reasons: Iterable[str] = (),
        remedies: Iterable[str] = (),
        *,
        diagnose: Callable[[], _Diagnosis] | None = None,
    ) -> None:
        super().__init__()
        self._diagnose = diagnose
        self._found = (tuple(reasons), tuple(remedies))

    def _read(self) -> _Diagnosis:
        if self._diagnose is not None:
            self._found, self._diagnose = self._diagnose(), None
        return self._found

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why, most important first."""
        return self._read()[0]

    @property
    def remedies(self) -> tuple[str, ...]:
        """Changes that were evaluated and do fit, nearest first."""
        return self._read()[1]

    def __str__(self) -> str:
        text = "no feasible plan: " + "; ".join(self.reasons)
        if self.remedies:
            text += "; would fit: " + " | ".join(self.remedies)
        return text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reasons, self.remedies)


class PlanFileError(MeshwrightError, ValueError):
    """A document is malformed, truncated, or of a newer schema."""


class FingerprintError(PlanFileError):
    """A plan was made for another model or another cluster."""


class CalibrationError(MeshwrightError, ValueError):
    """Measurements are malformed, or a fit to them is not possible."""


class ExportError(MeshwrightError, ValueError):
    """A target cannot express a field of the plan."""


class ExecutionError(MeshwrightError, RuntimeError):
    """A run of a plan failed."""


class RankFailedError(ExecutionError):
    """A process died; all the others were stopped."""


class NonFiniteError(ExecutionError):
    """A loss, gradient or weight is no longer finite; the message names the step."""

    exit_code = 3


class StoppedError(ExecutionError):
    """A signal ended a run behind a step, after a checkpoint; it can be resumed."""

    # EX_TEMPFAIL of sysexits.h: the user is invited to try again.
    exit_code = 75
