"""Run a model under the tracer, in the first of three ways that works.

1. On fake tensors, watching what autograd saves.
2. On fake tensors without saved-tensor hooks, which ``torch.func`` transforms refuse;
   every forward tensor that a gradient needs is then taken to be saved.
3. For real, on the CPU, if the model is small.

If none works, one error names the op and the module of each failure.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import torch

from planner.capture.fakes import fake_copy, fakeify, quiet_state, real_copy
from planner.capture.inputs import ExampleInputs, InputShape
from planner.capture.own_loss import ignore_index, own_loss
from planner.capture.private_apis import (
    fake_mode,
    fused_dropout,
    known_tensor,
    quiet_forward,
    tree_flatten,
)
from planner.capture.repeat import repeated_modules, repeats_traced_once
from planner.capture.shapes import ShapeCache
from planner.capture.stand_ins import AttentionKind, fused_attention_patched
from planner.capture.trace import Trace, Tracer
from planner.errors import CaptureError, OpBudgetError
from planner.model_output import (
    has_scalars,
    loss_beside,
    main_tensor,
    named_loss,
    parts_of,
)

__all__ = [
    "Loss",
    "LossKind",
    "Reading",
    "Source",
    "compute_loss",
    "own_loss_of",
    "scores_of",
    "trace_model",
]

#: Most parameters for which a model is run for real.
_REAL_LIMIT = 100_000_000

LossKind = Literal["auto", "cross_entropy", "model", "mean_square"]


@dataclass(slots=True, kw_only=True)
class Source:
    """A model to be read, with its inputs and options.

    What reads it shares one fake copy, see :meth:`fake`.

    Attributes:
        module: The caller's module, real or meta; never changed.
        owned: True if nobody else holds the module, so that one try may use it up
            instead of a copy.
        inputs: Arguments of forward.
        dtype: Compute dtype; None keeps every tensor as it is.
        loss: Kind of the scalar that backward starts from.
        repeat: Run equal blocks once.
        op_budget: Most ops that may be seen.
        valued: Whether integers whose values are given keep them.
    """

    module: torch.nn.Module
    owned: bool
    inputs: ExampleInputs
    dtype: torch.dtype | None
    loss: LossKind
    repeat: bool
    op_budget: int
    valued: bool = field(default=False, init=False)
    _fake: tuple[torch.nn.Module, Any] | None = field(default=None, init=False)
    _shapes: ShapeCache | None = field(default=None, init=False)
    _repeats: list[list[torch.nn.Module]] | None = field(default=None, init=False)

    def fake(self, *, anew: bool = False) -> tuple[torch.nn.Module, Any]:
        """Return the model in training mode with fake weights, and their mode.

        Whoever runs or changes it leaves it as it was.

        Args:
            anew: Make another copy, after a run that may have left this one half done.
        """
        if self._fake is None or anew:
            self._repeats = None
            mode = fake_mode(valued=self.valued)
            make = fakeify if self.owned else fake_copy
            self._fake = make(self.module, mode, self.dtype).train(), mode
            self._shapes = ShapeCache(mode)
        return self._fake

    def set_valued(self, valued: bool) -> None:
        """Say whether integers whose values are given keep them from now on."""
        self.valued, self._fake, self._shapes = valued, None, None

    def shapes(self) -> ShapeCache:
        """Return the shapes that runs of the fake copy have in common."""
        self.fake()
        assert self._shapes is not None
        return self._shapes

    def arguments(self, mode: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of forward, zeros where their values are not known.

        Args:
            mode: Fake mode of the model; None for tensors with memory.
        """

        def make(shape: InputShape) -> torch.Tensor:
            if mode is None and shape.values is not None:
                return shape.known()
            if self.valued and shape.values is not None:
                return known_tensor(mode, shape.known)
            dtype: torch.dtype = getattr(torch, shape.dtype)
            if dtype.is_floating_point and self.dtype is not None:
                dtype = self.dtype
            return torch.zeros(shape.shape, dtype=dtype)

        return self.inputs.materialise(make)

    def repeats(self) -> list[list[torch.nn.Module]]:
        """Return groups of equal blocks of the fake copy, to be run once each."""
        if self._repeats is None:
            self._repeats = repeated_modules(self.fake()[0]) if self.repeat else []
        return self._repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A finished trace.

    Attributes:
        trace: The ops.
        way: The way that worked: ``fake``, ``no_hooks`` or ``real``.
        loss: Kind of the loss.
        own_loss: Values that the model's own loss is a mean over, see
            :class:`planner.schema.Workload`.
        ignore_index: The same.
        assumptions: Guesses that were made.
        attention: Kinds of attention that were called; empty where it was not seen.
        known_reads: Kinds of what was read of known integers: ``truth``, ``size``.
    """

    trace: Trace
    way: str
    loss: LossKind
    assumptions: tuple[str, ...]
    attention: frozenset[AttentionKind] = frozenset()
    own_loss: Literal["tokens", "coupled"] | None = None
    ignore_index: int | None = None
    known_reads: frozenset[str] = frozenset()


def trace_model(source: Source) -> Reading:
    """Trace a model in the first way that works.

    Raises:
        OpBudgetError: If the budget ran out; other ways would not end either.
        CaptureError: If no way works.
    """
    first: Reading | CaptureError
    try:
        first = _first_way(source)
    except CaptureError as error:
        first = error
    guessed = isinstance(first, CaptureError) or first.assumptions
    if guessed and source.inputs.has_values:
        source.set_valued(True)
        if isinstance(first, CaptureError):
            return _first_way(source)
        with contextlib.suppress(CaptureError):
            known = _first_way(source)
            if len(known.assumptions) < len(first.assumptions):
                return known
        source.set_valued(False)
    if isinstance(first, CaptureError):
        raise first
    return first


def _first_way(source: Source) -> Reading:
    failures: list[str] = []
    last: Exception | None = None
    for way, attempt in (("fake", _fake), ("no_hooks", _fake), ("real", _real)):
        if way == "real" and (too_large := _too_large(source.module)):
            failures.append(f"real run: {too_large}")
            break
        try:
            with quiet_state(), warnings.catch_warnings():
                # The traced model's own deprecations are not the caller's.
                warnings.simplefilter("ignore")
                return attempt(source, way)
        except (OpBudgetError, CaptureError):
            raise
        except Exception as error:
            failures.append(f"{_WAYS[way]}: {_one_line(error)}")
            last = error
    how = ""
    if source.dtype in (torch.bfloat16, torch.float16):
        name = str(source.dtype).removeprefix("torch.")
        how = f" with weights in {name} and buffers as they are, or plan in float32"
    raise CaptureError(
        f"the model could not be read; {'; '.join(failures)}. Check that "
        f"module(**example_inputs) and backward run in plain torch{how}"
    ) from last


_WAYS = {
    "fake": "on fake tensors",
    "no_hooks": "on fake tensors without saved-tensor hooks",
    "real": "real run",
}


def _one_line(error: Exception) -> str:
    where = getattr(error, "_meshwright_where", "")
    text = " ".join(str(error).split())[:300]
    return f"{where}{type(error).__name__}: {text}"


def _too_large(module: torch.nn.Module) -> str:
    count = sum(parameter.numel() for parameter in module.parameters())
    if count <= _REAL_LIMIT:
        return ""
    return (
        f"not tried, {count:,} parameters are more than the {_REAL_LIMIT:,} that are "
        f"run for real; shrink the config to see the error"
    )


def _fake(source: Source, way: str) -> Reading:
    module, mode = source.fake(anew=True)
    tracer = Tracer(
        module,
        op_budget=source.op_budget,
        hooks=way == "fake",
        shapes=source.shapes(),
    )
    attention: set[AttentionKind] = set()
    with (
        mode,
        fused_attention_patched(attention),
        fused_dropout(),
        quiet_forward(),
    ):
        loss, own, ignored = _run(source, module, tracer, source.repeats(), mode)
    if way == "no_hooks":
        _assume_saved(tracer)
    return Reading(
        trace=tracer.trace,
        way=way,
        loss=loss,
        assumptions=tuple(tracer.assumptions),
        attention=frozenset(attention),
        own_loss=own,
        ignore_index=ignored,
        known_reads=frozenset(tracer.known_reads) if source.valued else frozenset(),
    )


def _real(source: Source, way: str) -> Reading:
    module = real_copy(source.module, source.dtype)
    module.train()
    tracer = Tracer(module, op_budget=source.op_budget)
    groups = repeated_modules(module) if source.repeat else []
    loss, own, ignored = _run(source, module, tracer, groups)
    tracer.assume(
        "real run", "weights are small positive numbers, integers zero if not given"
    )
    return Reading(
        trace=tracer.trace,
        way=way,
        loss=loss,
        assumptions=tuple(tracer.assumptions),
        own_loss=own,
        ignore_index=ignored,
        known_reads=frozenset(["truth"] if source.inputs.has_values else []),
    )


def _run(
    source: Source,
    module: torch.nn.Module,
    tracer: Tracer,
    groups: Sequence[Sequence[torch.nn.Module]],
    mode: Any = None,
) -> tuple[LossKind, Literal["tokens", "coupled"] | None, int | None]:
    """Run forward, loss and backward under the tracer.

    Returns:
        Kind of the loss, what the model's own is a mean over, and the label that it
        leaves out.
    """
    if source.dtype is not None:
        torch.set_default_dtype(source.dtype)
    args, kwargs = source.arguments(mode)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(tracer)
        stack.enter_context(repeats_traced_once(groups, tracer))
        try:
            loss = compute_loss(module(*args, **kwargs), source.loss, source.inputs)
            if source.loss == "auto" and loss.kind != "model":
                _require_returned(module)
            own, ignored = None, None
            if loss.kind == "model":
                own = own_loss(loss.value, source.inputs)
                ignored = ignore_index(loss.value)
            loss.value.backward()  # type: ignore[no-untyped-call]
        except OpBudgetError:
            raise
        except CaptureError:
            raise
        except Exception as error:
            error._meshwright_where = _where(error, tracer)  # type: ignore[attr-defined]
            raise
    return loss.kind, own, ignored


def _where(error: Exception, tracer: Tracer) -> str:
    """Begin a message with ``op aten::mm in module 'a.b': ``."""
    module = _failing_module(error.__traceback__, tracer) or tracer.current[1]
    op = tracer.current[0] or "none yet"
    return f"op {op} in module {module or 'root'!r}: "


def _failing_module(trace: TracebackType | None, tracer: Tracer) -> str | None:
    """FQN of the innermost module whose method is on the stack of an error."""
    found = None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            name = tracer.name_of(owner)
            found = name if name is not None else found
        trace = trace.tb_next
    return found


def _assume_saved(tracer: Tracer) -> None:
    """Record every forward output that is not a source as saved, without hooks."""
    trace = tracer.trace
    for row, storages in enumerate(trace.outputs):
        for storage in storages:
            if storage >= 0 and trace.backward_bytes[row] > 0:
                trace.saves.append((row, storage, trace.modules[row]))
    tracer.assume("no saved-tensor hooks", "every tensor of forward is kept")


# -- The loss --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss and its kind.

    Attributes:
        value: Scalar tensor.
        kind: ``cross_entropy``, ``model`` or ``mean_square``.
    """

    value: torch.Tensor
    kind: LossKind


