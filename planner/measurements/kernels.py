"""Surfaces of kernels by device, from ``data/kernels.json``, and for devices without.

A device whose kernels were measured has constants of its own. One of the same family
takes those of its family's measured device, at its own peaks, bandwidth, processors and
cache, and slower as its board gives a FLOP/s less power (``data/boards.csv``).
All others take those of :data:`_OTHERS`, at the share of the peak that their document
says large products reach.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from planner.cluster import device_type
from planner.cost.kernels.low_precision import peak_flops_per_s
from planner.cost.surfaces.attention import AttentionConstants, AttentionSurface
from planner.cost.surfaces.chip import Chip
from planner.cost.surfaces.collectives import (
    COLLECTIVE_PASSES,
    CollectiveConstants,
    CollectiveSurface,
)
from planner.cost.surfaces.dispatch import DispatchConstants, DispatchSurface
from planner.cost.surfaces.experts import ExpertConstants, ExpertSurface
from planner.cost.surfaces.products import ProductConstants, ProductSurface
from planner.errors import UnknownNameError
from planner.measurements.catalogues import DATA, read_rows
from planner.schema.cluster import DeviceType

__all__ = [
    "KERNELS",
    "KernelSurfaces",
    "chip_of",
    "fitted_constants_of",
    "measured_devices",
    "surfaces_of",
]

#: File of the constants that come with Meshwright.
KERNELS = DATA / "kernels.json"

#: Whose constants devices take that are of no family: a stated choice.
_OTHERS = "a100-80"

#: Time of two devices of a family goes as their FLOP/s per watt to this power. A clock
#: falls with about the square root of the power where the voltage falls with it, and in
#: proportion where it cannot fall any more. Assumption: between the two. ``energy`` of
#: Volta and Turing in ``boards.csv`` is set so that V100 reaches 93 TFLOP/s and T4 25.
_POWER_EXPONENT = 0.7

#: Dtype of the table, bytes of an operand's element and of a result's, by dtype.
_DTYPES: Mapping[str, tuple[str, float, float]] = {
    "float64": ("bfloat16", 8.0, 8.0),
    "float32": ("bfloat16", 4.0, 4.0),
    "tensorfloat32": ("bfloat16", 4.0, 4.0),
    "float16": ("bfloat16", 2.0, 2.0),
    "bfloat16": ("bfloat16", 2.0, 2.0),
    "float8": ("float8", 1.0, 2.0),
    "float8_rowwise": ("float8", 1.0, 2.0),
    "mxfp8": ("float8_block128", 1.0, 2.0),
    "float8_block128": ("float8_block128", 1.0, 2.0),
    "float4": ("nvfp4", 0.5625, 2.0),
}

#: They draw too little power to lower the clocks: in float32 an H200 ran products of 8
#: shapes at 48 to 54 of 67 TFLOP/s for seconds, 5 % from the form without a slowdown
#: (`python -m benchmarks.gpu_kernels`, 2026-11-26).
_WITHOUT_TENSOR_CORES = ("float64", "float32")

#: Whose exchanges of tokens others take.
_EXCHANGES = {"host": "h100-80", "hosts": "h100-80", "rack": "gb200-186"}

#: Bytes of an element of float8 with a scale of 4 bytes for 128.
_SCALED_FLOAT8 = 1.03125

#: Whose collectives those of other devices on PCI Express are like.
_ON_PCIE = "rtxpro6000-96"

#: Of attention that is not causal, where a table has causal attention alone; fitted
#: for the others it is .8 to 1.
_WHOLE_WAVES = 0.9

#: Peak that a dtype runs at, where it has another name.
_PEAKS = dict.fromkeys(("float8_rowwise", "float8_block128", "mxfp8"), "float8")


@cache
def _document() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(KERNELS.read_text(encoding="utf-8"))
    return found


@cache
def _boards() -> Mapping[str, Mapping[str, str]]:
    return {row["name"]: row for row in read_rows("boards.csv")}


def measured_devices() -> tuple[str, ...]:
    """Names of the device types that have a table."""
    return tuple(_document()["devices"])


def fitted_constants_of(device: str, kind: str, variant: str) -> Mapping[str, Any]:
    """Return what the file has of one device's kernels: constants, run and errors.

    Args:
        device: One of :func:`measured_devices`.
        kind: ``"products"``, ``"attention"``, ``"collectives"``, ``"experts"`` or
            ``"dispatch"``.
        variant: A dtype, ``"causal"``, ``"all_reduce"``: as in the file.
    """
    found: Mapping[str, Any] = _document()["devices"][device][kind][variant]
    return found


def chip_of(device: DeviceType, dtype: str = "bfloat16") -> Chip:
    """Return what surfaces need to know of a device.

    Args:
        device: Without a number of processors it gets that of its family's.
        dtype: Of the peak.
    """
    board = _boards().get(device.name)
    reference = _reference(device)
    processors = device.processors or reference.processors
    cache_mb = float(
        board["cache_mb"] if board else _boards()[reference.name]["cache_mb"]
    )
    return Chip(
        peak_flops_per_s=peak_flops_per_s(device, _PEAKS.get(dtype, dtype)),
        bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        processors=processors or 1,
        cache_bytes=cache_mb * 1e6,
    )


def _reference(device: DeviceType) -> DeviceType:
    """Return the measured device whose constants a device takes."""
    if device.name in measured_devices():
        return device
    board = _boards().get(device.name)
    return device_type(board["family"] if board else _OTHERS)


def _density(device: DeviceType) -> float:
    """16-bit FLOP/s at the peak for each watt, in units of the reference's energy."""
    board = _boards()[device.name]
    peak = peak_flops_per_s(device, "bfloat16")
    return peak / float(board["watts"]) * float(board["energy"])


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSurfaces:
    """Surfaces of a device.

    Attributes:
        device: On which the kernels run.
        evidence: ``"table"``, ``"family of h100-80"`` or ``"assumption"``.
        reference: Name of the device type whose table the constants are from.
        constants: By kind and dtype or variant, as in the file.
        power: Time over the reference's that the board's power takes.
    """

    device: DeviceType
    evidence: str
    reference: str
    constants: Mapping[str, Mapping[str, Mapping[str, Any]]]
    power: float

    def products(self, dtype: str = "bfloat16") -> ProductSurface:
        """Return the surface of matrix products.

        Args:
            dtype: Of operands: a compute dtype, ``"float8"`` (one scale a tensor;
                ``"float8_rowwise"`` is priced as it), ``"float8_block128"`` (likewise
                ``"mxfp8"``) or ``"float4"``. A format that the table lacks takes the
                constants of the next wider one, at its own peak.
        Raises:
            UnknownNameError: If there is no such dtype; suggests the nearest.
        """
        table, operand, result = _format(dtype)
        known = self.constants["products"]
        place = next(name for name in _wider(table) if name in known)
        found = self._throttled(ProductConstants(**known[place]["constants"]))
        if dtype in _WITHOUT_TENSOR_CORES:
            found = replace(found, slowdown=0.0, long_run=0.0)
        return ProductSurface(
            constants=found,
            chip=chip_of(self.device, dtype),
            operand_bytes=operand,
            result_bytes=result,
        )

    def attention(self, *, causal: bool, latent: bool = False) -> AttentionSurface:
        """Return the surface of fused attention, forward, in 16 bits.

        Args:
            causal: Whether queries see earlier keys alone.
            latent: Whether it is DeepSeek's, causal, whose queries and keys are longer
                than values; its head size is the mean of both, 160 of 192 and 128.
        """
        known = self.constants["attention"]
        wanted = "latent" if latent else "causal" if causal else "full"
        entry = known.get(wanted, known["causal"])
        found = AttentionConstants(**entry["constants"])
        if wanted == "full" and wanted not in known:
            found = replace(found, whole_waves=_WHOLE_WAVES)
        # Attention draws no more power than products do.
        dense = ProductConstants(**self.constants["products"]["bfloat16"]["constants"])
        long_run = min(dense.long_run, found.slowdown)
        return AttentionSurface(
            constants=replace(
                found,
                efficiency=found.efficiency * self._share(),
                slowdown=self._slower(found.slowdown),
                long_run=self._slower(long_run),
            ),
            chip=chip_of(self.device),
            kernel=entry["kernel"],
            causal=causal or latent,
        )

    def collective(self, kind: str, *, pcie: bool = False) -> CollectiveSurface:
        """Return the surface of a collective within a host.

        Args:
            kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
            pcie: Whether devices have no links of their own, but PCI Express.
        Raises:
            UnknownNameError: If there is no such collective; suggests the nearest.
        """
        if kind not in COLLECTIVE_PASSES:
            raise UnknownNameError("collective", kind, COLLECTIVE_PASSES)
        known = self.constants.get("collectives", {})
        if pcie or kind not in known:
            known = _document()["devices"][_ON_PCIE]["collectives"]
        found = CollectiveConstants(**known[kind]["constants"])
        return CollectiveSurface(constants=found, kind=kind)

    def experts(self, dtype: str = "bfloat16") -> ExpertSurface:
        """Return the surface of a layer of experts, forward, without the exchange.

        Args:
            dtype: As of :meth:`products`; float4 and devices without a table of a
                format take the constants of the next wider one, at its own peak.
        """
        known = self.constants["experts"]
        table, operand, _ = _format(dtype)
        place = next(name for name in _wider(table) if name in known)
        dense = self.products(dtype).constants
        found = ExpertConstants(**known[place]["constants"], long_run=dense.long_run)
        return ExpertSurface(
            constants=replace(found, efficiency=found.efficiency * self._share()),
            chip=chip_of(self.device, dtype),
            operand_bytes=operand,
        )

    def dispatch(
        self,
        op: Literal["dispatch", "combine"] = "dispatch",
        *,
        reach: Literal["host", "hosts", "rack"] = "host",
    ) -> DispatchSurface:
        """Return the surface of an exchange of tokens between experts.

        Args:
            op: ``dispatch`` or ``combine``.
            reach: ``host`` for ranks of one host (DeepEP; other devices than those with
                a table take H100's), ``hosts`` for those of several, over the network
                (DeepEP on H100), ``rack`` for a domain of NVLink over hosts (GB200).
        """
        name = op if reach == "host" else f"{op}_{reach}"
        known = self.constants.get("dispatch", {})
        if name not in known:
            known = _document()["devices"][_EXCHANGES[reach]]["dispatch"]
        narrow = op == "dispatch" and reach != "rack"
        return DispatchSurface(
            constants=DispatchConstants(**known[name]["constants"]),
            element_bytes=_SCALED_FLOAT8 if narrow else 2.0,
        )

    def _share(self) -> float:
        """Efficiency over the reference's: as the document says, for lack of tables."""
        if self.evidence != "assumption":
            return 1.0
        entry = self.constants["products"]["bfloat16"]
        large = _large_share(
            ProductConstants(**entry["constants"]), chip_of(self.device)
        )
        return self.device.matmul_efficiency / large

    def _throttled(self, found: ProductConstants) -> ProductConstants:
        """Constants of the reference, made those of the device."""
        if self.evidence == "assumption":
            share = found.efficiency * self._share()
            found = replace(found, efficiency=share)
        return replace(
            found,
            slowdown=self._slower(found.slowdown),
            long_run=self._slower(found.long_run),
        )

    def _slower(self, slowdown: float) -> float:
        """Slowdown by clocks that the device's power makes of the reference's."""
        if self.evidence == "assumption":
            # The share that the document states has it in it.
            return 0.0
        return max((1 + slowdown) * self.power - 1, 0.0)


