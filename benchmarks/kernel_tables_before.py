"""Seconds of measured kernels by the cost model as it is shipped.

Kernels become the rows of a :class:`planner.cost.kernels.blocks.KernelTable`, priced
under the published constants with a recipe whose launches cost nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.calibration.kernels.case import KernelCase
from planner.calibration.kernels.collectives import LINKS, ON_PCIE
from planner.calibration.kernels.experts import balanced_pairs
from planner.calibration.kernels.rows import KernelRows
from planner.cluster import device_type
from planner.cluster.presets import known_links
from planner.cost.constants import constants_of
from planner.cost.kernels.blocks import KERNEL_KINDS, KERNEL_STYLES, KernelTable
from planner.cost.kernels.roofline import kernel_times
from planner.cost.kernels.shapes import divide, shape_factors
from planner.cost.traffic.collectives import Groups, time_of
from planner.measurements.store import calibrated_recipe, shipped

__all__ = ["before"]

Array = NDArray[np.float64]

#: Framework whose constants price the kernels.
_RECIPE = "megatron"


def before(case: KernelCase, rows: KernelRows) -> Array | None:
    """Seconds of rows by the shipped cost model; None where it has no such kernel."""
    if case.kind == "products" and case.variant == "bfloat16":
        return _priced(_products(rows), case.device, causal=False)
    if case.kind == "attention":
        causal = case.variant != "full"
        return _priced(_attention(rows), case.device, causal=causal)
    if case.kind == "collectives":
        return _collective(case, rows)
    if case.kind == "experts" and case.variant == "bfloat16":
        up, down = (
            _priced(table, case.device, causal=False) for table in _grouped(rows)
        )
        return up + down
    return None


def _table(kind: str, **columns: Array) -> KernelTable:
    rows = len(columns["m"])
    zeros, ones = np.zeros(rows), np.ones(rows)
    given = {"weight_bytes": zeros} | columns
    return KernelTable(
        owner=np.zeros(rows, dtype=np.int64),
        style=np.full(rows, KERNEL_STYLES.index("none")),
        kind=np.full(rows, KERNEL_KINDS.index(kind)),
        count=ones,
        backward_flops=zeros,
        recompute_flops=zeros,
        backward_bytes=zeros,
        expert_share=zeros,
        trained=np.zeros(rows, dtype=bool),
        low_precision=np.zeros(rows, dtype=bool),
        **given,
    )


def _products(rows: KernelRows) -> KernelTable:
    m, n, k = rows["m"], rows["n"], rows["k"]
    return _table(
        "matmul",
        batch=np.ones(len(rows)),
        m=m,
        n=n,
        k=k,
        forward_flops=2 * m * n * k,
        forward_bytes=2 * (m * k + m * n),
        weight_bytes=2 * n * k,
    )


def _grouped(rows: KernelRows) -> tuple[KernelTable, KernelTable]:
    """The two products of a layer of experts, one for each of them."""
    experts, pairs = rows["experts"] / rows["ep"], balanced_pairs(rows)
    inside = rows["inter"] / rows["tp"]

    def product(n: Array, k: Array) -> KernelTable:
        return _table(
            "matmul",
            batch=experts,
            m=pairs / experts,
            n=n,
            k=k,
            forward_flops=2 * pairs * n * k,
            forward_bytes=2 * pairs * (n + k),
            weight_bytes=2 * experts * n * k,
        )

    return product(2 * inside, rows["hidden"]), product(rows["hidden"], inside)


def _attention(rows: KernelRows) -> KernelTable:
    batch, size = rows["batch"] * rows["heads"], rows["head_dim"]
    moved = rows["batch"] * rows["seq"] * size * 2
    return _table(
        "attention",
        batch=batch,
        m=rows["seq"],
        n=rows["seq"],
        k=size,
        forward_flops=4 * batch * rows["seq"] ** 2 * size,
        forward_bytes=moved * 2 * (rows["heads"] + rows["kv_heads"]),
    )


def _collective(case: KernelCase, rows: KernelRows) -> Array:
    """Seconds over one level of links, as NCCL's rings and trees."""
    recipe = calibrated_recipe(_RECIPE, shipped())
    reach = constants_of(device_type(case.device), recipe, shipped())
    on_pcie = case.device in ON_PCIE
    latency = known_links()["pcie4" if on_pcie else "nvlink4"].latency_s
    level = LINKS[case.device] * reach.link_efficiency
    groups = Groups(
        members=rows["gpus"][:, None],
        bandwidth=np.full((len(rows), 1), level),
        latency=np.full((len(rows), 1), latency),
        which=np.arange(len(rows)),
        rings=True,
    )
    return time_of(case.variant, rows["size_bytes"], groups)


def _priced(table: KernelTable, name: str, *, causal: bool) -> Array:
    device = device_type(name)
    recipe = replace(calibrated_recipe(_RECIPE, shipped()), launch=0.0)
    reach = constants_of(device, recipe, shipped())
    one = np.ones(1)
    part = divide(table, one, (one, one, one), np.zeros(1))
    factors = shape_factors(table, part, device, reach, fused_attention=True)
    times = kernel_times(
        table, part, factors, device, recipe, reach, dtype="bfloat16", causal=causal
    )
    return np.asarray(times.forward[0])
