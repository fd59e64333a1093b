"""Copies that train a core of the neurons alone, and all of them every few steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from planner.schema.methods.method import (
    Feature,
    Method,
    Synchronisation,
    copies_of_one_device,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.schema.violations import Case

__all__ = ["METHODS", "Masked"]


def _read_numbers(value: Any) -> Any:
    """Read the numbers of a pin, ``1+2``: commas separate settings there."""
    if isinstance(value, str):
        return tuple(value.split("+")) if value else ()
    if isinstance(value, int):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _in_order(value: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(value)) < len(value):
        raise ValueError(f"{value} names a replica twice; name each once")
    return tuple(sorted(value))


class Masked(Synchronisation):
    """Copies train a core of the neurons alone, and all of them every few steps.

    Neurons are the features between colwise layers and the rowwise one behind them,
    and heads of attention. The core is the first share of each such group of layers,
    and all that belongs to no neuron. In a core step copies compute the core alone, the
    other neurons masked, and average the core's gradients; nothing else of weights and
    optimizer states changes. In a full step they compute and train all of the model.

    Weak replicas take part in core steps alone. In a full step they are given the mean
    gradient of the core, so that their core stays that of the others, bit for bit.

    Attributes:
        core: Share of the neurons of each group that are the core's, at least one.
        every: Steps from one full step to the next; all between are core steps.
        weak_replicas: Copies along dp_replicate that take no part in full steps.
    """

    apart: ClassVar[bool] = True
    of_neurons: ClassVar[bool] = True

    kind: Literal["masked"] = "masked"
    core: Annotated[float, Field(gt=0, le=1)] = 0.5
    every: Annotated[int, Field(ge=2, le=10**6)] = 2
    weak_replicas: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...],
        BeforeValidator(_read_numbers),
        AfterValidator(_in_order),
    ] = ()

    @property
    def phases(self) -> Mapping[str, float]:
        """Steps of the core alone, and of all of the model."""
        return {"core": 1 - 1 / self.every, "full": 1 / self.every}

    @property
    def widths(self) -> tuple[tuple[float, float], ...]:
        """Core steps compute the core's neurons, full steps all."""
        phases = self.phases
        return (phases["core"], self.core), (phases["full"], 1.0)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Weak replicas compute nothing in full steps."""
        return self.weak_replicas

    def cuts(self, copies: Any) -> Any:
        """True: one copy has core steps, too."""
        return copies > 0

    def core_neurons(self, neurons: int) -> int:
        """Neurons of a group that are the core's, from the first on.

        Args:
            neurons: Of the group.
        """
        return max(1, round(self.core * neurons))

    def expected_traffic(
        self, *, gradients: float, weights: float, divided: float = 0.0
    ) -> dict[str, float]:
        """The core's gradients in every step, all others in full steps.

        ``divided`` are those of neurons outside of the core. Where only one copy is
        strong nobody else has them: leave them out of both.
        """
        return {"all_reduce": gradients - divided * self.phases["core"]}


def _weak_exist(case: Case) -> str | None:
    value, copies = case.strategy.synchronisation, case.strategy.mesh.dp_replicate
    assert isinstance(value, Masked)
    weak = value.weak_replicas
    if weak and max(weak) >= copies:
        return (
            f"synchronisation={value} with dp_replicate={copies}; there is no replica "
            f"{max(weak)}, name some of 0 to {copies - 1} as weak_replicas, or none"
        )
    if len(weak) == copies:
        return (
            f"synchronisation={value} with dp_replicate={copies}; all replicas are "
            f"weak, and nobody trains the neurons outside of the core, leave at least "
            f"one out of weak_replicas"
        )
    return None


METHODS = (
    Method(
        kind="masked",
        slot="synchronisation",
        document=Masked,
        words="copies train {core} of the neurons alone, and all every {every} steps",
        inexact="most steps train a core of the neurons alone",
        limits=(
            partial(copies_of_one_device, why="copies of one device each mask neurons"),
            _weak_exist,
        ),
        feature=Feature(
            name="masked",
            mesh={"dp_replicate": 2},
            fields={"synchronisation": Masked(), "semantics": "approximate"},
            kind="synchronisation",
            # The first step's loss and gradients are those of a narrower model.
            tolerance=(1e-1, float("inf"), float("inf")),
        ),
        prices="planner.cost.replicas.masked:MaskedPricing",
        runs="executors.replicas.masked:MaskedReplicas",
        page="methods/masked.md",
        test="tests/distributed/test_masked.py",
        source="Mohtashami et al. 2022, arXiv 2106.08895",
    ),
)
