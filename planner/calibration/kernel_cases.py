"""Cases to fit to tables of measured kernels: rows, bounds and surfaces by kind.

A case is one device and one variant (a dtype, a collective) of a kind of kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.calibration.kernel_rows import SYSTEMS, KernelRows, read_kernel_rows
from planner.cluster import device_type
from planner.cost.surfaces.attention import AttentionConstants, AttentionSurface
from planner.cost.surfaces.collectives import (
    COLLECTIVE_PASSES,
    CollectiveConstants,
    CollectiveSurface,
)
from planner.cost.surfaces.products import ProductConstants, ProductSurface
from planner.measurements.kernels import chip_of

__all__ = [
    "KINDS",
    "LINKS",
    "ON_PCIE",
    "Bounds",
    "KernelCase",
    "attention_cases",
    "attention_flops",
    "collective_cases",
    "long_run_device",
    "long_run_rows",
    "product_cases",
    "product_flops",
]

Array = NDArray[np.float64]

#: Where constants start, and between what they stay.
Bounds = Mapping[str, tuple[float, float, float]]

#: Seconds of rows under constants.
Predictor = Callable[[Mapping[str, float], KernelRows], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """Rows of one device and variant, and the surface to fit to them.

    Attributes:
        kind: ``products``, ``attention``, ``collectives``, ``experts``, ``dispatch``.
        device: Name of the device type.
        variant: A dtype, a collective, a kernel.
        run: Whose measurements: framework and version.
        rows: All of them.
        bounds: Of the constants.
        predict: Seconds of rows under constants. Returns shape [rows].
        training: Mask of rows as large as training has them.
        kernel: Of several that the surface knows, the one that ran.
        starts: Constants that start elsewhere, in as many fits.
    """

    kind: str
    device: str
    variant: str
    run: str
    rows: KernelRows
    bounds: Bounds
    predict: Predictor
    training: Callable[[KernelRows], NDArray[np.bool_]]
    kernel: str = ""
    starts: Sequence[Mapping[str, float]] = ({},)


# -- Products --------------------------------------------------------------------

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


def product_flops(rows: KernelRows) -> Array:
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
                rows = without_casts(rows, system)
            yield KernelCase(
                kind="products",
                device=device,
                variant=dtype,
                run=str(rows.names["run"][0]),
                rows=rows,
                bounds=bounds,
                predict=product_seconds(device, dtype, operand),
                training=lambda rows: product_flops(rows) >= _LARGE_PRODUCT,
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


def without_casts(rows: KernelRows, system: str) -> KernelRows:
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
_LONG_RUN_OF = {"b300-270": "b200-180", "gb300-279": "gb200-186"}


def long_run_device(device: str) -> str:
    """Name of the device whose long runs say how much slower a device's are."""
    if any(device == measured for measured, _ in _LONG_RUNS):
        return device
    return _LONG_RUN_OF.get(device, "h200-141")


def long_run_rows(device: str, dtype: str) -> KernelRows | None:
    """Return the large products that a device repeated for a second, if any."""
    run = _LONG_RUNS.get((device, dtype))
    if run is None:
        return None
    system = next(name for name, known in SYSTEMS.items() if known == device)
    rows = read_kernel_rows("gemm_sustained")
    rows = rows.where(system=system, run=run, dtype=dtype)
    if dtype == "float8":
        rows = without_casts(rows, system)
    return rows.at(product_flops(rows) >= _LARGE_PRODUCT)


# -- Attention -------------------------------------------------------------------

_ATTENTION = {
    "efficiency": (0.8, 0.05, 3.0),
    "softmax": (40.0, 0.0, 500.0),
    "ramp": (150.0, 0.0, 2000.0),
    "launch_s": (8e-6, 0.0, 6e-5),
    "memory": (0.6, 0.05, 3.0),
    "slowdown": (0.1, 0.0, 0.8),
    "burst_s": (2e-3, 1e-5, 2e-2),
}

_TAIL = {"tail": (0.8, 0.0, 3.0)}
_WAVES = {"whole_waves": (0.5, 0.0, 1.0)}
_LAST = {"causal": _TAIL, "full": _WAVES, "latent": _TAIL}

