"""From a model's output to the scalar that is minimised.

Gradients must be those of the mean over the global batch, however it is divided. So a
loss here is a *sum* over what one microbatch holds, divided by a count over the whole
global batch, times the data-parallel degree, because the gradient reduction of DDP and
``fully_shard`` divides by that degree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional

from planner.errors import ExecutionError

__all__ = ["LossFunction", "select_output", "target_of"]

LossKind = Literal["cross_entropy", "model", "mean_square"]

#: torch's own default for targets that do not count.
_IGNORED = -100


def select_output(output: Any, kind: LossKind) -> torch.Tensor:
    """The one tensor of a model's output that the loss is made from.

    Args:
        output: A tensor, a tuple or mapping of them, or a dataclass such as those of
            ``transformers``.
        kind: ``model`` takes ``loss``, the others ``logits`` where there is one;
            failing these, the first tensor.

    Raises:
        ExecutionError: If the output holds no tensor.
    """
    wanted = "loss" if kind == "model" else "logits"
    found = output.get(wanted) if isinstance(output, Mapping) else None
    if found is None:
        found = getattr(output, wanted, None)
    if isinstance(found, torch.Tensor):
        return found
    values = output.values() if isinstance(output, Mapping) else output
    for value in (output,) if isinstance(output, torch.Tensor) else tuple(values):
        if isinstance(value, torch.Tensor):
            return value
    raise ExecutionError(
        f"the model's forward returned {type(output).__name__} without a tensor; the "
        f"loss {kind!r} needs one"
    )


def target_of(batch: Mapping[str, torch.Tensor], kind: LossKind) -> torch.Tensor | None:
    """What a batch is to be compared with: ``labels``, else its own tokens.

    Raises:
        ExecutionError: If the loss needs a target and the batch has no integers.
    """
    if kind != "cross_entropy":
        return None
    for name in ("labels", "input_ids"):
        if name in batch:
            return batch[name]
    for value in batch.values():
        if not value.is_floating_point() and value.dtype != torch.bool:
            return value
    raise ExecutionError(
        f"loss 'cross_entropy' needs tokens, the batch has {', '.join(batch) or 'none'}"
        f"; add integer 'labels' or plan with loss='mean_square'"
    )


def _shifted(target: torch.Tensor) -> torch.Tensor:
    """Next tokens; a target of one class a sample stays as it is."""
    return target[..., 1:] if target.ndim > 1 else target


@dataclass(kw_only=True)
class LossFunction:
    """The loss of one microbatch, as its share of the global mean.

    Attributes:
        kind: See :class:`planner.schema.Workload`.
        data_parallel: By which gradient reduction divides.
        count: Terms of the mean over the global batch, set by :meth:`prepare`.
    """

    kind: LossKind
    data_parallel: int
    count: float = 1.0

    def prepare(self, batch: Mapping[str, torch.Tensor], num_microbatches: int) -> None:
        """Count the terms of the mean over a global batch.

        Args:
            batch: All samples of one step, of all ranks.
            num_microbatches: Microbatches of each data-parallel rank.

        Raises:
            ExecutionError: If every target is ignored.
        """
        target = target_of(batch, self.kind)
        if target is None:
            # Means of equal microbatches: their mean is the global mean.
            self.count = float(num_microbatches * self.data_parallel)
            return
        self.count = float((_shifted(target) != _IGNORED).sum())
        if not self.count:
            raise ExecutionError(
                f"every target of the batch is {_IGNORED}, so that its mean loss is "
                f"undefined; leave such batches out"
            )

    def __call__(
        self, output: Any, target: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        """Loss of a microbatch, scaled; a scalar in float32.

        Args:
            output: What the model, or its last stage, returned.
            target: Integers of shape [batch, sequence], or [batch] for classes.
        """
        value = select_output(output, self.kind).float()
        scale = self.data_parallel / self.count
        if self.kind == "model":
            return value.mean() * scale
        if self.kind == "mean_square":
            return value.square().mean() * scale
        assert target is not None
        if target.ndim > 1:
            value = value[..., :-1, :]
        total = functional.cross_entropy(
            value.reshape(-1, value.shape[-1]),
            _shifted(target).reshape(-1),
            ignore_index=_IGNORED,
            reduction="sum",
        )
        return total * scale
