"""Time of kernels under tp, cp, ep and a microbatch size.

Where kernels of the device, or of its family, were measured, products and attention
take what their surfaces say (:mod:`planner.cost.kernels.products`), all else its bytes
over the memory bandwidth, and a launch. Else a roofline prices all of them:

t(op) = max(FLOPs / (peak x efficiency), bytes / memory bandwidth) + overhead

with efficiency = e FLOPs' / (FLOPs' + h), where e is what very large products reach, h
the FLOPs at which half of that is reached, and FLOPs' counts the tile padding that the
hardware computes anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.constants import DeviceConstants
from planner.cost.kernels.blocks import KERNEL_KINDS, KernelTable
from planner.cost.kernels.low_precision import cast_bytes, low_precision_rates
from planner.cost.kernels.products import product_times
from planner.cost.kernels.shapes import Division, padding
from planner.cost.recipes import Recipe
from planner.schema import Optimizer
from planner.schema.cluster import DeviceType
from planner.schema.optimizers import OPTIMIZERS
from planner.units import dtype_bytes

__all__ = [
    "KernelTimes",
    "copy_seconds",
    "kernel_times",
    "optimizer_seconds",
    "summed_bytes",
    "update_passes",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


#: How often attention that is not fused moves a score in forward and backward, each in
#: half precision: softmax with scale and mask reads and writes, dropout reads and
#: writes both it and a mask of a byte; the products write and read them once more.
#: Backward reads what was kept besides. Source: counted after Korthikanti et al. 2022,
#: section 4.1, for the fused softmax of Megatron-LM.
_SCORES_MOVED = (6.5, 9.5)

#: What FlashAttention-2 reaches on devices newer than Ampere over what attention that
#: was written for them does. Source: Shah et al. 2024 (FlashAttention-3,
#: arXiv:2407.08608), figures 5 and 6, on H100: about 350 to 400 TFLOP/s against 600 to
#: 740.
_AMPERE_ON_NEWER = 0.57


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """Seconds of all ops of each kernel. Shapes [combinations, kernels].

    Attributes:
        weight: Part of ``backward`` that makes weight gradients: one of the two
            products that a product with a parameter has in its backward, or the only
            one where the input needs no gradient; nothing where the weights are frozen.
        selective: Part of ``forward`` that selective recomputation runs again, see
            :attr:`planner.cost.recipes.Recipe.selective`.
        forward_host: Seconds in which the host of a GPU launches all of it; likewise
            backward_host.
    """

    forward: Array
    backward: Array
    weight: Array
    selective: Array
    forward_host: Array
    backward_host: Array


def kernel_times(
    table: KernelTable,
    part: Division,
    device: DeviceType,
    recipe: Recipe,
    reach: DeviceConstants,
    *,
    dtypes: tuple[str, str],
    element: float = 1.0,
    causal: bool = False,
) -> KernelTimes:
    """Seconds of every kernel under every combination of degrees.

    Args:
        table: Kernels at the traced batch.
        part: What a device has of them.
        device: On which they run.
        recipe: Of the framework.
        reach: What the device reaches.
        dtypes: Of products that recipes for low precision convert, a compute dtype or
            a format of :mod:`planner.cost.kernels.low_precision`; and of all others.
        element: Bytes of an activation over what it had in the trace.
        causal: Whether attention is, so that kernels skip the recipe's share of it.
    """
    roof = _Roof.over(table, device, recipe, reach, part, dtypes[0], element, causal)
    ops = _backward_ops(table)
    if reach.surfaces is None:
        forward, inputs, weights = _by_peaks(roof, device, recipe, reach)
    else:
        later = _after_ampere(device)
        newer = recipe.newer_products if later else 1.0
        older = _AMPERE_ON_NEWER if recipe.ampere_attention and later else 1.0
        older *= recipe.attention_speed
        found = product_times(
            table,
            part,
            reach.surfaces,
            recipe,
            dtypes=dtypes,
            causal=causal,
            slower=(1 / newer / reach.kernel_speed, 1 / older / reach.kernel_speed),
            newer=later,
        )
        product = _products(table)
        moved = roof.memory(table.forward_bytes, np.ones_like(ops), np.ones_like(ops))
        forward = np.where(product, table.count * found.forward, moved)
        moved = roof.memory(table.backward_bytes, ops, ops)
        inputs = np.where(product, table.count * found.inputs, moved)
        weights = table.count * found.weights
    if not recipe.fused_attention:
        written = 2 * part.scores * table.count * element / roof.bandwidth
        forward = forward + _SCORES_MOVED[0] * written
        inputs = inputs + _SCORES_MOVED[1] * written
    before = recipe.low_precision_gathers
    narrow = cast_bytes(table, dtypes[0], part.tp, part.stream, before=before)
    casts = roof.passes(narrow)
    summed = roof.moves(summed_bytes(table, part, recipe.gradient_passes))
    weights = weights + np.where(_products(table) & table.trained, summed, 0.0)
    if recipe.fusion in ("none", "norms"):
        weights = weights + roof.moves(_bias_bytes(table, part))
    launched = roof.host * table.count[None, :]
    forward = forward + casts[0]
    merged = _merges(roof, recipe)
    forward, inputs = forward + merged[0], inputs + merged[1]
    hops = _hop_launches(table, part, device, recipe) * reach.host_overhead
    if device.backend == "gloo":
        forward, inputs, hops = forward + hops, inputs + hops, 0 * hops
    return KernelTimes(
        forward=forward,
        backward=inputs + casts[1] + weights + np.where(_products(table), 0.0, summed),
        weight=weights,
        selective=_repeated(table, recipe) * forward,
        forward_host=launched + hops,
        backward_host=launched * ops + hops,
    )


def _merges(roof: _Roof, recipe: Recipe) -> tuple[Array, Array]:
    """Seconds in which a ring puts the results of its hops together, both ways. [C, K].

    Outputs and gradients of queries that a hop makes are added to those of the hops
    before it.
    """
    table, part = roof.table, roof.part
    outputs = part.scores / np.maximum(table.n, 1) * table.k
    hops = (part.hops - 1) * outputs
    element = dtype_bytes("bfloat16")
    return (
        roof.moves(hops * recipe.ring_outputs * element),
        roof.moves(hops * recipe.ring_queries * element),
    )


def _hop_launches(
    table: KernelTable, part: Division, device: DeviceType, recipe: Recipe
) -> Array:
    """Seconds in which a host launches what a ring adds to attention. [C, kernels]."""
    attention = (table.kind == KERNEL_KINDS.index("attention")) * table.count
    hops = np.where(part.hops > 1, part.hops, 0.0)
    launches = hops * attention * recipe.ring_launches
    return np.asarray(launches * device.kernel_overhead_s)


def _by_peaks(
    roof: _Roof, device: DeviceType, recipe: Recipe, reach: DeviceConstants
) -> tuple[Array, Array, Array]:
    """Seconds by what a document says of its device. Shapes [combinations, kernels].

    Returns:
        Of forward, of gradients of inputs, and of weights.
    """
    table, part = roof.table, roof.part
    one, product = np.ones(len(table.count)), _backward_ops(table)
    padded = padding(table, part, device)
    share = _attention_share(device, recipe, reach)
    forward = roof.seconds(
        table.forward_flops, table.forward_bytes, one, share, padded, one
    )
    again = np.where(roof.fused[0], table.recompute_flops, 0.0)
    # Gradients of experts' weights are as many as a device has experts, whatever the
    # number of tokens.
    made = np.where(table.trained & table.expert, table.weight_bytes, 0.0)
    backward = roof.seconds(
        table.backward_flops + again,
        np.maximum(table.backward_bytes - made, 0.0),
        product,
        share * (recipe.attention_backward / recipe.attention_forward),
        padded,
        product + (made > 0),
    )
    weighted = _products(table) & table.trained
    weights = np.where(weighted, backward / np.maximum(product, 1), 0.0)
    return forward, backward - weights, weights


def _products(table: KernelTable) -> NDArray[np.bool_]:
    """Mask of products: matmul, attention, convolution. Shape [1, kernels]."""
    return np.asarray(table.kind[None, :] <= 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Roof:
    """Bounds of the time of a kernel. Shapes [1, kernels] where not said otherwise.

    Attributes:
        table: Kernels at the traced batch.
        part: What a device has of them.
        rate: FLOP/s that very large kernels reach.
        fused: Whether it is fused attention.
        skipped: Share of its FLOPs that it computes.
        half: FLOPs of a product that reaches half of its rate.
        bandwidth: Bytes/s.
        overhead: Seconds of an op, whatever its size.
        host: Seconds in which a GPU's host launches an op.
        element: Bytes of an activation over what it had in the trace.
    """

    table: KernelTable
    part: Division
    rate: Array
    fused: NDArray[np.bool_]
    skipped: Array
    half: float
    bandwidth: float
    overhead: float
    host: float
    element: float

    @classmethod
    def over(
        cls,
        table: KernelTable,
        device: DeviceType,
        recipe: Recipe,
        reach: DeviceConstants,
        part: Division,
        dtype: str,
        element: float,
        causal: bool,
    ) -> _Roof:
        """Find the bounds of a device and a framework for divided kernels."""
        attention = table.kind[None, :] == KERNEL_KINDS.index("attention")
        fused = attention & recipe.fused_attention
        # A GPU's queue hides the host's work behind kernels, where they take longer.
        on_cpu = device.backend == "gloo"
        ops = recipe.op_overhead_factor if on_cpu else 1.0
        host = 0.0 if on_cpu else recipe.launch * recipe.launches * reach.host_overhead
        return cls(
            table=table,
            part=part,
            rate=low_precision_rates(table, device, dtype, reach)
            * (recipe.newer_products if _after_ampere(device) else 1.0),
            fused=fused,
            skipped=np.where(fused & causal, recipe.causal_share, 1.0),
            half=reach.half_efficiency_flops,
            bandwidth=device.memory_bandwidth_bytes_per_s * reach.memory_efficiency,
            overhead=_launched_s(device, reach) * ops,
            host=device.kernel_overhead_s * host,
            element=element,
        )

    def seconds(
        self,
        flops: Array,
        moved: Array,
        ops: Array,
        efficiency: float,
        inner: Array,
        held: Array,
    ) -> Array:
        """Seconds of all ops of each kernel. Shape [combinations, kernels].

        Args:
            flops: At the traced batch. Shape [kernels]; likewise the next four.
            moved: Bytes of activations.
            ops: Kernels that are launched.
            efficiency: Share of the rate, of fused attention.
            inner: Time over that of products of endless size. [combinations, kernels].
            held: How often weights are read or made. Shape [kernels].
        """
        part = self.part
        speed = np.where(self.fused, self.rate * efficiency, self.rate)
        busy = flops * self.skipped * part.scale / part.work
        ramp = np.where(_products(self.table) & (flops > 0), self.half * ops, 0.0)
        activations = moved * part.scale * part.share
        size = (activations + part.weights * held) * self.element
        roof = np.maximum((busy * inner + ramp) / speed, size / self.bandwidth)
        return np.asarray(self.table.count * (roof + self.overhead * ops))

    def memory(self, moved: Array, ops: Array, held: Array) -> Array:
        """Seconds of all ops of each kernel that only moves bytes. [C, kernels].

        Args:
            moved: Bytes of activations, at the traced batch. Shape [kernels].
            ops: Kernels that are launched. Shape [kernels].
            held: How often weights are read or made. Shape [kernels].
        """
        part = self.part
        size = (moved * part.scale * part.share + part.weights * held) * self.element
        return np.asarray(
            self.table.count * (size / self.bandwidth + self.overhead * ops)
        )

    def passes(self, moved: tuple[Array, Array]) -> tuple[Array, Array]:
        """Seconds of elementwise kernels beside products.

        Args:
            moved: Bytes of this rank at the traced batch, forward and backward.
                Shapes [combinations, kernels].
        Returns:
            Likewise.
        """
        scale = self.part.scale
        return self.moves(moved[0] * scale), self.moves(moved[1] * scale)

    def moves(self, moved: Array) -> Array:
        """Seconds of kernels of their own that move bytes, in the dtype of the trace.

        Args:
            moved: Of one op of each kernel. Shape [combinations, kernels].
        """
        return np.asarray(moved * (self.table.count * self.element / self.bandwidth))


def _launched_s(device: DeviceType, reach: DeviceConstants) -> float:
    """Seconds of a kernel of nothing."""
    if reach.surfaces is None:
        return device.kernel_overhead_s
    return reach.surfaces.products().constants.launch_s


def _after_ampere(device: DeviceType) -> bool:
    return "float8_e4m3fn" in device.peak_flops_per_s


def _attention_share(
    device: DeviceType, recipe: Recipe, reach: DeviceConstants
) -> float:
    """Share of a product's rate that fused attention reaches forward."""
    if recipe.ampere_attention and _after_ampere(device):
        return reach.attention_efficiency * _AMPERE_ON_NEWER
    return reach.attention_efficiency


