"""Tell from its autograd nodes what a model's own loss is a mean over.

Ranks and microbatches compute it of a part of the batch each, and their mean is trained
on. That is the loss of the whole batch only if the model's own is a mean, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch

from planner.capture.inputs import ExampleInputs
from planner.capture.private_apis import modes_off
from planner.errors import CaptureError

__all__ = ["ignore_index", "own_loss"]

#: Names of autograd nodes that change no mean, and of sums and scales of losses.
_RESHAPES = ("ToCopyBackward0", "ViewBackward0", "SqueezeBackward0", "AliasBackward0")
_SCALES = ("DivBackward0", "MulBackward0")
_SUMS = ("AddBackward0", "MeanBackward0", *_SCALES)
#: Those after which the mean of parts is another number than the whole.
_BENT = ("PowBackward0", "SqrtBackward0", "ExpBackward0", "LogBackward0")
#: Those that choose one number of the batch.
_CHOICES = ("MaxBackward1", "MinBackward1")
#: Those that read integers, which need no gradient and are no operand of theirs.
_READERS = ("EmbeddingBackward0", "NllLossBackward0")
#: Values that autograd keeps for ``reduction="mean"`` and ``"sum"``, and torch's
#: ignore_index.
_MEAN, _SUM, _IGNORED = 1, 2, -100


def own_loss(
    value: torch.Tensor, inputs: ExampleInputs
) -> Literal["tokens", "coupled"] | None:
    """Return what the loss that a model returned is a mean over.

    A cross entropy with a class for every sample of the batch compares samples with
    each other, as contrastive losses do; one of as many rows as the labels have tokens
    is a mean over those. A sum of several losses is no such mean. A sum over samples, a
    cross entropy with weights of classes, and a square, a root or the largest of losses
    are another number for a part of the batch, as if samples were compared.

    Args:
        value: The loss, a scalar.
        inputs: Of the model.
    """
    first = value.grad_fn
    while first is not None and first.name() in _RESHAPES:
        first = first.next_functions[0][0]
    nodes, seen = [first], []
    while nodes:
        node = nodes.pop()
        if node is not None and node.name() in (*_RESHAPES, *_SUMS):
            nodes += [following for following, _ in node.next_functions]
        elif node is not None and node.name() == "NllLossBackward0":
            seen.append(node)
    scores: list[tuple[int, ...]] = [tuple(n._saved_self.shape) for n in seen]  # type: ignore[attr-defined]
    if any(shape == (inputs.batch, inputs.batch) for shape in scores):
        return "coupled"
    if _is_no_mean(value.grad_fn, inputs.batch):
        return "coupled"
    labels = dict(inputs.shapes).get("labels")
    if first is None or seen != [first] or labels is None or len(labels.shape) < 2:
        return None
    rows, length = labels.shape[0], labels.shape[1]
    mean: Any = first
    whole = scores[0][0] in (rows * length, rows * (length - 1))
    return "tokens" if whole and mean._saved_reduction == _MEAN else None


def ignore_index(value: torch.Tensor) -> int:
    """Return the label that the cross entropies of a loss leave out.

    Args:
        value: The loss, a scalar.

    Raises:
        CaptureError: If they leave out several, besides torch's -100.
    """
    nodes = [node for node in _nodes(value.grad_fn) if node is not None]
    found = {
        (node._saved_ignore_index + 2**63) % 2**64 - 2**63
        for node in nodes
        if node.name().startswith("NllLoss")
    } - {_IGNORED}
    if len(found) > 1:
        raise CaptureError(
            f"cross entropies of the model's own loss leave out labels "
            f"{', '.join(map(str, sorted(found)))}, and a plan counts one; use one "
            f"ignore_index for all"
        )
    return found.pop() if found else _IGNORED


def _is_no_mean(loss: Any, batch: int) -> bool:
    """Return True for a loss of which a part is known to be no mean over samples.

    Args:
        loss: Node that made it.
        batch: Samples.
    """
    nodes: list[tuple[Any, float | None]] = [(loss, 1.0)]
    while nodes:
        node, divisor = nodes.pop()
        if node is None:
            continue
        name = node.name()
        if name in _SCALES:
            divisor = _divided(node, divisor, batch)
        weighed = name == "NllLossBackward0" and node._saved_weight is not None
        bent = name in (*_BENT, *_CHOICES) and _reads_samples(node)
        if weighed or bent or (_is_sum(node) and _grows(node, divisor, batch)):
            return True
        if name in (*_RESHAPES, *_SCALES, "AddBackward0", "SubBackward0"):
            nodes += [(following, divisor) for following, _ in node.next_functions]
    return False


def _is_sum(node: Any) -> bool:
    """Return True for a sum of all numbers, and a loss that is one."""
    summed: bool = getattr(node, "_saved_reduction", _MEAN) == _SUM
    return summed or node.name() == "SumBackward0"


def _divided(node: Any, divisor: float | None, batch: int) -> float | None:
    """Return the number that a loss is divided by; None if nobody knows.

    That is so where it is a tensor's value, and behind a division by samples: what
    scales a mean over them (a temperature, a weight) says nothing more.
    """
    other = node._saved_other
    if other is None:
        other = node._saved_self if node.name() == "MulBackward0" else None
    # Numbers of the code are tensors of their own; those of fake tensors are not known.
    plain = type(other) is torch.Tensor and other.device.type == "cpu"
    if divisor is None or not plain or other.dim():
        return None
    with modes_off():
        number = float(other)
    if node.name() == "MulBackward0":
        number = 1 / number if number else 0.0
    if batch > 1 and _counts_samples(number, batch):
        return None
    return divisor * number or None


def _counts_samples(divisor: float, batch: int) -> bool:
    counts = round(divisor)
    whole = counts > 0 and math.isclose(divisor, counts, rel_tol=1e-6)
    return whole and counts % batch == 0


def _grows(node: Any, divisor: float | None, batch: int) -> bool:
    """Return True for a sum over samples that is divided by no number of them."""
    summed = node._saved_self_sym_sizes if node.name() == "SumBackward0" else ()
    shape = tuple(summed or node._saved_self.shape)
    before = node.next_functions[0][0]
    listed = before.name() in ("StackBackward0", "CatBackward0")
    reduced = before.name() in ("MeanBackward1", "SumBackward1")
    gone = reduced and 0 in before._saved_dim
    owned = batch > 1 and bool(shape) and shape[0] % batch == 0
    samples = owned and not listed and not gone
    if divisor is None or not samples or not _reads_samples(node):
        return False
    return not _counts_samples(divisor, batch)


def _reads_samples(node: Any) -> bool:
    """Return True if more than parameters is known to have led to a value."""
    return any(
        following is None or following.name() in _READERS
        for one in _nodes(node)
        for following, _ in one.next_functions
    )


def _nodes(first: Any) -> Iterator[Any]:
    """Go through a node and all that it follows from."""
    waiting, known = [first], {first}
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                waiting.append(following)
