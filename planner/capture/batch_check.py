"""Train a small module on a batch and on its halves, and compare.

Ranks and microbatches have parts of a batch. The ops of a forward tell most of what
looks at others of them; numbers tell the rest: a choice by the first sample, places in
the batch, means by weights, counters, a backward of one's own.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from planner.capture.fakes import quiet_state
from planner.capture.inputs import ExampleInputs, InputShape
from planner.capture.run import Source, compute_loss
from planner.random_draws import BatchDraws

__all__ = ["batch_violation"]

#: Samples that are tried, the most that cost no more than is allowed.
_SAMPLES = (8, 4)
#: Most FLOPs of a forward of them all, and bytes kept for backward, where the ops that
#: take the time have no FLOPs: about a second for all runs.
_MOST_FLOPS, _MOST_BYTES = 5e9, 250e6
_MOST_PARAMETERS = 50_000_000
#: Batches, each of other numbers; counters show from the second on.
_ROUNDS = 3
#: Relative differences of losses and gradients that are rounding, as in certificates.
_LOSS, _GRADIENT = 1e-4, 0.02

_ON_HOST = (
    "forward draws as many numbers of Python's or NumPy's as there are samples, and "
    "nobody knows for which of them; draw them by torch"
)


def batch_violation(
    source: Source,
    build: Callable[[], nn.Module] | None,
    flops: float,
    saved_bytes: float,
    *,
    closely: bool = False,
) -> str | None:
    """Return how a batch differs from its halves; None if it does not, or is unknown.

    Dropout is off, batch norms use their running statistics: both are known by their
    modules. Parts are given their share of the random numbers that the batch draws, see
    :class:`planner.random_draws.BatchDraws`. A model that differs from itself is
    unknown, and so is one of more than 50 million parameters, 5 GFLOP in a forward of
    four samples, or 250 MB kept by it.

    Args:
        source: The model and its inputs.
        build: Makes the module anew; None if that of ``source`` has values.
        flops: Of a forward of its batch.
        saved_bytes: What that keeps for backward.
        closely: Also compare with single samples, of models of which nothing else is
            known; the answer is empty if those do not differ either.
    """
    parameters = list(source.module.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    meta = build is None and any(parameter.is_meta for parameter in parameters)
    each = max(flops / _MOST_FLOPS, saved_bytes / _MOST_BYTES) / source.inputs.batch
    samples = next((n for n in _SAMPLES if n * each <= 1.0), None)
    if meta or samples is None or count > _MOST_PARAMETERS:
        return None
    with quiet_state(), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.set_grad_enabled(True)
        # Whatever the code of a model raises on numbers that are drawn.
        with contextlib.suppress(Exception):
            module = _quiet(copy.deepcopy(source.module) if build is None else build())
            return _compared(_Batches(source, samples), module, closely)
    return None


def _compared(batches: _Batches, module: nn.Module, closely: bool) -> str | None:
    """Compare with a batch whole; what draws unlike numbers is tried without them."""
    for mode in (True, False):
        if not mode:
            module.eval()
        one, drawn = _trained(copy.deepcopy(module), batches)
        if _difference(one, _trained(copy.deepcopy(module), batches)[0]) is not None:
            continue
        halves, draws = _trained(copy.deepcopy(module), batches, 2, drawn)
        if draws.unlike_on_host:
            return _ON_HOST
        if draws.unlike:
            continue
        found = _difference(one, halves)
        if found is None and mode and drawn.single:
            found = _branch(module, batches, one)
        finite = all(math.isfinite(step.loss) for step in one)
        if found is None and closely and mode and finite and batches.owned:
            singles, _ = _trained(module, batches, batches.samples, drawn)
            return _difference(one, singles) or ""
        return found
    return None


def _branch(module: nn.Module, batches: _Batches, steps: list[_Step]) -> str | None:
    """Describe a parameter that is used or not as a number says that forward draws.

    Args:
        module: The model.
        batches: What it is given.
        steps: Of it.
    """
    tried = [*steps]
    for times, extreme in enumerate((torch.minimum, torch.maximum), start=1):
        first = times * _ROUNDS
        again = copy.deepcopy(module)
        more, _ = _trained(again, batches, extreme=extreme, first=first)
        tried += more
    for name in dict.fromkeys(name for step in tried for name in step.gradients):
        if any(name not in step.gradients for step in tried):
            return (
                f"forward uses {name} or does not by a number that it draws, so that "
                f"ranks that draw others would wait for each other; multiply what it "
                f"adds by a number drawn for each sample"
            )
    return None


def _quiet(module: nn.Module) -> nn.Module:
    """Put a module on the CPU, its 16-bit numbers in float32, without dropout."""
    module = module.cpu().train()
    for one in (*module.parameters(), *module.buffers()):
        if one.is_floating_point() and one.element_size() < 4:
            one.data = one.data.float()
    for part in module.modules():
        if isinstance(part, _DropoutNd | _BatchNorm):
            part.eval()
    return module


@dataclass(frozen=True, slots=True)
class _Step:
    """A loss, and the gradients of all that is trained, by name."""

    loss: float
    gradients: dict[str, torch.Tensor]


def _trained(
    module: nn.Module,
    batches: _Batches,
    parts: int = 1,
    drawn: BatchDraws | None = None,
    extreme: Callable[..., torch.Tensor] | None = None,
    first: int = 0,
) -> tuple[list[_Step], BatchDraws]:
    """Compute losses and gradients of all batches, each in so many parts.

    Args:
        module: The model; it is changed.
        batches: What it is given.
        parts: Of each batch.
        drawn: Draws of the whole batches, for parts of them.
        extreme: Of single draws, see :class:`planner.random_draws.BatchDraws`.
        first: Number of the first batch.

    Returns:
        A step for each batch, and the draws.
    """
    steps, draws = [], BatchDraws(drawn, parts, extreme)
    for number in range(first, first + _ROUNDS):
        module.zero_grad()
        losses = []
        for part, (args, kwargs) in enumerate(batches.parts(number, parts)):
            draws.begin(number, part)
            with draws:
                loss = batches.loss(module(*args, **kwargs), parts)
                draws.end()
                (loss / parts).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        gradients = {
            name: parameter.grad.to_dense().clone()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        steps.append(_Step(sum(losses) / parts, gradients))
    return steps, draws


def _difference(ones: list[_Step], others: list[_Step]) -> str | None:
    """Describe the first difference of more than rounding; None if there is none."""
    for one, other in zip(ones, others, strict=True):
        if not (math.isfinite(one.loss) and math.isfinite(other.loss)):
            return None
        if abs(one.loss - other.loss) > _LOSS * max(1.0, abs(one.loss)):
            return (
                f"the loss of a batch, {one.loss:.4g}, is not the mean of its parts', "
                f"{other.loss:.4g}"
            )
        norms = {name: float(value.norm()) for name, value in one.gradients.items()}
        floor = 1e-3 * math.hypot(*norms.values()) + 1e-7
        for name in {**one.gradients, **other.gradients}:
            # No gradient is one of zeros.
            whole, mean = one.gradients.get(name, 0.0), other.gradients.get(name, 0.0)
            apart = float((torch.as_tensor(whole) - mean).norm())
            if apart > _GRADIENT * norms.get(name, 0.0) + floor:
                return (
                    f"the gradient of {name} of a batch is not the mean of its parts'"
                )
    return None


class _Batches:
    """Batches of random numbers, equal for an equal number.

    Args:
        source: The model and its inputs.
        samples: Of each batch.
    """

    def __init__(self, source: Source, samples: int) -> None:
        self._inputs: ExampleInputs = source.inputs
        self._kind = source.loss
        #: Samples of each batch.
        self.samples = samples
        rows = {shape.shape[:1] for _, shape in source.inputs.shapes}
        #: Whether each sample owns one row of every input.
        self.owned = rows == {(source.inputs.batch,)}

    def loss(self, output: Any, parts: int) -> torch.Tensor:
        """Return the loss of what forward returned of one of so many parts."""
        rows = self.samples // parts
        shapes = tuple(
            (name, replace(shape, shape=(rows, *shape.shape[1:])))
            for name, shape in self._inputs.shapes
        )
        inputs = replace(self._inputs, shapes=shapes)
        return compute_loss(output, self._kind, inputs).value

    def parts(
        self, number: int, parts: int
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Go through arguments of forward for the parts of a batch, in order."""
        for part in range(parts):
            drawn = torch.Generator().manual_seed(number)

            def make(
                shape: InputShape, part: int = part, drawn: torch.Generator = drawn
            ) -> torch.Tensor:
                return self._make(shape, drawn, part, parts)

            yield self._inputs.materialise(make)

    def _make(
        self, shape: InputShape, drawn: torch.Generator, part: int, parts: int
    ) -> torch.Tensor:
        """Make an input of a part; one that no sample owns rows of is whole."""
        batch = self._inputs.batch
        owned = bool(shape.shape) and shape.shape[0] == batch
        rows = self.samples if owned else 1
        sizes = (rows, *shape.shape[1:]) if owned else shape.shape
        dtype: torch.dtype = getattr(torch, shape.dtype)
        if shape.values is not None:
            known = shape.known()
            value = known[torch.arange(rows) % batch] if owned else known
        elif shape.high is None:
            value = torch.randn(sizes, generator=drawn)
        elif dtype is torch.bool:
            value = torch.rand(sizes, generator=drawn) < 0.7
        else:
            value = torch.randint(max(1, shape.high), sizes, generator=drawn).to(dtype)
        return value.chunk(parts)[part] if owned else value
