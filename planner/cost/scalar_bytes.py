"""Bytes of a scalar by purpose: what a request says, as compiled code takes it."""

from __future__ import annotations

from planner.cost.recipes import Recipe
from planner.cost.row_memory import Bytes
from planner.schema import Optimizer, Precision
from planner.units import dtype_bytes

__all__ = ["bytes_of"]


def bytes_of(
    precision: Precision, optimizer: Optimizer, recipe: Recipe, on_gpu: bool
) -> Bytes:
    """What a request says of bytes.

    Args:
        precision: What parameters are kept, computed with and reduced in.
        optimizer: How many states each parameter has, and of which dtype.
        recipe: What the executors keep beside tensors.
        on_gpu: Whether an allocator and contexts take their part, and NCCL sends.
    """
    # float8 products still gather and keep bfloat16 weights and activations.
    compute = "bfloat16" if precision.compute == "float8" else precision.compute
    states = optimizer.states_per_parameter * dtype_bytes(optimizer.state_dtype)
    return Bytes(
        stored=float(dtype_bytes(precision.parameter)),
        compute=float(dtype_bytes(compute)),
        reduce=float(dtype_bytes(precision.reduce)),
        states=float(states),
        swell=1.0 + recipe.fragmentation if on_gpu else 1.0,
        reserve=float(recipe.reserve_bytes) if on_gpu else 0.0,
        computed_gradients=recipe.gradients == "computed",
        both_gradients=recipe.gradients == "both",
        gathers_whole=recipe.gathers_whole,
        all_waiting=recipe.receive_buffers == "all",
        # gloo's requests hold what they have sent until the pipeline lets go of them.
        keeps_sent=not on_gpu,
        keeps_graph=recipe.keeps_graph,
    )
