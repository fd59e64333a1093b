"""Copies of the weights, and what happens to them around a step.

One file a method; the registry of methods (:mod:`planner.schema.methods`) names its
class, which is made from the strategy's document.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import nn

from planner.plugins import load_object
from planner.schema import Strategy
from planner.schema.methods import method_of

if TYPE_CHECKING:
    from executors.mesh import ProcessMesh
    from executors.parallelize import ParallelPart
    from executors.trainer import Trainer

__all__ = [
    "DrainedReplicas",
    "HoldingReplicas",
    "KeepsOwn",
    "Replicas",
    "SkippingReplicas",
    "SplitReplicas",
    "replicas_of",
    "skipped_parameters",
]


class Replicas(Protocol):
    """Keeps the copies along ``replicate`` together, or lets them part for a while.

    Where the document says that copies are apart, no step reduces anything over
    ``replicate``, and the loss between exchanges is the copy's own.
    """

    @property
    def rests_every(self) -> int:
        """Steps from one time that the method rests to the next."""

    @property
    def lead_in(self) -> int:
        """First steps, which send less than all later ones."""

    def attach(self, trainer: Trainer) -> None:
        """Take parameters and groups of a complete trainer; collective, once.

        The trainer itself is not kept: a circle would keep DDP's reducer alive longer
        than its group.
        """

    def before_forward(self, step: int) -> None:
        """Act before a step; collective.

        Args:
            step: Number of the step, from 0.
        """

    def after_backward(self, step: int) -> None:
        """Act on the gradients before they are clipped and used; collective."""

    def after_update(self, step: int) -> None:
        """Act after the optimizer's step; collective."""

    def settle(self) -> None:
        """End what can be ended between two steps; collective.

        Whoever reads the weights asks for it first.
        """

    def rests(self, done: int) -> bool:
        """Return True if no exchange is under way after so many steps.

        The run can be saved there.
        """

    def meets(self, done: int) -> bool:
        """Return True if all copies come together after so many steps.

        They share a loss there, and look for numbers that are not finite.
        """

    def in_sync(self, done: int) -> bool:
        """Return True if all copies are equal after so many steps."""

    def state(self) -> Mapping[str, Mapping[nn.Parameter, torch.Tensor]]:
        """Tensors by name that are kept of each parameter, as this rank's local part.

        They are equal on all copies, and live: a checkpoint is read into them.
        """

    def restored(self, *, complete: bool) -> None:
        """Go on from weights that were read.

        Args:
            complete: Whether :meth:`state` was read as well; else it begins anew.
        """

    def phase(self, step: int) -> str:
        """Name of the phase, among the document's, that a step is of."""

    def force(self, phase: str | None) -> None:
        """Make every step one of a phase, to measure it; None ends that.

        Args:
            phase: One of the document's.
        """


@runtime_checkable
class DrainedReplicas(Replicas, Protocol):
    """Replicas whose stages may have microbatches under way between steps."""

    @property
    def drained(self) -> bool:
        """True if none is under way, on all ranks alike."""


@runtime_checkable
class KeepsOwn(Protocol):
    """Replicas that keep something of a copy's own between exchanges."""

    def own_state(self) -> dict[str, torch.Tensor]:
        """Live tensors of this rank by name; a checkpoint is read into them."""


@runtime_checkable
class SplitReplicas(Replicas, Protocol):
    """Copies of which each holds parts of some weights, in an order of its own.

    Attributes:
        split: Dimension that copies divide of each such parameter.
    """

    split: Mapping[nn.Parameter, int]

    def in_order(
        self, values: Mapping[nn.Parameter, torch.Tensor], *, gradients: bool = False
    ) -> Mapping[nn.Parameter, torch.Tensor]:
        """Parts in the order of the whole parameters, that of ranks; collective.

        Args:
            values: What this rank holds for some parameters, such as their gradients;
                equal keys on all ranks. Those that are not divided are left out.
            gradients: Whether they are zero where no copy has any.
        """

    def kept(self, parameter: nn.Parameter) -> torch.Tensor:
        """Part of a divided parameter that a checkpoint is read into, live."""


@runtime_checkable
class SkippingReplicas(Replicas, Protocol):
    """Copies of which each has some of the weights, others at other times.

    Attributes:
        dealt: Parameters that not all copies have at any time.
    """

    dealt: Collection[nn.Parameter]

    def elsewhere(
        self, model: nn.Module, strategy: Strategy, place: ProcessMesh
    ) -> Collection[str]:
        """FQNs of modules that this copy does not have when it begins.

        Args:
            model: Whole.
            strategy: By which it will be trained.
            place: Where this process stands.
        """

    def skipped(self) -> frozenset[nn.Parameter]:
        """Parameters that other copies have now: here they have no values."""


def skipped_parameters(replicas: Replicas) -> frozenset[nn.Parameter]:
    """Return the parameters that have no values on this copy now."""
    if isinstance(replicas, SkippingReplicas):
        return replicas.skipped()
    return frozenset()


@runtime_checkable
class HoldingReplicas(Replicas, Protocol):
    """Copies of which each has values of some of the weights alone between steps."""

    def take(self, index: int, part: ParallelPart, place: ProcessMesh) -> None:
        """Give memory back of what this copy does not hold of a stage.

        Args:
            index: Number of the stage.
            part: Just made; others may not have been yet.
            place: Where this process stands.
        """

    def skipped(self) -> frozenset[nn.Parameter]:
        """Parameters that another copy updates."""

    def held(self) -> Set[nn.Parameter]:
        """Parameters that this copy has values of, of all stages taken."""


def replicas_of(strategy: Strategy) -> Replicas:
    """Make the keeper of a strategy's copies, and of weights that stages update apart.

    Raises:
        UnknownNameError: If its synchronisation or asynchrony is not registered.
    """
    synchronisation, asynchrony = strategy.synchronisation, strategy.asynchrony
    method = method_of("synchronisation", synchronisation)
    around = method_of("asynchrony", asynchrony)
    assert method.runs is not None, "it has no executor, a violation"
    assert around.runs is not None, "it has no executor, a violation"
    copies: Replicas = load_object(method.runs)(synchronisation)
    found: Replicas = load_object(around.runs)(asynchrony, copies)
    return found