#: Beginnings of run and kernel in ``context_attention``, and the surface's kernel.
_CAUSAL_RUNS = {
    "a100-80": ("sglang-", "flash_attention", "fa2"),
    "h100-80": ("sglang-", "fa3", "fa3"),
    "h200-141": ("sglang-", "fa3", "fa3"),
    "b200-180": ("sglang-", "trtllm_mha", "trtllm"),
    "b300-270": ("sglang-", "trtllm_mha", "trtllm"),
    "gb200-186": ("sglang-", "trtllm_mha", "trtllm"),
    "gb300-279": ("sglang-", "trtllm_mha", "trtllm"),
    "l40s-48": ("vllm-", "vllm_flash_attn_fa2", "fa2_small"),
    "rtxpro6000-96": ("vllm-", "vllm_flash_attn_fa2", "fa2_small"),
}

#: The same of ``encoder_attention``.
_FULL_RUNS = {
    device: ("vllm-", f"vllm_vit_flash_attn_{kernel[:3]}", kernel)
    for device, kernel in {
        "h100-80": "fa3",
        "h200-141": "fa3",
        "b200-180": "fa4",
        "b300-270": "fa4",
        "gb200-186": "fa4",
        "gb300-279": "fa4",
        "l40s-48": "fa2_small",
        "rtxpro6000-96": "fa2_small",
    }.items()
}

#: The same of ``mla_context``.
_LATENT_RUNS = {
    device: ("trtllm-", "default", kernel)
    for device, kernel in {
        "a100-80": "fa2",
        "h100-80": "fa3",
        "h200-141": "fa3",
        "b200-180": "trtllm",
        "b300-270": "trtllm",
        "gb200-186": "trtllm",
        "gb300-279": "trtllm",
        "rtxpro6000-96": "fa2_small",
    }.items()
}

#: Mean of a head's 192 numbers of queries and keys and 128 of values. Source:
#: DeepSeek-V3 (arXiv:2412.19437), section 4.2.
_LATENT_HEAD = 160.0

#: Heads of 512 are fallbacks.
_LARGEST_HEAD = 256

#: Least FLOPs of attention that training spends its time in.
_LARGE_ATTENTION = 1e9


def attention_flops(rows: KernelRows) -> Array:
    """FLOPs of rows of attention, of causal ones half of the square."""
    square = rows["batch"] * rows["heads"] * rows["seq"] ** 2
    return np.asarray(4 * square * rows["head_dim"] / (1 + rows["causal"]))


def attention_cases() -> Iterator[KernelCase]:
    """Yield the cases of attention."""
    for variant, name, runs in (
        ("causal", "context_attention", _CAUSAL_RUNS),
        ("full", "encoder_attention", _FULL_RUNS),
        ("latent", "mla_context", _LATENT_RUNS),
    ):
        table = read_kernel_rows(name)
        for system, device in SYSTEMS.items():
            if device not in runs:
                continue
            run, label, kernel = runs[device]
            rows = _with_heads(table.where(system=system, run=run, kernel=label))
            rows = rows.at(rows["head_dim"] <= _LARGEST_HEAD)
            yield KernelCase(
                kind="attention",
                device=device,
                variant=variant,
                run=f"{rows.names['run'][0]} {label}",
                rows=rows,
                bounds=_ATTENTION | _LAST[variant],
                predict=_attention_seconds(device, variant, kernel),
                training=lambda rows: attention_flops(rows) >= _LARGE_ATTENTION,
                kernel=kernel,
            )


def _with_heads(rows: KernelRows) -> KernelRows:
    """Return rows with the columns of heads that their table leaves out."""
    full = np.full(len(rows), _LATENT_HEAD)
    given = {"kv_heads": rows["heads"], "head_dim": full} | dict(rows.numbers)
    return KernelRows(names=rows.names, numbers=given)


def _attention_seconds(device: str, variant: str, kernel: str) -> Predictor:
    chip = chip_of(device_type(device))

    def predict(values: Mapping[str, float], rows: KernelRows) -> Array:
        surface = AttentionSurface(
            constants=AttentionConstants(**values),
            chip=chip,
            kernel=kernel,
            causal=variant != "full",
        )
        return surface.seconds(
            rows["batch"],
            rows["seq"],
            rows["heads"],
            rows["kv_heads"],
            rows["head_dim"],
            sustained=False,
            cached=variant != "full",
        )

    return predict


# -- Collectives -----------------------------------------------------------------

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


#: Cases of each kind.
KINDS: Mapping[str, Callable[[], Iterator[KernelCase]]] = {
    "products": product_cases,
    "attention": attention_cases,
    "collectives": collective_cases,
}
