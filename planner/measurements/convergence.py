"""Evidence for how far inexact training comes: ``data/convergence.csv``.

A row says of a method, with all its settings, how many copies it was tried with, how
much progress a sample makes beside one of exact training, and what of the final quality
is lost. The settings named in ``at_most`` may be smaller: a shorter period is nearer to
exact training.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache

from planner.measurements.catalogues import DATA
from planner.schema import Strategy
from planner.schema.methods import MethodDocument, MethodValue, methods_of, read_method
from planner.schema.plan_parts import Efficiency

__all__ = ["Convergence", "convergence", "efficiency_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Convergence:
    """A method that was tried, and how far training came.

    Attributes:
        slot: Field of a strategy that it fills.
        name: Name or preset of the method, as a pin.
        value: The method with its settings.
        at_most: Settings that may be smaller.
        copies: Most copies along dp_replicate that were tried.
        efficiency: What was found.
    """

    slot: str
    name: str
    value: MethodValue
    at_most: tuple[str, ...]
    copies: int
    efficiency: Efficiency

    def covers(self, value: MethodValue, copies: int) -> bool:
        """Return True if it is evidence for a method with some settings and copies."""
        if copies > self.copies or type(value) is not type(self.value):
            return False
        if not isinstance(value, MethodDocument):
            return value == self.value
        ours, theirs = self.value, value.model_dump()
        assert isinstance(ours, MethodDocument)
        return all(
            theirs[name] <= tried if name in self.at_most else theirs[name] == tried
            for name, tried in ours.model_dump().items()
        )


@cache
def convergence() -> tuple[Convergence, ...]:
    """Evidence that comes with Meshwright."""
    with (DATA / "convergence.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            Convergence(
                slot=row["slot"],
                name=row["method"],
                value=read_method(row["slot"], row["method"]),
                at_most=tuple(row["at_most"].split()),
                copies=int(row["copies"]),
                efficiency=Efficiency(
                    eta=float(row["eta"]),
                    gap=float(row["gap"]),
                    measure=row["measure"],
                    basis=row["basis"],  # type: ignore[arg-type]
                    source=f"{row['task']}; {row['source']}",
                ),
            )
            for row in csv.DictReader(file)
        )


def efficiency_of(strategy: Strategy) -> Efficiency | None:
    """Look up evidence for a strategy's inexact methods; None if there is none.

    Of several methods the evidence is of each by itself, which says nothing of them
    together: then there is none.
    """
    used = [
        (method.slot, value)
        for method, value in methods_of(strategy)
        if method.inexact is not None
    ]
    if len(used) != 1:
        return None
    ((slot, value),) = used
    copies = strategy.mesh.dp_replicate
    found = [
        one.efficiency
        for one in convergence()
        if one.slot == slot and one.covers(value, copies)
    ]
    return min(found, key=_rank, default=None)


def _rank(efficiency: Efficiency) -> int:
    """Place of its basis among all: own evidence first."""
    return ("own", "published", "smoke").index(efficiency.basis)