def _format(dtype: str) -> tuple[str, float, float]:
    """Table of a dtype, and bytes of an operand's and a result's element."""
    if dtype not in _DTYPES:
        raise UnknownNameError("dtype", dtype, _DTYPES)
    return _DTYPES[dtype]


def _wider(table: str) -> tuple[str, ...]:
    """Dtypes of tables whose constants may stand for those of a dtype, itself first."""
    order = ("nvfp4", "float8_block128", "float8", "bfloat16")
    return order[order.index(table) :]


def _large_share(found: ProductConstants, chip: Chip) -> float:
    """Share of the peak that a very large product reaches before clocks fall."""
    cool = ProductSurface(constants=replace(found, slowdown=0.0), chip=chip)
    size = 16384.0
    seconds = cool.seconds(size, size, size, sustained=False)
    return float(2 * size**3 / seconds / chip.peak_flops_per_s)


def surfaces_of(device: DeviceType, *, family: str | None = None) -> KernelSurfaces:
    """Return the surfaces of a device's kernels and what they rest on.

    Args:
        device: Any; those of the catalogue that are of a measured device's family take
            its constants.
        family: A measured device type to take the constants of, instead of the
            device's own or its family's.
    """
    reference = _reference(device) if family is None else device_type(family)
    power, evidence = 1.0, "table"
    if device.name != reference.name:
        known = device.name in _boards()
        evidence = f"family of {reference.name}" if known else "assumption"
        if known:
            power = (_density(device) / _density(reference)) ** _POWER_EXPONENT
    return KernelSurfaces(
        device=device,
        evidence=evidence,
        reference=reference.name,
        constants=_document()["devices"][reference.name],
        power=float(np.round(power, 6)),
    )