def _repeated(table: KernelTable, recipe: Recipe) -> Array:
    """Share of forward that selective recomputation runs again. [1, kernels]."""
    attention = table.kind[None, :] == KERNEL_KINDS.index("attention")
    if recipe.selective == "attention":
        return np.where(attention, 1.0, 0.0)
    light = np.where(_products(table), 0.0, 1.0)
    if recipe.selective == "alternate":
        weighted = (table.kind == KERNEL_KINDS.index("matmul")) & (
            table.weight_bytes > 0
        )
        return np.where(weighted, 0.5, light)
    return light


def _backward_ops(table: KernelTable) -> Array:
    """Ops in the backward of each kernel. Shape [kernels].

    A product with weights has one for its input and one for its weights, if both want
    a gradient: as many as its FLOPs are those of the forward. Nothing that leads to
    trained weights alone, such as the first of a frozen base, has none at all.
    """
    wanted = np.round(table.backward_flops / np.maximum(table.forward_flops, 1.0))
    products = np.where(table.trained, np.clip(wanted, 1.0, 2.0), 1.0)
    products = np.where(table.kind <= 2, products, 1.0 + table.trained)
    moves = table.trained | (table.backward_flops + table.backward_bytes > 0)
    return np.where(moves | (table.weight_bytes == 0), products, 0.0)


