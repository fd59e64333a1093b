"""Choices that all strategies of one search have in common, and no table has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from planner.schema import Communication, Offload, Strategy
from planner.schema.methods import (
    Asynchrony,
    GradientCompression,
    Learning,
    MethodDocument,
    MethodValue,
    Synchronisation,
    method_of,
    read_method,
    slots,
)
from planner.schema.methods.all_reduce import AllReduce
from planner.schema.methods.backpropagation import Backpropagation
from planner.schema.methods.flushed import Flushed
from planner.schema.strategy_parts import Collective

__all__ = ["Regime"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Methods and settings of training that a search does not choose among.

    A search takes place within one regime; several are a loop around it.

    Attributes:
        synchronisation: As in :class:`planner.schema.Strategy`; likewise the next
            seven. Asking for an inexact method is consent to it.
        efficiency: Progress of a sample toward the final loss over that of a sample
            of exact training, by evidence; None counts as 1.
    """

    synchronisation: Synchronisation = field(default_factory=AllReduce)
    asynchrony: Asynchrony = field(default_factory=Flushed)
    learning: Learning = field(default_factory=Backpropagation)
    gradient_compression: GradientCompression = "none"
    communication: Communication = field(default_factory=Communication)
    compile: bool = False
    loss_chunks: int = 1
    offload: Offload = field(default_factory=Offload)
    semantics: Literal["exact", "approximate"] = "exact"
    efficiency: float | None = None

    @classmethod
    def of(cls, strategy: Strategy) -> Regime:
        """Regime that a strategy is of."""
        return cls(**{name: getattr(strategy, name) for name in _OF_STRATEGY})

    @classmethod
    def from_pins(cls, pins: Mapping[str, Any]) -> Regime:
        """Regime that pins ask for; those of columns are left out.

        Args:
            pins: From :func:`planner.space.read_pins`.
        """
        values: dict[str, Any] = {
            slot: read_method(slot, pins[slot]) for slot in slots() if slot in pins
        }
        if any(method_of(slot, value).inexact for slot, value in values.items()):
            values["semantics"] = "approximate"
        if "semantics" in pins:
            values["semantics"] = pins["semantics"]
        values["communication"] = Communication(
            boundary=pins.get("boundary", "direct"),
            replicas=Collective(algorithm=pins.get("replicas", "library")),
            buckets=pins.get("buckets", "filled"),
        )
        if "loss_chunks" in pins:
            values["loss_chunks"] = pins["loss_chunks"]
        if "offload" in pins:
            values["offload"] = Offload.from_name(pins["offload"])
        return cls(compile=bool(pins.get("compile", False)), **values)

    @property
    def strategy_fields(self) -> dict[str, Any]:
        """Fields of a strategy by name."""
        return {name: getattr(self, name) for name in _OF_STRATEGY}

    @property
    def fixes(self) -> dict[str, str | int]:
        """Knobs that have one value with its methods, as pins write them."""
        values = (getattr(self, slot) for slot in slots())
        documents = (value for value in values if isinstance(value, MethodDocument))
        return {knob: v for one in documents for knob, v in one.fixes.items()}

    @property
    def has_limits(self) -> bool:
        """True if some strategies do not go together with its methods."""
        values: dict[str, MethodValue] = {slot: getattr(self, slot) for slot in slots()}
        return any(method_of(slot, value).limits for slot, value in values.items())


_OF_STRATEGY = tuple(f.name for f in fields(Regime) if f.name in Strategy.model_fields)
