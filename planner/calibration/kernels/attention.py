"""Fused attention: tables of servers and of encoders, forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from planner.calibration.kernels.case import KernelCase, Predictor
from planner.calibration.kernels.rows import SYSTEMS, KernelRows, read_kernel_rows
from planner.cluster import device_type
from planner.cost.surfaces.attention import AttentionConstants, AttentionSurface
from planner.measurements.kernels import chip_of

__all__ = ["attention_cases"]

Array = NDArray[np.float64]

_ATTENTION = {
    "efficiency": (0.8, 0.05, 3.0),
    "softmax": (40.0, 0.0, 500.0),
    "ramp": (150.0, 0.0, 2000.0),
    "launch_s": (8e-6, 0.0, 6e-5),
    "memory": (0.6, 0.05, 3.0),
    "overlap": (2.0, 1.0, 31.0),
    "slowdown": (0.1, 0.0, 0.8),
    "burst_s": (2e-3, 1e-5, 2e-2),
}

_TAIL = {"tail": (0.8, 0.0, 3.0)}
_WAVES = {"whole_waves": (0.5, 0.0, 1.0)}
_WIDE = {"wide": (0.1, -0.4, 1.0)}
_LAST = {"causal": _TAIL | _WIDE, "full": _WAVES, "latent": _TAIL}

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


def _attention_flops(rows: KernelRows) -> Array:
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
                training=lambda rows: _attention_flops(rows) >= _LARGE_ATTENTION,
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
