"""Collectives inside a host: tables of nccl-tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.calibration.kernels.case import KernelCase, Predictor
from planner.calibration.kernels.rows import SYSTEMS, KernelRows, read_kernel_rows
from planner.cost.surfaces.collectives import (
    COLLECTIVE_PASSES,
    CollectiveConstants,
    CollectiveSurface,
)

__all__ = ["LINKS", "ON_PCIE", "collective_cases"]

Array = NDArray[np.float64]

_COLLECTIVE = {
    "short_s": (5e-6, 0.0, 5e-5),
    "short_rank_s": (1e-6, 0.0, 2e-5),
    "short_share": (0.1, 0.005, 0.5),
    "long_s": (1e-5, 0.0, 1e-4),
    "long_rank_s": (1e-6, 0.0, 2e-5),
    "share": (0.8, 0.02, 10.0),
    "local": (0.3, 0.0, 2.0),
    "pipelining": (0.3, 0.0, 1.0),
}

#: Short messages to each of the others are slow.
_EACH_TO_EACH = {"short_share": (0.02, 0.002, 0.1)}

_CROSSING = {"crossing": (0.3, 0.0, 2.0)}
_SWITCHED = {"switched_s": (7e-5, 0.0, 2e-4), "switched_share": (0.66, 0.3, 1.2)}

#: A sum in the switch that is slower than all others leaves a fit no slope to it.
_SWITCHED_STARTS: Sequence[Mapping[str, float]] = (
    {},
    {"switched_s": 2e-5, "switched_share": 0.45},
)

#: Bytes/s of a device's links in one direction. Source: ``systems.csv`` of the tables.
#: L40S's host had no peer-to-peer, which is no property of the card.
LINKS = {
    "a100-80": 300e9,
    "h100-80": 450e9,
    "h200-141": 450e9,
    "b200-180": 900e9,
    "b300-270": 900e9,
    "gb200-186": 900e9,
    "gb300-279": 900e9,
    "rtxpro6000-96": 64e9,
}

#: Devices whose switches add, from Hopper on. Source: NVIDIA Hopper whitepaper 2022.
_ADDING_SWITCHES = frozenset(LINKS) - {"a100-80", "rtxpro6000-96"}

ON_PCIE = frozenset({"rtxpro6000-96"})

#: Least bytes of a collective that training spends its time in.
_LARGE_COLLECTIVE = 1 << 20


def collective_cases() -> Iterator[KernelCase]:
    """Yield the cases of collectives within a host."""
    table = read_kernel_rows("nccl")
    for system, device in SYSTEMS.items():
        if device not in LINKS:
            continue
        for kind in COLLECTIVE_PASSES:
            rows = table.where(system=system, op=kind)
            if kind in {"all_reduce", "reduce_scatter"}:
                # Switches add 16-bit numbers, but not the int8 of the other rows.
                rows = rows.where(dtype="half")
            further: dict[str, tuple[float, float, float]] = {}
            if kind == "all_reduce" and device in _ADDING_SWITCHES:
                further = _SWITCHED
            elif device in ON_PCIE:
                further = _CROSSING
            if kind == "all_to_all":
                further = further | _EACH_TO_EACH
            yield KernelCase(
                kind="collectives",
                device=device,
                variant=kind,
                run=f"nccl-{rows.names['version'][0]}",
                rows=rows,
                bounds=_COLLECTIVE | further,
                starts=_SWITCHED_STARTS if further is _SWITCHED else ({},),
                predict=_collective_seconds(device, kind),
                training=lambda rows: rows["size_bytes"] >= _LARGE_COLLECTIVE,
            )


def _collective_seconds(device: str, kind: str) -> Predictor:
    def predict(values: Mapping[str, float], rows: KernelRows) -> Array:
        surface = CollectiveSurface(constants=CollectiveConstants(**values), kind=kind)
        return surface.seconds(rows["size_bytes"], rows["gpus"], LINKS[device])

    return predict
