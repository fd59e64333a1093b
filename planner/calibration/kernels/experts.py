"""Layers of experts: tables of one rank, its tokens even or under a power law."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from planner.calibration.kernels.case import Bounds, KernelCase, Predictor
from planner.calibration.kernels.rows import SYSTEMS, KernelRows, read_kernel_rows
from planner.cluster import device_type
from planner.cost.surfaces.experts import ExpertConstants, ExpertSurface
from planner.measurements.kernels import chip_of

__all__ = [
    "balanced_pairs",
    "busiest_pairs",
    "expert_cases",
    "expert_rows",
    "expert_seconds",
]

Array = NDArray[np.float64]

_EXPERTS: Bounds = {
    "efficiency": (0.85, 0.05, 3.0),
    "ramp": (150.0, 0.0, 3000.0),
    "half_tile": (1300.0, 0.0, 80000.0),
    "memory": (0.8, 0.1, 3.0),
    "overlap": (2.0, 1.0, 31.0),
    "launch_s": (3e-5, 0.0, 3e-4),
    "pair_s": (1e-9, 0.0, 1e-7),
    "moves": (4.0, 0.0, 40.0),
}

#: Dtype of the surface, of the table and of the peak; bytes of an operand.
_EXPERT_DTYPES = (
    ("bfloat16", "bfloat16", "bfloat16", 2.0),
    ("float8", "float8", "float8", 1.0),
    ("float8_block128", "float8_block128", "float8", 1.0),
)

_TRITON_BLOCKS = "moe_torch_flow_triton_fp8_block"

#: Least FLOPs of a layer of experts that training spends its time in.
_LARGE_EXPERTS = 2e10


def expert_cases() -> Iterator[KernelCase]:
    """Yield the cases of layers of experts, balanced, gated, of one rank.

    Rows with one expert a token are left out: of Llama 4's they say that half of 16
    experts take a rank twice as long as all of them.
    """
    table = read_kernel_rows("moe")
    for system, device in SYSTEMS.items():
        for dtype, label, peak, operand in _EXPERT_DTYPES:
            run = "sglang-" if device == "a100-80" else "trtllm-"
            rows = expert_rows(table, system, run, label, "balanced")
            if not len(rows):
                continue
            yield KernelCase(
                kind="experts",
                device=device,
                variant=dtype,
                run=f"{rows.names['run'][0]} {rows.names['kernel'][0]}",
                rows=rows,
                bounds=_EXPERTS,
                predict=expert_seconds(device, peak, operand),
                training=lambda rows: _expert_flops(rows) >= _LARGE_EXPERTS,
            )


def expert_rows(
    table: KernelRows, system: str, run: str, dtype: str, distribution: str
) -> KernelRows:
    """Return the rows of gated experts, of several experts a token."""
    rows = table.where(system=system, run=run, dtype=dtype, distribution=distribution)
    kernel = rows.names["kernel"]
    # Triton's kernel of RTX PRO 6000 for blocks follows no form: 85 % off.
    other = np.char.endswith(kernel, "nongated") | (kernel == _TRITON_BLOCKS)
    return rows.at(~other & (rows["topk"] > 1))


def _expert_flops(rows: KernelRows) -> Array:
    """FLOPs of a rank's layer, balanced."""
    inside = rows["inter"] / rows["tp"]
    return np.asarray(6 * balanced_pairs(rows) * rows["hidden"] * inside)


def balanced_pairs(rows: KernelRows) -> Array:
    """Tokens times their experts that a rank gets where loads are even."""
    return np.asarray(rows["tokens"] * rows["topk"] / rows["ep"])


def expert_seconds(
    device: str, peak: str, operand: float, pairs: Array | None = None
) -> Predictor:
    """Return what predicts rows of ``moe`` on a device.

    Args:
        device: Name of its type.
        peak: Dtype of its peak.
        operand: Bytes of an element.
        pairs: Of each row, where loads are uneven.
    """
    chip = chip_of(device_type(device), peak)

    def predict(values: Mapping[str, float], rows: KernelRows) -> Array:
        surface = ExpertSurface(
            constants=ExpertConstants(**values), chip=chip, operand_bytes=operand
        )
        return surface.seconds(
            balanced_pairs(rows) if pairs is None else pairs,
            rows["experts"] / rows["ep"],
            rows["hidden"],
            rows["inter"] / rows["tp"],
            uneven=pairs is not None,
            sustained=False,
        )

    return predict


#: Draws of loads, of whose busiest ranks the mean is taken.
_DRAWS = 16


def busiest_pairs(rows: KernelRows, exponent: float) -> Array:
    """Tokens times their experts of the busiest rank under a power law, on average.

    An expert's share is drawn between 1 and .8 of the tokens with density x^-exponent.
    Source: aiconfigurator's collector, ``power_law_logits_v3``.
    """
    found = np.empty(len(rows))
    power = 1 - exponent
    for place, (tokens, experts, topk, ranks) in enumerate(
        zip(*(rows[name] for name in ("tokens", "experts", "topk", "ep")), strict=True)
    ):
        drawn = np.random.RandomState(0).rand(_DRAWS, int(experts))
        most = (0.8 * tokens) ** power
        loads = ((most - 1) * drawn + 1) ** (1 / power)
        loads *= tokens * topk / loads.sum(axis=1, keepdims=True)
        loads = np.minimum(loads, tokens).reshape(_DRAWS, int(ranks), -1)
        found[place] = loads.sum(axis=2).max(axis=1).mean()
    return found
