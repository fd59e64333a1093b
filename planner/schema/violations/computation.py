"""Rules of what one device computes, in which dtypes, and where it keeps tensors.

Functions that take a :class:`Case` are rules of the executors; others are rules of
tables, too. Each returns value, rule and remedy; None if its rule is kept.
"""

from __future__ import annotations

from planner.schema import methods
from planner.schema.optimizers import OPTIMIZERS
from planner.schema.strategy_parts import Offload
from planner.schema.violations.case import Case

__all__ = [
    "chunked",
    "compiled",
    "offload_violation",
    "offloaded",
    "optimizer",
    "precision",
    "whole_violation",
]

#: Dtypes in which few methods but plain steps are run, and why.
_IN_PLAIN_STEPS = {
    "float16": "whose steps do not scale the loss",
    "float8": "whose layers are not those that torchao casts",
}


def precision(case: Case) -> str | None:
    """Require dtypes that the executors and their optimizers compute in."""
    strategy = case.strategy
    precision = strategy.precision
    if precision.compute == "float8" and case.experts:
        return (
            f"compute=float8 of {case.experts} experts, whose products are no linear "
            f"layers that torchao casts; use bfloat16"
        )
    if precision.compute == "float8" and strategy.mesh.tp > 1:
        return (
            f"compute=float8 with tp={strategy.mesh.tp}, which splits layers that "
            f"torchao casts whole; use tp=1 or bfloat16"
        )
    if precision.compute == "float16" and precision.parameter != "float32":
        return (
            f"compute=float16 with parameter={precision.parameter}; use float32 "
            f"for weights"
        )
    why = _IN_PLAIN_STEPS.get(precision.compute)
    for slot in methods.slots() if why else ():
        value = getattr(strategy, slot)
        if not methods.runs_in(slot, value, precision.compute):
            return (
                f"compute={precision.compute} with {slot}={value}, {why}; use bfloat16"
            )
    if precision.parameter == "bfloat16" and precision.compute == "float32":
        return "compute=float32 of bfloat16 parameters; use bfloat16 for both"
    if strategy.optimizer.state_dtype != precision.parameter:
        return (
            f"state_dtype={strategy.optimizer.state_dtype} with "
            f"parameter={precision.parameter}; torch's optimizers keep states as they "
            f"keep parameters, use {precision.parameter} for both"
        )
    return None


def compiled(case: Case) -> str | None:
    """Require a step that compiled blocks compute rightly."""
    strategy = case.strategy
    if not strategy.compile:
        return None
    if not strategy.stages:
        return (
            "compile=True without stages; name the modules of the one stage, whose "
            "blocks are compiled"
        )
    if strategy.mesh.tp > 1:
        return (
            f"compile=True with tp={strategy.mesh.tp}; compiled code was seen to give "
            f"wrong numbers around the sums of tp, use compile=False or tp=1"
        )
    if strategy.mesh.ep > 1:
        return (
            f"compile=True with ep={strategy.mesh.ep}; experts get another number of "
            f"tokens each step, for which code would be made anew, use compile=False "
            f"or ep=1"
        )
    if strategy.mesh.pp > 1 and strategy.schedule_spec.splits_backward:
        return (
            f"compile=True with {strategy.schedule}; a compiled block computes all "
            f"gradients at once and would compute them twice, use compile=False or 1F1B"
        )
    return None


def chunked(case: Case) -> str | None:
    """Require a step in which the last layer can take the loss in chunks."""
    strategy = case.strategy
    if strategy.loss_chunks == 1:
        return None
    shown = f"loss_chunks={strategy.loss_chunks}"
    if not strategy.stages:
        return (
            f"{shown} without stages; name the modules of the one stage, whose last "
            f"makes the logits"
        )
    if strategy.mesh.pp > 1 and strategy.schedule_spec.splits_backward:
        return (
            f"{shown} with {strategy.schedule}; the last layer computes all gradients "
            f"at once and would compute them twice, use loss_chunks=1 or 1F1B"
        )
    for slot in ("learning", "asynchrony", "synchronisation"):
        value = getattr(strategy, slot)
        if value != methods.default_value(slot):
            return (
                f"{shown} with {slot}={value}, with which it was not tried; use "
                f"loss_chunks=1"
            )
    return None


