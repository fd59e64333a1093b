"""``capture``: from a module to a ModelGraph."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch

from planner.capture.expand import expand
from planner.capture.facts import Facts, expert_patterns, model_facts
from planner.capture.fakes import build_on_meta
from planner.capture.inputs import ExampleInputs, read_inputs
from planner.capture.ladder import Reading, Source, climb
from planner.capture.loss import LossKind
from planner.capture.models import LoadedModel
from planner.capture.rehearse import rehearse
from planner.errors import CaptureError
from planner.graph.coarsen import coarsen
from planner.graph.model import ModelGraph
from planner.graph.ops import OpGraph
from planner.graph.sharding import infer_roles, parallel_dims, with_config_heads
from planner.graph.stream import mixing_layers, why_whole_stream
from planner.graph.structure import structure

__all__ = ["capture"]

#: Ops other than attention by which one token sees another.
_MIXES_TOKENS = frozenset(
    {
        "aten::convolution",
        "aten::flip",
        "aten::gru",
        "aten::lstm",
        "aten::roll",
        "aten::rnn_relu",
        "aten::rnn_tanh",
    }
)

_BATCH_NORMS = frozenset(
    {
        "aten::native_batch_norm",
        "aten::_native_batch_norm_legit",
        "aten::_batch_norm_with_update",
        "aten::cudnn_batch_norm",
    }
)


def capture(
    model: torch.nn.Module | Callable[[], torch.nn.Module] | LoadedModel,
    example_inputs: Any = None,
    *,
    ref: str | None = None,
    name: str | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = "bfloat16",
    loss: LossKind = "auto",
    repeat: bool = True,
    op_budget: int = 2_000_000,
) -> ModelGraph:
    """Read a model: run one forward and backward on tensors without memory.

    No weight is allocated and no GPU is needed. The module is not changed: a copy with
    fake weights runs in its place, and the random state, default dtype and gradient
    mode are left as they were.

    Args:
        model: A module (real or on the meta device), a function that builds one, or
            what :func:`planner.capture.load_model` returned.
        example_inputs: Keyword arguments of forward as a mapping, positional ones as a
            tuple, or one tensor. Tensors may be real, meta or fake, or given as
            ``((1, 4096), "int64")``. Batch is dim 0 of the first. May be left out for
            a loaded model, and for a transformers model that reads ``input_ids``.
        ref: Where the model came from, for the plan.
        name: For people; the class name by default.
        batch: Samples, where example_inputs are left out; 1 by default.
        seq_len: Tokens per sample, where example_inputs are left out.
        dtype: Compute dtype, floating weights and inputs are cast to it; None keeps
            each as it is.
        loss: ``model`` (what forward returns), ``cross_entropy``, ``mean_square``, or
            ``auto``.
        repeat: Whether equal blocks are run once and counted often.
        op_budget: Most ops, forward and backward, before reading is given up.

    Returns:
        The graph, all FLOPs and bytes of one forward and backward of the batch.

    Raises:
        CaptureError: If the model cannot be run; names the op and the module.
        OpBudgetError: If the op budget ran out.
    """
    loaded = model if isinstance(model, LoadedModel) else None
    compute = _dtype(dtype)
    build: Callable[[], torch.nn.Module] | None
    if isinstance(model, torch.nn.Module):
        module, build = model, None
    else:
        build = loaded.build if loaded is not None else model  # type: ignore[assignment]
        module = build_on_meta(build, compute)  # type: ignore[arg-type]
    facts = model_facts(module)
    example = _example(loaded, example_inputs, facts, batch, seq_len)
    inputs = read_inputs(module, example, high=facts.vocab_size)
    source = Source(
        module=module,
        owned=build is not None,
        inputs=inputs,
        dtype=compute,
        loss=loss,
        repeat=repeat,
        op_budget=op_budget,
    )
    reading = climb(source)
    label = name or (loaded.name if loaded is not None else type(module).__name__)
    where = ref or (loaded.ref if loaded is not None else None)
    return _graph(source, facts, reading=reading, name=label, ref=where)


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise CaptureError(
            f"dtype={name!r} is no floating torch dtype; use 'bfloat16', 'float16' or "
            f"'float32'"
        )
    return found


def _example(
    loaded: LoadedModel | None,
    given: Any,
    facts: Facts,
    batch: int | None,
    seq_len: int | None,
) -> Any:
    """Example inputs: the caller's, the loaded model's, or tokens."""
    if given is not None:
        return given
    if loaded is not None:
        return loaded.inputs
    if facts.vocab_size is None:
        raise CaptureError(
            "example_inputs are needed to run this model; pass for example "
            "example_inputs={'x': ((8, 3, 224, 224), 'float32')}"
        )
    length = seq_len or facts.max_length or 1024
    made: Mapping[str, Any] = {"input_ids": ((batch or 1, length), "int64")}
    return {**made, "use_cache": False} if facts.has_cache else made


def _length(inputs: ExampleInputs) -> int | None:
    """Tokens per sample: dim 1 of the first integer input of two dims."""
    for _, shape in inputs.shapes:
        if shape.high is not None and len(shape.shape) == 2:
            return shape.shape[1]
    return None


def _attention(
    module: torch.nn.Module, ops: OpGraph, reading: Reading
) -> Literal["causal", "full"] | None:
    """The one kind of attention, if nothing else mixes tokens and cp can serve it.

    A part of a sequence is computed alone only if its tokens' positions can be told
    to the model, and if the loss is a sum over tokens.
    """
    signature = inspect.signature(module.forward).parameters
    mixing = _MIXES_TOKENS.intersection(ops.names)
    told = "position_ids" in signature and reading.loss == "cross_entropy"
    if not told or mixing or len(reading.attention) != 1:
        return None
    (kind,) = reading.attention
    return None if kind == "other" else kind


def _batch_norm_values(ops: OpGraph, batch: int) -> int | None:
    """Fewest values a channel that a batch norm sees of one sample."""
    counts = []
    for name, made in zip(ops.names, ops.outputs, strict=True):
        if name in _BATCH_NORMS:
            # As the op made it: of its input only the first view is known.
            shape = ops.storage_tensor[made[0]][0]
            counts.append(max(1, math.prod(shape) // (shape[1] * batch)))
    return min(counts, default=None)


def _graph(
    source: Source,
    facts: Facts,
    *,
    reading: Reading,
    name: str,
    ref: str | None,
) -> ModelGraph:
    module, dtype, inputs = source.module, source.dtype, source.inputs
    ops = expand(reading.trace, module, dtype)
    plan = structure(ops)
    roles = infer_roles(ops, plan, facts.tp_plan, partial(rehearse, source))
    made = coarsen(ops, plan, roles)
    blocks = with_config_heads(made.blocks, facts.dims)
    transposed = {fqn for fqn, kind in ops.linear.items() if kind == "transposed"}
    dims, experts = parallel_dims(blocks, made.parameters, transposed)
    compute = str(dtype or torch.get_default_dtype()).removeprefix("torch.")
    config = dict(facts.config)
    config["loss"] = reading.loss
    sharding = {**roles.patterns, **expert_patterns(module)}
    return ModelGraph(
        name=name,
        ref=ref,
        batch=inputs.batch,
        seq_len=_length(inputs),
        dtype=compute,
        inputs=tuple(
            (
                key,
                shape.shape,
                shape.dtype if shape.high is not None or dtype is None else compute,
                shape.high,
            )
            for key, shape in inputs.shapes
        ),
        blocks=blocks,
        edges=made.edges,
        parameters=made.parameters,
        buffers_bytes=float(
            sum(b.numel() * b.element_size() for b in module.buffers())
        ),
        tp_dims=dims,
        sharding=sharding,
        whole=dict(roles.whole),
        whole_stream=why_whole_stream(blocks, made.edges),
        mixing=mixing_layers(blocks, sharding),
        batch_norm_values=_batch_norm_values(ops, inputs.batch),
        num_experts=experts,
        attention=_attention(module, ops, reading),
        assumptions=reading.assumptions,
        config=config,
    )