def scores_of(output: Any, integers: Iterable[tuple[int, ...]]) -> torch.Tensor | None:
    """Find scores [batch, length, vocabulary] of an integer input [batch, length]."""
    found = main_tensor(output)
    if found is None or found.dim() != 3 or not found.is_floating_point():
        return None
    return found if tuple(found.shape[:2]) in set(integers) else None


def _class_scores(output: Any) -> torch.Tensor | None:
    """Find scores [batch, classes]."""
    found = main_tensor(output)
    if found is None or found.dim() != 2 or not found.is_floating_point():
        return None
    return found


def _cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Loss of tokens or classes in fp32, which of them is right being without effect.

    fp32 matters: the log-probabilities that are kept are the largest tensor of many
    models.
    """
    scores = logits.float().flatten(0, -2)
    labels = torch.zeros(len(scores), dtype=torch.int64, device=logits.device)
    return torch.nn.functional.cross_entropy(scores, labels)


def _mean_square(output: Any) -> torch.Tensor:
    floating = [
        leaf
        for leaf in tree_flatten(parts_of(output))[0]
        if isinstance(leaf, torch.Tensor)
        and leaf.is_floating_point()
        and leaf.requires_grad
    ]
    if not floating:
        raise CaptureError(
            "forward returned no floating tensor that needs a gradient, so there is "
            "nothing to train; check requires_grad and that forward is not under "
            "no_grad"
        )
    total = floating[0].float().square().mean()
    for tensor in floating[1:]:
        total = total + tensor.float().square().mean()
    return total


def compute_loss(output: Any, kind: LossKind, inputs: ExampleInputs) -> Loss:
    """Make a scalar loss from whatever a forward returned.

    ``auto`` takes the model's own loss if it has one, next-token cross-entropy if the
    output scores every position of an integer input, and the mean square otherwise.
    ``cross_entropy`` also takes one score a class for each sample, whose labels come
    with the data.

    Args:
        output: Result of forward.
        kind: Kind of loss to make.
        inputs: What forward was given.

    Raises:
        CaptureError: If the output does not allow that loss.
    """
    found = _loss(output, kind, inputs)
    if not found.value.requires_grad:
        raise CaptureError(
            "the loss needs no gradient, so there is nothing to train; check "
            "requires_grad of the parameters and that forward is not under no_grad"
        )
    return found


def own_loss_of(
    output: Any, kind: LossKind, inputs: ExampleInputs
) -> torch.Tensor | None:
    """Return the loss that a forward returned, if that is the kind to train on.

    Raises:
        CaptureError: If nobody knows what a scalar beside other tensors is.
    """
    if kind not in ("auto", "model"):
        return None
    own = named_loss(output)
    if own is not None:
        return own
    beside = loss_beside(output)
    if kind == "model" or (beside is not None and inputs.labelled):
        return beside
    if beside is not None:
        raise _unnamed(
            "forward returns a scalar beside other tensors, and has no input named "
            "labels or targets, so it may be the loss or a part of one"
        )
    if has_scalars(output):
        raise _unnamed("forward returns several scalars, none of them named loss")
    return None


def _unnamed(what: str) -> CaptureError:
    """Make the error for a scalar of which nobody knows whether it is the loss."""
    return CaptureError(
        f"{what}; return it (of several, their sum) as a field or key named loss, or "
        f"return it alone; or choose one by planning for "
        f"planner.capture.capture(model, example_inputs, loss='model'), or with "
        f"'cross_entropy' or 'mean_square' of the other outputs"
    )


def _require_returned(module: torch.nn.Module) -> None:
    """Refuse a forward that keeps a scalar to train on instead of returning it.

    Raises:
        CaptureError: Naming the attribute.
    """
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, torch.Tensor) and not value.dim() and value.grad_fn:
                where = f"{name}.{key}" if name else key
                raise _unnamed(
                    f"forward keeps a scalar that needs a gradient as {where!r}, and "
                    f"returns no loss"
                )


def _loss(output: Any, kind: LossKind, inputs: ExampleInputs) -> Loss:
    own = own_loss_of(output, kind, inputs)
    if kind == "model" or own is not None:
        if own is None:
            raise CaptureError(
                "loss='model', but forward returned neither a scalar nor a .loss; use "
                "loss='mean_square' or pass labels among example_inputs"
            )
        return Loss(value=own, kind="model")
    logits = scores_of(
        output, [shape.shape for _, shape in inputs.shapes if shape.high is not None]
    )
    if kind == "cross_entropy" and logits is None:
        logits = _class_scores(output)
    if kind == "cross_entropy" or (kind == "auto" and logits is not None):
        if logits is None:
            raise CaptureError(
                "loss='cross_entropy', but forward returned no logits of shape "
                "[batch, length, vocabulary] for an integer input [batch, length], nor "
                "of shape [batch, classes]; use loss='mean_square'"
            )
        return Loss(value=_cross_entropy(logits), kind="cross_entropy")
    return Loss(value=_mean_square(output), kind="mean_square")
