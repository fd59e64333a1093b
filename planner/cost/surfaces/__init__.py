"""Times of single kernels and collectives, as surfaces fitted to measured tables.

One module a kind: its form, its constants, and ``seconds(...)`` over arrays of shapes.
Constants have no dimension where they can, so that a device without a table takes those
of its family. :mod:`planner.measurements.kernels` has the fitted ones.
"""

from __future__ import annotations

from typing import Protocol

from planner.cost.surfaces.attention import AttentionSurface
from planner.cost.surfaces.collectives import CollectiveSurface
from planner.cost.surfaces.experts import ExpertSurface
from planner.cost.surfaces.products import ProductSurface

__all__ = ["Surfaces"]


class Surfaces(Protocol):
    """Surfaces of one device."""

    @property
    def evidence(self) -> str:
        """Evidence that they rest on: ``table``, ``family of …`` or ``assumption``."""

    def products(self, dtype: str = ...) -> ProductSurface:
        """Return that of matrix products in a dtype."""

    def attention(self, *, causal: bool, latent: bool = ...) -> AttentionSurface:
        """Return that of fused attention, forward."""

    def experts(self, dtype: str = ...) -> ExpertSurface:
        """Return that of layers of experts in a dtype."""

    def collective(self, kind: str, *, pcie: bool = ...) -> CollectiveSurface:
        """Return that of a collective within a host."""
