"""Fitting the surfaces of kernels to measured tables, one module a kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from planner.calibration.kernels.attention import attention_cases
from planner.calibration.kernels.case import KernelCase
from planner.calibration.kernels.collectives import collective_cases
from planner.calibration.kernels.dispatch import dispatch_cases
from planner.calibration.kernels.experts import expert_cases
from planner.calibration.kernels.products import product_cases

__all__ = ["KINDS"]

#: Cases of each kind.
KINDS: Mapping[str, Callable[[], Iterator[KernelCase]]] = {
    "products": product_cases,
    "attention": attention_cases,
    "collectives": collective_cases,
    "experts": expert_cases,
    "dispatch": dispatch_cases,
}
