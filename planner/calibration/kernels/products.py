"""Matrix products: tables of single ones, in bursts and repeated for a second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from planner.calibration.kernels.case import Bounds, KernelCase, Predictor
from planner.calibration.kernels.rows import SYSTEMS, KernelRows, read_kernel_rows
from planner.cluster import device_type
from planner.cost.surfaces.products import ProductConstants, ProductSurface
from planner.measurements.kernels import chip_of

__all__ = ["long_run_device", "long_run_rows", "product_cases", "product_seconds"]

Array = NDArray[np.float64]

_PRODUCTS = {
    "efficiency": (0.85, 0.05, 2.0),
    "ramp": (150.0, 0.0, 5000.0),
    "launch_s": (2.5e-6, 0.0, 3e-5),
    "memory": (0.8, 0.1, 3.0),
    "whole_waves": (0.5, 0.0, 1.0),
    "half_tile": (1280.0, 0.0, 76800.0),
    "overlap": (2.0, 1.0, 31.0),
    "slowdown": (0.2, 0.0, 0.8),
    "split_s": (2e-6, 0.0, 3e-5),
    "burst_s": (3e-4, 1e-6, 5e-3),
}

#: Further constants: of tables without casts, and of tables that have them.
_PRODUCTS_ALONE: Bounds = _PRODUCTS | {
    "cache_gain": (0.5, 0.0, 20.0),
    "cache": (1.0, 0.0, 20.0),
}
_PRODUCTS_CAST: Bounds = _PRODUCTS | {"cast": (0.5, 0.01, 3.0)}

#: Dtype, beginning of the run, bytes of an operand and constants.
_PRODUCT_RUNS = (
    ("bfloat16", "sglang-", 2.0, _PRODUCTS_ALONE),
    ("float8", "trtllm-", 1.0, _PRODUCTS_ALONE),
    ("float8_block128", "trtllm-", 1.0, _PRODUCTS_CAST),
    ("nvfp4", "trtllm-", 0.5625, _PRODUCTS_CAST),
)

#: Least FLOPs of a product that training spends its time in.
_LARGE_PRODUCT = 2e10


def _product_flops(rows: KernelRows) -> Array:
    """FLOPs of rows of ``gemm``."""
    return np.asarray(2 * rows["m"] * rows["n"] * rows["k"])


def product_cases() -> Iterator[KernelCase]:
    """Yield the cases of matrix products."""
    table = read_kernel_rows("gemm")
    for system, device in SYSTEMS.items():
        for dtype, run, operand, bounds in _PRODUCT_RUNS:
            rows = table.where(system=system, run=run, dtype=dtype)
            if not len(rows):
                continue
            if dtype == "float8":
                rows = _without_casts(rows, system)
            yield KernelCase(
                kind="products",
                device=device,
                variant=dtype,
                run=str(rows.names["run"][0]),
                rows=rows,
                bounds=bounds,
                predict=product_seconds(device, dtype, operand),
                training=lambda rows: _product_flops(rows) >= _LARGE_PRODUCT,
            )


def product_seconds(
    device: str, dtype: str, operand: float, *, sustained: bool = False
) -> Predictor:
    """Return what predicts rows of ``gemm`` on a device."""
    peak = {"nvfp4": "float4"}.get(dtype, dtype)
    chip = chip_of(device_type(device), peak)

    def predict(values: Mapping[str, float], rows: KernelRows) -> Array:
        surface = ProductSurface(
            constants=ProductConstants(**values), chip=chip, operand_bytes=operand
        )
        sizes = (rows[name] for name in ("m", "n", "k"))
        return surface.seconds(*sizes, sustained=sustained, cast=not sustained)

    return predict


def _without_casts(rows: KernelRows, system: str) -> KernelRows:
    """Return rows of float8 less the cast of their input, measured by itself.

    Casts were measured for fewer shapes; a cast goes by the number of elements, between
    whose measured numbers its time is interpolated. Rows of which the cast is more than
    half are left out.
    """
    casts = read_kernel_rows("fp8_cast").where(system=system)
    elements = rows["m"] * rows["k"]
    cast = np.zeros(len(rows))
    for op in ("scale_matrix", "computescale"):
        part = casts.where(op=op, dtype="fp8")
        sizes, place = np.unique(part["m"] * part["k"], return_inverse=True)
        mean = np.bincount(place, part["latency_us"]) / np.bincount(place)
        cast += np.interp(elements, sizes, mean)
    kept = rows["latency_us"] > 2 * cast
    numbers = dict(rows.numbers) | {"latency_us": rows["latency_us"] - cast}
    return KernelRows(names=rows.names, numbers=numbers).at(kept)


#: Runs of ``gemm_sustained`` whose weights were random; vllm's were not initialised,
#: which draws less power.
_LONG_RUNS = {
    ("h200-141", "bfloat16"): "vllm-",
    ("b200-180", "bfloat16"): "trtllm-",
    ("b200-180", "float8"): "trtllm-",
    ("gb200-186", "bfloat16"): "trtllm-",
    ("gb200-186", "float8"): "trtllm-",
}

#: Whose products were repeated for a second, for devices of which none were.
_LONG_RUN_OF = {
    "h100-80": "h200-141",
    "b300-270": "b200-180",
    "gb300-279": "gb200-186",
}


def long_run_device(device: str) -> str | None:
    """Name of the device whose long runs say how much slower a device's are.

    None where no such device, nor one of the same chip and power, was measured so.
    """
    if any(device == measured for measured, _ in _LONG_RUNS):
        return device
    return _LONG_RUN_OF.get(device)


def long_run_rows(device: str, dtype: str) -> KernelRows | None:
    """Return the large products that a device repeated for a second, if any."""
    run = _LONG_RUNS.get((device, dtype))
    if run is None:
        return None
    system = next(name for name, known in SYSTEMS.items() if known == device)
    rows = read_kernel_rows("gemm_sustained")
    rows = rows.where(system=system, run=run, dtype=dtype)
    if dtype == "float8":
        rows = _without_casts(rows, system)
    return rows.at(_product_flops(rows) >= _LARGE_PRODUCT)
