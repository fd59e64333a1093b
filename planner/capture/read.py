"""Read a module into a ModelGraph."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from planner.capture.batch_check import batch_violation
from planner.capture.config_facts import ConfigFacts, config_facts, expert_patterns
from planner.capture.fakes import build_on_meta
from planner.capture.inputs import ExampleInputs, read_inputs
from planner.capture.media import has_media, with_media
from planner.capture.models import LoadedModel
from planner.capture.private_apis import has_fakes, names_of_modules
from planner.capture.repeat import expand
from planner.capture.run import LossKind, Reading, Source, trace_model
from planner.capture.token_check import TokenCheck
from planner.capture.token_rules import BATCH_NORMS
from planner.capture.tp_check import tp_violations
from planner.errors import CaptureError
from planner.graph.coarsen import coarsen
from planner.graph.fallbacks import fallback_code
from planner.graph.fusion import OpFusions
from planner.graph.model import WHOLE_BATCH, ModelGraph
from planner.graph.ops import OpGraph
from planner.graph.products import unlike_product
from planner.graph.sharding import (
    Roles,
    infer_roles,
    parallel_dims,
    with_config_heads,
)
from planner.graph.stream import mixing_layers, why_whole_stream
from planner.graph.turns import units_in_turn
from planner.graph.units import find_structure
from planner.schema.base import hooked_parameter, parameter_violation
from planner.schema.strategy_parts import matches_pattern

__all__ = ["capture"]

_AttentionKind = Literal["causal", "full"]
#: Most sizes in a row of an input that holds sizes.
_MOST_SIZES = 4


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
    splits: Mapping[str, str] | None = None,
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
        loss: ``model`` (what forward returns), ``cross_entropy`` of tokens, or of one
            class a sample, ``mean_square``, or ``auto``.
        repeat: Run equal blocks once and count them often.
        op_budget: Most ops, forward and backward, before reading is given up.
        splits: Pattern of module names to tensor-parallel style of Hugging Face, taken
            as they are instead of the model's own, while cp divides any sequence: for
            models that are priced and never run. None to check the model's own.

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
    violation = parameter_violation(module.named_parameters())
    if violation is not None:
        raise CaptureError(violation)
    facts = config_facts(module)
    if splits is not None:
        facts = replace(facts, tp_plan=splits)
    example = _example(loaded, example_inputs, facts, batch, seq_len)
    if (
        example_inputs is None
        and loaded is not None
        and loaded.images
        and has_media(module, loaded.config)
    ):
        example = with_media(module, loaded.config, example, loaded.images)
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
    reading = trace_model(source)
    source.loss = reading.loss
    own_code = not loaded and not type(module).__module__.startswith("transformers.")
    label = name or (loaded.name if loaded is not None else type(module).__name__)
    where = ref or (loaded.ref if loaded is not None else None)
    graph = _graph(
        source,
        facts,
        reading=reading,
        name=label,
        ref=where,
        trusted=splits is not None,
        numbers=partial(batch_violation, source, build) if own_code else None,
    )
    told = (*graph.assumptions, *_narrowed(module), *fallback_code(graph))
    return replace(graph, assumptions=told)


def _narrowed(module: torch.nn.Module) -> tuple[str, ...]:
    """Tell of weights that plans keep in a narrower dtype than the model does."""
    named = module.named_parameters()
    names = [name for name, one in named if one.dtype == torch.float64]
    if not names:
        return ()
    more = f" and {len(names) - 1} more parameters" if len(names) > 1 else ""
    verb = "are" if more else "is"
    return (f"{names[0]}{more} {verb} float64, which plans keep in float32",)


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
    facts: ConfigFacts,
    batch: int | None,
    seq_len: int | None,
) -> Any:
    """Choose example inputs: the caller's, the loaded model's, or tokens."""
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
    """Tokens per sample: dim 1 of the first integer input of two dims.

    Sizes (of a grid, of a picture) are few numbers that are known.
    """
    for _, shape in inputs.shapes:
        sizes = shape.values is not None and shape.shape[-1:] <= (_MOST_SIZES,)
        if shape.high is not None and len(shape.shape) == 2 and not sizes:
            return shape.shape[1]
    return None


#: Assumption of every model that returns neither a loss nor logits of tokens.
_MEAN_SQUARE = (
    "loss: forward returns neither a loss nor scores of tokens, so training minimises "
    "the mean square of its output, which is of use for measuring alone; return a loss "
    "from forward to train on it"
)
#: Words in the class names of models whose labels stand at their outputs: the kinds of
#: loss that transformers names so, and older models that were trained to fill gaps.
_UNSHIFTED = re.compile(
    r"For(Masked|PreTraining|TokenClassification|Permutation)|^(XLM|XLNet|Flaubert)"
)
_SHIFTED = re.compile(r"ForCausal|LMHead|ForConditionalGeneration")


def _label_shift(module: torch.nn.Module, reading: Reading) -> int:
    """By how many tokens labels are ahead of outputs: by the model's kind.

    An encoder-decoder's labels stand at its decoder's outputs, also where the decoder
    is trained alone (``BartForCausalLM``). Classes named for masked or causal language
    models are what they are named for; of others, attention tells.
    """
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return 0
    if reading.loss == "mean_square":
        return 1  # The field's default: there are no labels.
    name = type(module).__name__
    children = [type(child).__name__ for child in module.children()]
    if _UNSHIFTED.search(name) or any(c.endswith("DecoderWrapper") for c in children):
        return 0
    return 1 if _SHIFTED.search(name) or reading.attention != {"full"} else 0


def _attention(
    module: torch.nn.Module, reading: Reading
) -> tuple[_AttentionKind | None, str | None]:
    """Return the one kind of attention that cp may serve, or why there is none.

    A part of a sequence is computed alone only if its tokens' positions can be told
    to the model, and if the loss is a sum over tokens.
    """
    if "position_ids" not in inspect.signature(module.forward).parameters:
        return None, "forward takes no position_ids"
    if reading.loss != "cross_entropy":
        return None, f"the loss is {reading.loss}, which is no sum over tokens"
    kinds = reading.attention
    if not kinds:
        return None, "attention was not seen"
    if len(kinds) > 1 or "other" in kinds:
        return None, "attention has masks or dropout, or is not of one kind throughout"
    (kind,) = kinds
    return ("causal" if kind == "causal" else "full"), None


def _token_check(source: Source, sharding: Mapping[str, str]) -> TokenCheck:
    """Check of the model with more tokens, and with more samples."""
    experts = [pattern for pattern, style in sharding.items() if style == "experts"]
    opaque = [
        name
        for name in names_of_modules(source.module).values()
        if any(matches_pattern(pattern, name) for pattern in experts)
    ]
    return TokenCheck(source, _length(source.inputs), opaque)


def _attends_outside(ops: OpGraph, units: Sequence[str]) -> str | None:
    """Name attention that no unit's forward holds, where alone cp serves it.

    Executors keep no unit that holds others: blocks that share their weights (ALBERT).
    """
    distinct = set(units)
    holds = {
        unit
        for unit in distinct
        if any(other.startswith(f"{unit}.") for other in distinct)
    }
    for kernel, module, unit in zip(ops.kernels, ops.modules, units, strict=True):
        if kernel.kind == "attention" and (unit in holds or not unit):
            return f"{module or 'its forward'} attends outside of any unit"
    return None


def _batch_norm_values(ops: OpGraph, model: nn.Module, batch: int) -> int | None:
    """Fewest values a channel that a batch norm sees of one sample.

    Those that use running statistics do not count, nor does code that calls the op of
    its own accord, of which the samples are looked at elsewhere.
    """
    counts = []
    for name, fqn, made in zip(ops.names, ops.modules, ops.outputs, strict=True):
        if name.removeprefix("aten::") not in BATCH_NORMS:
            continue
        norm = model.get_submodule(fqn)
        if isinstance(norm, _BatchNorm) and (
            norm.training or norm.running_mean is None
        ):
            # The output of the op: only the first view of its input is known.
            shape = ops.storage_tensor[made[0]][0]
            counts.append(max(1, math.prod(shape) // (shape[1] * batch)))
    return min(counts, default=None)


def _graph(
    source: Source,
    facts: ConfigFacts,
    *,
    reading: Reading,
    name: str,
    ref: str | None,
    trusted: bool,
    numbers: Callable[..., str | None] | None,
) -> ModelGraph:
    module, dtype, inputs = source.module, source.dtype, source.inputs
    ops = expand(reading.trace, module, dtype)
    plan = find_structure(ops)
    compute = str(dtype or torch.get_default_dtype()).removeprefix("torch.")
    unlike = None if trusted else unlike_product(ops, plan.units, compute)
    if unlike is not None:
        raise CaptureError(unlike)
    trial = None if trusted else partial(tp_violations, source)
    roles = infer_roles(ops, plan, facts.tp_plan, trial, trusted=trusted)
    made = coarsen(ops, plan, roles)
    blocks = with_config_heads(made.blocks, facts.dims)
    transposed = {fqn for fqn, kind in ops.linear.items() if kind == "transposed"}
    dims, experts = parallel_dims(blocks, made.parameters, transposed)
    sharding = {**roles.patterns, **expert_patterns(module)}
    check = None if trusted else _token_check(source, sharding)
    found = _divisions(
        check,
        reading,
        _attention(module, reading),
        outside=_attends_outside(ops, plan.units),
        stream=None
        if trusted
        else why_whole_stream(blocks, made.edges) or _passed_by(roles),
        sharding=sharding,
        units=list(dict.fromkeys(plan.units)),
        numbers=numbers
        and partial(
            numbers,
            sum(block.forward_flops for block in blocks),
            sum(block.saved_bytes for block in blocks),
        ),
    )
    told = _told(source, reading)
    own, ignored = found.own_loss, reading.ignore_index
    config = dict(facts.config) | {
        "loss": reading.loss,
        **({} if own is None else {"own_loss": own}),
        **({} if ignored in (None, -100) else {"ignore_index": ignored}),
        "label_shift": _label_shift(module, reading),
    }
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
        values=inputs.sample_values(told),
        sized_by=told if "size" in reading.known_reads else (),
        in_turn=units_in_turn(ops, plan),
        frozen=check.frozen() if check else None,
        hooked=hooked_parameter(module.named_parameters()),
        blocks=blocks,
        edges=made.edges,
        parameters=made.parameters,
        buffers_bytes=float(
            sum(b.numel() * b.element_size() for b in module.buffers())
        ),
        tp_dims=dims,
        sharding=sharding,
        whole=dict(roles.whole),
        whole_stream=found.whole_stream,
        mixing=mixing_layers(blocks, sharding),
        batch_norm_values=_batch_norm_values(ops, module, inputs.batch),
        spatial_sizes=made.space.sizes,
        whole_sample=made.space.whole,
        num_experts=experts,
        attention=found.attention,
        whole_sequence=found.whole_sequence,
        assumptions=found.assumptions,
        config=config,
        fusions=OpFusions(graph=ops, structure=plan, roles=roles, dims=facts.dims),
    )


def _told(source: Source, reading: Reading) -> tuple[str, ...]:
    """Inputs whose values decide what runs; of a real run, those that may be sizes."""
    shapes = [one for one in source.inputs.shapes if one[1].values is not None]
    if not source.valued:
        most = _MOST_SIZES * source.inputs.batch
        shapes = [one for one in shapes if math.prod(one[1].shape) <= most]
    return tuple(name for name, _ in shapes) if reading.known_reads else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Divisions:
    """Along what a batch cannot be divided: as in :class:`planner.graph.ModelGraph`."""

    attention: _AttentionKind | None
    whole_sequence: str | None
    whole_stream: str | None
    own_loss: str | None
    assumptions: tuple[str, ...]


def _divisions(
    check: TokenCheck | None,
    reading: Reading,
    attention: tuple[_AttentionKind | None, str | None],
    *,
    outside: str | None,
    stream: str | None,
    sharding: Mapping[str, str],
    units: Sequence[str],
    numbers: Callable[..., str | None] | None,
) -> _Divisions:
    """Look at tokens and samples, as far as nothing else rules their division out.

    Args:
        check: Runs of the model; None to trust it.
        reading: Of the model.
        attention: Its kind, and why there is none that cp divides.
        outside: Attention outside of any unit.
        stream: Why sequence parallelism is ruled out.
        sharding: Pattern to style.
        units: In order.
        numbers: Trains the model on a batch and on its halves, to tell the difference.
    """
    kind, whole = attention
    assumptions, own = reading.assumptions, reading.own_loss
    if check and check.has_tokens and stream is None and "rowwise" in sharding.values():
        stream = check.stream(sharding, units)
    if check and check.has_tokens and kind is not None:
        whole = outside or check.context()
        if whole is not None:
            kind = None
            assumptions = (*assumptions, f"no context parallelism: {whole}")
    together = untried = None
    try:
        together = check.samples() if check else None
    except CaptureError as error:
        if has_fakes():
            # Unknown is no: some experts have room for so many tokens of a batch.
            untried = f"{error}, and may bring them together"
        else:
            assumptions = (*assumptions, f"samples are treated one by one: {error}")
    if check and check.sums_draws and numbers:
        # As many of each sample perhaps, which numbers tell.
        together, untried = None, together
    if together is None and own is None and numbers and check:
        together = numbers(closely=untried is not None)
    # Empty where numbers have shown that there is no meeting.
    together = (untried if together is None else together) or None
    if together is None and own == "coupled":
        together = "its own loss compares samples, sums them up, or weighs some more"
    if together is not None:
        own = "coupled"
        assumptions = (*assumptions, f"{WHOLE_BATCH}{together}")
    if check and check.shared_draws and together is None:
        assumptions = (*assumptions, _shared(check.shared_draws))
    if reading.loss == "mean_square":
        assumptions = (*assumptions, _MEAN_SQUARE)
    return _Divisions(
        attention=kind,
        whole_sequence=whole,
        whole_stream=stream,
        own_loss=own,
        assumptions=assumptions,
    )


def _shared(draws: Sequence[str]) -> str:
    """Tell of random numbers of which each part of a batch has its own."""
    return (
        f"random numbers: forward draws some that all samples of a batch share "
        f"({', '.join(draws)}); each data-parallel rank and microbatch draws its own, "
        f"so that the mean gradient is the same and its variance another"
    )


def _passed_by(roles: Roles) -> str | None:
    """Name a module that is no region as a whole; None if there is none."""
    if not roles.open:
        return None
    return f"activations pass by the sums of {roles.open[0]}"