def _bias_bytes(table: KernelTable, part: Division) -> Array:
    """Bytes of the gradients that are summed up over tokens for a product's bias.

    A kernel of its own in eager torch: 148 of an H200's 62 ms in a step of ViT-L took
    4.3 ms (`python -m benchmarks.one_gpu`, 2026-11-26). Shape [combinations, kernels].
    """
    elements = table.n * table.k * table.batch
    size = np.floor(table.weight_bytes / np.maximum(elements, 1.0))
    left = table.weight_bytes - size * elements
    biased = (table.kind == 0) & (left > 0) & (left <= 4 * table.n * table.batch)
    moved = size * part.m * part.n * part.products
    return np.where(biased & table.trained, moved, 0.0)


def summed_bytes(table: KernelTable, part: Division, passes: float) -> Array:
    """Bytes that adding a microbatch's gradients to the sum moves, as traced.

    Whatever the number of tokens, so that small microbatches pay for it. Kernels of
    their own do it, unless products of weight gradients add to the sum themselves.
    Shape [combinations, kernels].

    Args:
        table: Kernels at the traced batch.
        part: What a device has of them.
        passes: ``gradient_passes`` of the recipe.
    """
    return np.asarray(part.weights * np.where(table.trained, passes, 0.0))


#: Share of the memory bandwidth that fused updates reach: AdamW moved 28 bytes a weight
#: at 3.47 of an H200's 4.8 TB/s (`python -m benchmarks.gpu_kernels`, 2026-11-26).
_UPDATE_REACHED = 0.72

