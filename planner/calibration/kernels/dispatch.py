"""Dispatch and combine of experts: tables of DeepEP and of one rack's all-to-all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from planner.calibration.kernels.case import Bounds, KernelCase, Predictor
from planner.calibration.kernels.collectives import LINKS
from planner.calibration.kernels.rows import SYSTEMS, KernelRows, read_kernel_rows
from planner.cost.surfaces.dispatch import DispatchConstants, DispatchSurface

__all__ = ["dispatch_cases"]

Array = NDArray[np.float64]

_NETWORK = {
    "start_s": (3e-5, 0.0, 3e-4),
    "share": (0.5, 0.01, 3.0),
    "pipelining": (0.3, 0.0, 1.0),
    "token_s": (1e-9, 0.0, 1e-6),
}

_LINKED: Bounds = _NETWORK | {"own": (1.0, 0.0, 8.0), "copy_s": (1e-9, 0.0, 1e-7)}

#: Bytes of an element: float8 with a scale of 4 bytes for 128, and bfloat16.
_WIDTHS = {"dispatch": 1.03125, "combine": 2.0}

#: Multiprocessors that DeepEP gets, as its authors set them.
_PROCESSORS = 24

#: Bytes/s of a device's network interface in one direction: 400 Gbit/s. Source:
#: DeepEP, README, test setup.
_INTERFACE = 50e9

#: Hosts over which float8 tokens and sums go at the interface's rate; over 8 the table
#: has half of it, and for long messages half again.
_MOST_HOSTS = 4

#: Least tokens of a rank, and those that training sends.
_FEWEST, _LARGE_DISPATCH = 128, 2048


def dispatch_cases() -> Iterator[KernelCase]:
    """Yield the cases of exchanges inside a host, between hosts and in a rack."""
    table = read_kernel_rows("deepep_normal")
    table = table.at(table["sms"] == _PROCESSORS)
    for system, device in SYSTEMS.items():
        one = table.where(system=system, run="sglang-0.5.12")
        if not len(one):
            continue
        for op, width in _WIDTHS.items():
            rows = _with_ranks(one, op, "gpus")
            yield _case(device, op, rows, LINKS[device], width, _LINKED)
    hosts = table.where(run="sglang-0.5.6")
    hosts = hosts.at((hosts["nodes"] > 1) & (hosts["nodes"] <= _MOST_HOSTS))
    for op, width in _WIDTHS.items():
        rows = _with_ranks(hosts, op, "nodes")
        yield _case("h100-80", f"{op}_hosts", rows, _INTERFACE, width, _NETWORK)
    rack = read_kernel_rows("moe_alltoall_nvl72")
    rack = rack.where(kernel="NVLinkTwoSided", dtype="bfloat16")
    rack = rack.at(rack["tokens"] >= _FEWEST)
    for op in _WIDTHS:
        rows = _with_ranks(rack.where(op=op), op, "ep")
        yield _case("gb200-186", f"{op}_rack", rows, LINKS["gb200-186"], 2.0, _LINKED)


def _with_ranks(rows: KernelRows, op: str, ranks: str) -> KernelRows:
    """Return rows with the columns ``ranks`` and ``latency_us`` of an exchange."""
    name = f"{op}_us" if f"{op}_us" in rows.numbers else "latency_us"
    given = {"ranks": rows[ranks], "latency_us": rows[name]}
    return KernelRows(names=rows.names, numbers=dict(rows.numbers) | given)


def _case(
    device: str,
    variant: str,
    rows: KernelRows,
    bandwidth: float,
    width: float,
    bounds: Bounds,
) -> KernelCase:
    return KernelCase(
        kind="dispatch",
        device=device,
        variant=variant,
        run=str(rows.names["run"][0]),
        rows=rows,
        bounds=bounds,
        predict=_dispatch_seconds(bandwidth, width),
        training=lambda rows: rows["tokens"] >= _LARGE_DISPATCH,
    )


def _dispatch_seconds(bandwidth: float, width: float) -> Predictor:
    def predict(values: Mapping[str, float], rows: KernelRows) -> Array:
        surface = DispatchSurface(
            constants=DispatchConstants(**values), element_bytes=width
        )
        return surface.seconds(
            rows["tokens"], rows["hidden"], rows["topk"], rows["ranks"], bandwidth
        )

    return predict
