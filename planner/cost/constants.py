"""Rates that devices reach of their datasheets, by surfaces or by their documents.

A datasheet gives peaks. What kernels reach of them was measured
(:mod:`planner.cost.surfaces`); what networks and hosts do is fitted to training runs.
:mod:`planner.calibration` fits it, :mod:`planner.measurements.store` keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from planner.cost.recipes import Recipe
from planner.cost.surfaces import Surfaces
from planner.cost.surfaces.collectives import COLLECTIVE_PASSES, CollectiveSurface
from planner.schema.cluster import DeviceType

__all__ = ["Calibration", "DeviceConstants", "constants_of"]


#: Share of the memory bandwidth that long reads and writes reach. Source: BabelStream's
#: triad on V100, A100 and H100, 0.8 to 0.93 of the datasheet.
_MEMORY_REACHED = 0.8

#: Bytes of a collective by whose rate large transfers in a host are priced.
_LARGE_BYTES = 2.0**26


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConstants:
    """Shares of its datasheet that a device type reaches.

    Attributes:
        matmul_efficiency: Share of the peak that a very large product reaches; where
            there are no surfaces, likewise the next two.
        half_efficiency_flops: FLOPs of a product that reaches half of that.
        attention_efficiency: Share of that rate that fused attention reaches forward;
            backward reaches less by the recipe's ratio of the two.
        memory_efficiency: Share of the memory bandwidth.
        link_efficiency: Share of the bandwidth inside a host, or inside a domain of
            the same links, that collectives and transfers reach.
        network_efficiency: The same of slower links, between hosts.
        host_overhead: What a launch takes its hosts, over the recipe's.
        kernel_speed: Speed of products and attention over that of ``surfaces``.
        surfaces: Of its kernels; None where nothing was measured of its like.
    """

    matmul_efficiency: float = 1.0
    half_efficiency_flops: float = 0.0
    attention_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    link_efficiency: float = 1.0
    network_efficiency: float = 1.0
    host_overhead: float = 1.0
    kernel_speed: float = 1.0
    surfaces: Surfaces | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Fitted constants.

    Attributes:
        name: Of the fit, with its date.
        devices: By device type name.
        recipes: By name; they stand in for those of :data:`planner.cost.RECIPES`.
        default: Of device types that are not in ``devices``; None for what their own
            documents say.
        surfaces: Of a device type's kernels.
    """

    name: str
    devices: Mapping[str, DeviceConstants] = field(default_factory=dict)
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    default: DeviceConstants | None = None
    surfaces: Callable[[DeviceType], Surfaces] | None = None


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
            surfaces = calibration.surfaces and calibration.surfaces(device)
            return _with_surfaces(found, surfaces) if surfaces else found
    return DeviceConstants(
        matmul_efficiency=device.matmul_efficiency,
        half_efficiency_flops=device.half_efficiency_flops,
        attention_efficiency=recipe.attention_forward,
    )


def _with_surfaces(found: DeviceConstants, surfaces: Surfaces) -> DeviceConstants:
    """Return fitted constants with what kernels and collectives reach."""
    shares = [
        _share(surfaces.collective(kind), passes, ranks)
        for kind, passes in COLLECTIVE_PASSES.items()
        for ranks in (2, 8)
    ]
    return replace(
        found,
        memory_efficiency=_MEMORY_REACHED,
        link_efficiency=min(1.0, sum(shares) / len(shares)),
        surfaces=surfaces,
    )


def _share(surface: CollectiveSurface, passes: float, ranks: int) -> float:
    """Share of a link's bandwidth that large collectives reach."""
    rate = 1e11
    seconds = float(surface.seconds(_LARGE_BYTES, ranks, rate))
    return passes * (ranks - 1) / ranks * _LARGE_BYTES / rate / seconds