def offload_violation(
    offload: Offload, pp: int, zero_stage: int, shards: int
) -> str | None:
    """Why tensors cannot lie in the host's memory; None if they can.

    Args:
        offload: Which.
        pp: Pipeline degree.
        zero_stage: ZeRO's stage.
        shards: Devices that ZeRO shards over.
    """
    if offload.states != "parameters":
        return None
    if pp > 1:
        return (
            f"offload.states=parameters with pp={pp}; a stage would wait for its "
            f"weights with every microbatch, use optimizer, or pp=1"
        )
    if zero_stage == 0 or shards == 1:
        return (
            f"offload.states=parameters with zero_stage={zero_stage} over {shards} "
            f"devices; weights come to a device as ZeRO gathers them, use optimizer, "
            f"or zero_stage=3 with dp_shard or cp > 1"
        )
    return None


def offloaded(case: Case) -> str | None:
    """Require a step in which what lies in the host's memory is there in time."""
    strategy, offload = case.strategy, case.strategy.offload
    if not offload:
        return None
    for slot in methods.slots():
        value = getattr(strategy, slot)
        if value != methods.default_value(slot):
            return (
                f"offload={offload} with {slot}={value}, with which it was not tried; "
                f"use offload=none"
            )
    if offload.states == "parameters" and strategy.precision.compute == "float16":
        return (
            "offload.states=parameters with compute=float16, whose gradients are "
            "scaled on the device; use bfloat16, or optimizer"
        )
    if offload.activations and not strategy.stages:
        return (
            "offload.activations without stages; name the modules of the one stage, "
            "each of which begins its recomputation with what is offloaded"
        )
    kinds = {stage.recompute for stage in strategy.stages}
    if offload.activations and kinds != {"full"}:
        return (
            f"offload.activations with recompute={', '.join(sorted(kinds))}; what is "
            f"offloaded is what recomputation begins with, use recompute=full"
        )
    if offload.activations and strategy.compile:
        return (
            "offload.activations with compile=True; compiled blocks save what no hook "
            "sees, use one of the two"
        )
    splits = strategy.mesh.pp > 1 and strategy.schedule_spec.splits_backward
    if offload.activations and splits:
        return (
            f"offload.activations with {strategy.schedule}; a split backward reads "
            f"them twice, use 1F1B"
        )
    mesh = strategy.mesh
    return offload_violation(offload, mesh.pp, strategy.zero_stage, mesh.shards)


#: Optimizers whose states methods divide, keep apart and hand on.
_KNOWN_STATES = ("AdamW", "Adam", "SGD")


def whole_violation(name: str, shards: int, tp: int, ep: int) -> str | None:
    """Why an optimizer cannot update parts of tensors; None if it can, or has none.

    Args:
        name: Of the optimizer.
        shards: Devices that ZeRO divides tensors over.
        tp: Degree; likewise ep.
    """
    if not OPTIMIZERS[name].whole or shards == tp == ep == 1:
        return None
    axis = "ZeRO" if shards > 1 else f"tp={tp}" if tp > 1 else f"ep={ep}"
    return (
        f"optimizer={name} with {axis}; it keeps sums and scales of whole tensors, of "
        f"which a rank has a part, use AdamW, or dp_replicate or pp"
    )


def optimizer(case: Case) -> str | None:
    """Require an optimizer that the parts and methods of a step leave whole."""
    strategy = case.strategy
    name, ema = strategy.optimizer.name, strategy.optimizer.ema
    if ema is not None and strategy.precision.parameter != "float32":
        return (
            f"ema={ema} with parameter={strategy.precision.parameter}, in which a "
            f"step's part of an average is lost in rounding; use float32 or ema=None"
        )
    kind, mesh = OPTIMIZERS[name], strategy.mesh
    if not kind.elementwise and strategy.offload.states != "none":
        return (
            f"optimizer={name} with offload.states={strategy.offload.states}; the host "
            f"updates numbers one by one, use AdamW, or offload=none"
        )
    violation = whole_violation(
        name, mesh.shards if strategy.zero_stage else 1, mesh.tp, mesh.ep
    )
    if violation is not None:
        return violation
    if name in _KNOWN_STATES and ema is None:
        return None
    for slot in methods.slots():
        value = getattr(strategy, slot)
        # Stages of their own have whole optimizers of their own.
        if slot != "asynchrony" and value != methods.default_value(slot):
            if ema is not None:
                return (
                    f"ema={ema} with {slot}={value}, which knows nothing of averages "
                    f"of the weights; use ema=None"
                )
            return (
                f"optimizer={name} with {slot}={value}, which knows the states of "
                f"{', '.join(_KNOWN_STATES)}; use one of these"
            )
    return None
