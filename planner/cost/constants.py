"""Efficiency constants of a device, by datasheet or fitted to measurements.

A datasheet gives peaks; how much of a peak training reaches is fitted, a handful of
numbers a device type. :mod:`planner.calibration` fits them,
:mod:`planner.measurements.store` keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.cost.recipes import Recipe
from planner.schema.cluster import DeviceType

__all__ = ["Calibration", "DeviceConstants", "constants_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConstants:
    """Shares of its datasheet that a device type reaches.

    Attributes:
        matmul_efficiency: Share of the peak that a very large product reaches.
        half_efficiency_flops: FLOPs of a product that reaches half of that.
        inner_ramp: Inner length at which a product reaches half of that: each tile of
            the output fills and drains its pipeline once, however long the sum in it.
        attention_efficiency: Share of that rate that fused attention reaches forward;
            backward reaches less by the recipe's ratio of the two.
        memory_efficiency: Share of the memory bandwidth.
        link_efficiency: Share of the bandwidth inside a host, or inside a domain of
            the same links, that collectives and transfers reach.
        network_efficiency: The same of slower links, between hosts.
        float8_efficiency: Share of ``matmul_efficiency`` that float8 products reach of
            the float8 peak, scales included.
        host_overhead: What a launch takes its hosts, over the recipe's.
    """

    matmul_efficiency: float
    attention_efficiency: float
    half_efficiency_flops: float = 0.0
    inner_ramp: float = 0.0
    memory_efficiency: float = 1.0
    link_efficiency: float = 1.0
    network_efficiency: float = 1.0
    float8_efficiency: float = 1.0
    host_overhead: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Fitted constants.

    Attributes:
        name: Of the fit, with its date.
        devices: By device type name.
        recipes: By name; they stand in for those of :data:`planner.cost.RECIPES`.
        default: Of device types that are not in ``devices``; None for what their own
            documents say.
    """

    name: str
    devices: Mapping[str, DeviceConstants] = field(default_factory=dict)
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    default: DeviceConstants | None = None


def constants_of(
    device: DeviceType, recipe: Recipe, calibration: Calibration | None = None
) -> DeviceConstants:
    """Fitted constants of a device type, or what its document says.

    Device types that were measured on the spot, and CPUs, keep what their document
    says: it is of the very devices, a calibration is of others of that name.
    """
    kept = device.measured or device.backend == "gloo"
    if calibration is not None and not kept:
        found = calibration.devices.get(device.name, calibration.default)
        if found is not None:
            return found
    return DeviceConstants(
        matmul_efficiency=device.matmul_efficiency,
        half_efficiency_flops=device.half_efficiency_flops,
        attention_efficiency=recipe.attention_forward,
    )
