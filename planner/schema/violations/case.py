"""A strategy, and what of the model and the machines decides whether it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version

from planner.schema.strategy import Recompute, Strategy

__all__ = [
    "Case",
    "installed_torch",
]


@cache
def installed_torch() -> str:
    """Version of the torch that is installed."""
    return version("torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A strategy, and what of the model and the machines decides whether it runs.

    Attributes:
        strategy: What is asked for.
        tied: Groups of parameter FQNs that are one tensor.
        backend: ``gloo`` or ``nccl``.
        attention: See :class:`planner.schema.ModelReference`.
        whole_stream: The same.
        mixing: The same.
        batch_norm_values: The same.
        spatial_sizes: The same.
        experts: The same.
        torch_version: Of the torch that would run it.
        kinds: Recomputation of its stages, where it does not list them.
    """

    strategy: Strategy
    tied: tuple[tuple[str, ...], ...] = ()
    backend: str = "gloo"
    attention: str | None = "causal"
    whole_stream: str | None = None
    mixing: tuple[str, ...] = ()
    batch_norm_values: int | None = None
    spatial_sizes: tuple[int, ...] = ()
    experts: int = 0
    torch_version: str = field(default_factory=installed_torch)
    kinds: tuple[Recompute, ...] = ()

    @property
    def recompute(self) -> tuple[Recompute, ...]:
        """Recomputation of each stage."""
        return self.kinds or tuple(stage.recompute for stage in self.strategy.stages)

    @property
    def torch_release(self) -> tuple[int, int]:
        """Major and minor version of torch."""
        major, minor = self.torch_version.split(".")[:2]
        return int(major), int(minor)
