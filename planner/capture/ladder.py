"""Three ways to run a model for reading, tried in order.

1. On fake tensors, watching what autograd saves.
2. On fake tensors without saved-tensor hooks, which ``torch.func`` transforms refuse;
   every forward tensor that a gradient needs is then taken to be saved.
3. For real, on the CPU, if the model is small.

If none works, one error names the op and the module of each failure.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from types import TracebackType

import torch

from planner.capture.attention import AttentionKind, fused_attention_patched
from planner.capture.fakes import fake_copy, fakeify, quiet_state, real_copy
from planner.capture.inputs import ExampleInputs, InputShape
from planner.capture.loss import LossKind, compute_loss
from planner.capture.record import Trace
from planner.capture.repeat import repeats_traced_once
from planner.capture.torch_private import fake_mode, without_fused_rnn
from planner.capture.trace import Tracer
from planner.capture.transformers_private import unpacked_sequences
from planner.errors import CaptureError, OpBudgetError

__all__ = ["Reading", "Source", "climb"]

#: Most parameters for which a model is run for real.
_REAL_LIMIT = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is to be read, and how.

    Attributes:
        module: The caller's module, real or meta; never changed.
        owned: Whether nobody else holds the module, so that one try may use it up
            instead of a copy.
        inputs: What forward is called with.
        dtype: Compute dtype; None keeps every tensor as it is.
        loss: How the scalar is made.
        repeat: Whether equal blocks are run once.
        op_budget: Most ops that may be seen.
    """

    module: torch.nn.Module
    owned: bool
    inputs: ExampleInputs
    dtype: torch.dtype | None
    loss: LossKind
    repeat: bool
    op_budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A finished trace.

    Attributes:
        trace: The ops.
        rung: Which of the three ways worked: ``fake``, ``no_hooks`` or ``real``.
        loss: Kind of the loss.
        assumptions: What was guessed.
        attention: Kinds of attention that were called; empty where it was not seen.
    """

    trace: Trace
    rung: str
    loss: str
    assumptions: tuple[str, ...]
    attention: frozenset[AttentionKind] = frozenset()


def climb(source: Source) -> Reading:
    """Read a model by the first way that works.

    Raises:
        OpBudgetError: If the budget ran out; other ways would not end either.
        CaptureError: If no way works.
    """
    failures: list[str] = []
    last: Exception | None = None
    for rung, attempt in (("fake", _fake), ("no_hooks", _fake), ("real", _real)):
        if rung == "real" and (refusal := _too_large(source.module)):
            failures.append(f"real run: {refusal}")
            break
        try:
            with quiet_state(), warnings.catch_warnings():
                # The traced model's own deprecations are not the caller's.
                warnings.simplefilter("ignore")
                return attempt(source, rung)
        except (OpBudgetError, CaptureError):
            raise
        except Exception as error:
            failures.append(f"{_RUNGS[rung]}: {_one_line(error)}")
            last = error
    raise CaptureError(
        f"the model could not be read; {'; '.join(failures)}. Check that "
        f"module(**example_inputs) and backward run in plain torch"
    ) from last


_RUNGS = {
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


def _fake(source: Source, rung: str) -> Reading:
    mode = fake_mode()
    make = fakeify if source.owned else fake_copy
    module = make(source.module, mode, source.dtype)
    module.train()
    tracer = Tracer(module, op_budget=source.op_budget, hooks=rung == "fake", mode=mode)
    attention: set[AttentionKind] = set()
    with (
        mode,
        fused_attention_patched(attention),
        unpacked_sequences(),
        without_fused_rnn(),
    ):
        loss = _run(source, module, tracer)
    if rung == "no_hooks":
        _assume_saved(tracer)
    return Reading(
        trace=tracer.trace,
        rung=rung,
        loss=loss,
        assumptions=tuple(tracer.assumptions),
        attention=frozenset(attention),
    )


def _real(source: Source, rung: str) -> Reading:
    module = real_copy(source.module, source.dtype)
    module.train()
    tracer = Tracer(module, op_budget=source.op_budget)
    loss = _run(source, module, tracer)
    tracer.assume("real run", "weights are small positive numbers, integers are zero")
    return Reading(
        trace=tracer.trace, rung=rung, loss=loss, assumptions=tuple(tracer.assumptions)
    )


def _run(source: Source, module: torch.nn.Module, tracer: Tracer) -> str:
    """Forward, loss and backward under the tracer; kind of the loss."""
    if source.dtype is not None:
        torch.set_default_dtype(source.dtype)

    def make(shape: InputShape) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, shape.dtype)
        if dtype.is_floating_point and source.dtype is not None:
            dtype = source.dtype
        return torch.zeros(shape.shape, dtype=dtype)

    args, kwargs = source.inputs.materialise(make)
    integers = [
        shape.shape for _, shape in source.inputs.shapes if shape.high is not None
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(tracer)
        if source.repeat:
            stack.enter_context(repeats_traced_once(module, tracer))
        try:
            loss = compute_loss(module(*args, **kwargs), source.loss, integers)
            loss.value.backward()  # type: ignore[no-untyped-call]
        except OpBudgetError:
            raise
        except CaptureError:
            raise
        except Exception as error:
            error._meshwright_where = _where(error, tracer)  # type: ignore[attr-defined]
            raise
    return loss.kind


def _where(error: Exception, tracer: Tracer) -> str:
    """``op aten::mm in module 'a.b': `` for a message."""
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
    """Without hooks, take every forward output that is not a source to be saved."""
    trace = tracer.trace
    for row, storages in enumerate(trace.outputs):
        for storage in storages:
            if storage >= 0 and trace.backward_bytes[row] > 0:
                trace.saves.append((row, storage, trace.modules[row]))
    tracer.assume("no saved-tensor hooks", "every tensor of forward is kept")