#: Unfused on CPU, each op is a pass of two reads and a write.
_UNFUSED_PASS = 3.0


def update_passes(optimizer: Optimizer, *, clip: bool) -> float:
    """Reads and writes of a scalar in one update.

    Args:
        optimizer: Which update.
        clip: Whether gradients are normed and scaled before.
    """
    passes = OPTIMIZERS[optimizer.name].passes
    if optimizer.momentum:
        passes += 2
    if optimizer.ema is not None:
        # Weights and average are read, the average is written.
        passes += 3
    return passes + (3 if clip else 0)


def optimizer_seconds(
    scalars: Array,
    tensors: Array,
    types: Index,
    devices: Sequence[DeviceType],
    optimizer: Optimizer,
    *,
    clip: bool,
) -> Array:
    """Time of one update: bound by memory, fused on GPUs, op by op on CPUs.

    Args:
        scalars: Parameters that a device updates. Shape [n].
        tensors: Tensors they are in. Shape [n].
        types: Device type of each. Shape [n].
        devices: All types.
        optimizer: Which update.
        clip: Whether gradients are normed and scaled before.
    """
    ops = OPTIMIZERS[optimizer.name].ops
    ops += 2 * bool(optimizer.momentum) + (optimizer.ema is not None)
    ops += 3 if clip else 0
    passes = update_passes(optimizer, clip=clip)
    on_cpu = np.array([device.backend == "gloo" for device in devices])
    rate = np.array([device.memory_bandwidth_bytes_per_s for device in devices])
    launch = np.array([device.kernel_overhead_s for device in devices])
    each = 4 * np.where(on_cpu, ops * _UNFUSED_PASS, passes / _UPDATE_REACHED) / rate
    calls = np.where(on_cpu, ops * launch, 0.0)
    return np.asarray(scalars * each[types] + tensors * calls[types])


def copy_seconds(
    size_bytes: Array, types: Index, devices: Sequence[DeviceType]
) -> Array:
    """Time in which a device copies tensors of its own: a read and a write.

    Args:
        size_bytes: Of the tensors. Shape [n].
        types: Device type of each. Shape [n].
        devices: All types.
    """
    rate = np.array([device.memory_bandwidth_bytes_per_s for device in devices])
    return np.asarray(2 * size_bytes / (_UPDATE_REACHED * rate[types]))
