"""Loss functions: from a model's output to the scalar that is minimised.

Gradients must be those of the mean over the global batch, however it is divided. So a
loss here is a *sum* over what one microbatch holds, divided by a count over the whole
global batch, times the data-parallel degree, because the gradient reduction of DDP and
``fully_shard`` divides by that degree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn import functional

from executors.loss_scaling import LossScaler
from executors.strategies.chunked_head import ChunkedHead
from planner.checkpointing import checkpoints_in_place
from planner.errors import ExecutionError
from planner.model_output import loss_beside, main_tensor, named_loss

__all__ = [
    "LossFunction",
    "Tally",
    "select_output",
    "sharded_cross_entropy",
    "target_of",
]

LossKind = Literal["cross_entropy", "model", "mean_square"]

#: torch's own default for targets that do not count.
_IGNORED = -100


def select_output(output: Any, kind: LossKind) -> torch.Tensor:
    """The one tensor of a model's output that the loss is made from.

    Args:
        output: A tensor, a tuple or mapping of them, or a dataclass such as those of
            ``transformers``.
        kind: ``model`` takes ``loss``, or the scalar beside other tensors; the others
            ``logits`` where there is one, or the first tensor.

    Raises:
        ExecutionError: If the output holds no tensor, or no scalar for ``model``.
    """
    found = None
    if kind == "model":
        found = named_loss(output)
        found = loss_beside(output) if found is None else found
    found = main_tensor(output) if found is None else found
    if found is not None:
        return _require_scalar(found, kind)
    raise ExecutionError(
        f"the model's forward returned {type(output).__name__} without a tensor; the "
        f"loss {kind!r} needs one"
    )


def _require_scalar(found: torch.Tensor, kind: LossKind) -> torch.Tensor:
    """Return the tensor.

    Raises:
        ExecutionError: If it ought to be the model's own loss and is no scalar.
    """
    if kind == "model" and found.numel() != 1:
        raise ExecutionError(
            f"the plan's loss is the model's own, but forward returned a tensor of "
            f"shape {list(found.shape)} and no scalar loss; give forward the labels, "
            f"or plan with loss='cross_entropy' or 'mean_square'"
        )
    return found


def target_of(
    batch: Mapping[str, torch.Tensor], kind: LossKind, shift: int = 1
) -> torch.Tensor | None:
    """Target of each output: its label, or its token where there are no labels.

    Of shape [batch, sequence], the last of each sequence ignored if labels are shifted;
    [batch] for a class a sample. Without labels a decoder of an encoder-decoder is
    trained on its next token, and tokens that ``attention_mask`` hides do not count.

    Args:
        batch: Inputs, and perhaps ``labels``.
        kind: Of the loss.
        shift: By how many tokens a label is ahead of its output, 0 or 1.

    Raises:
        ExecutionError: If the loss needs a target and the batch has no integers.
    """
    if kind != "cross_entropy":
        return None
    if "labels" in batch:
        return _shifted(batch["labels"], shift)
    if "decoder_input_ids" in batch:
        mask = batch.get("decoder_attention_mask")
        return _shifted(_unmasked(batch["decoder_input_ids"], mask), 1)
    tokens = batch.get("input_ids")
    if tokens is None:
        tokens = next(
            (v for v in batch.values() if _is_integer(v)),
            None,
        )
    if tokens is None:
        raise ExecutionError(
            f"loss 'cross_entropy' needs tokens, the batch has "
            f"{', '.join(batch) or 'none'}; add integer 'labels' or plan with "
            f"loss='mean_square'"
        )
    return _shifted(_unmasked(tokens, batch.get("attention_mask")), shift)


def _is_integer(value: torch.Tensor) -> bool:
    return not value.is_floating_point() and value.dtype != torch.bool


def _unmasked(tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Tokens, those that a mask of their shape hides ignored."""
    if mask is None or mask.shape != tokens.shape:
        return tokens
    return tokens.masked_fill(mask == 0, _IGNORED)


def _shifted(target: torch.Tensor, shift: int, ignored: int = _IGNORED) -> torch.Tensor:
    """Shift labels to the outputs before; one class a sample stays as it is."""
    if target.ndim == 1 or not shift:
        return target
    return functional.pad(target[..., shift:], (0, shift), value=ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Labels of some samples.

    Attributes:
        count: Targets that count, or labels of the model's own loss that do.
        fewest: Labels that count in the microbatch that has fewest of them; 0 without
            labels.
        most: In that which has most.
    """

    count: int
    fewest: int = 0
    most: int = 0

    @classmethod
    def total(cls, tallies: Sequence[Tally]) -> Tally:
        """Put the tallies of parts of a batch together."""
        return cls(
            count=sum(one.count for one in tallies),
            fewest=min(one.fewest for one in tallies),
            most=max(one.most for one in tallies),
        )


def _tally(labels: torch.Tensor, parts: int, ignored: int) -> Tally:
    counts = (labels != ignored).reshape(parts, -1).sum(1)
    return Tally(
        count=int(counts.sum()), fewest=int(counts.min()), most=int(counts.max())
    )


def _perhaps_labels(batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Inputs that are named as labels are; all where none is."""
    words = ("label", "target")
    named = [
        value
        for name, value in batch.items()
        if name.lower() == "y" or any(word in name.lower() for word in words)
    ]
    return named or list(batch.values())


@dataclass(kw_only=True)
class LossFunction:
    """The loss of one microbatch, as its share of the global mean.

    Attributes:
        kind: See :class:`planner.schema.Workload`.
        data_parallel: By which gradient reduction divides.
        label_shift: See :class:`planner.schema.Workload`.
        own_loss: The same.
        ignore_index: The same.
        vocabulary: The tp axis, if it has dealt out the classes of the output.
        count: Terms of the mean over the global batch, set by :meth:`prepare`.
        head: The model's last layer, if that computes the loss in chunks.
        scaler: Scales the gradients of losses; None to leave them.
    """

    kind: LossKind
    data_parallel: int
    label_shift: int = 1
    vocabulary: dist.ProcessGroup | None = None
    count: float = 1.0
    own_loss: Literal["tokens", "coupled"] | None = None
    ignore_index: int = _IGNORED
    head: ChunkedHead | None = None
    scaler: LossScaler | None = None
    #: True if microbatches of the model's own loss weigh as many as they have labels.
    _weighed: bool = field(default=False, init=False)

    def prepare(self, batch: Mapping[str, torch.Tensor], num_microbatches: int) -> None:
        """Count the terms of the mean over a global batch.

        Args:
            batch: All samples of one step, of all ranks.
            num_microbatches: Microbatches of each data-parallel rank.

        Raises:
            ExecutionError: If every target is ignored, or parts of the batch have
                other weights than their means say.
        """
        parts = num_microbatches * self.data_parallel
        self.take(self.tally(batch, parts), num_microbatches)

    def tally(self, batch: Mapping[str, torch.Tensor], parts: int) -> Tally:
        """Count the labels of some samples.

        Args:
            batch: The samples, of one rank perhaps.
            parts: Microbatches that they are divided into.
        """
        if self.kind != "model":
            target = target_of(batch, self.kind, self.label_shift)
            count = 0 if target is None else int((target != _IGNORED).sum())
            return Tally(count=count)
        labels = batch.get("labels")
        if labels is not None:
            labels = _shifted(labels, self.label_shift, self.ignore_index)
        # Own code may call them by any name; a table that no sample owns is none.
        found = [labels] if labels is not None else _perhaps_labels(batch)
        if self.ignore_index == _IGNORED and labels is None:
            # No other integer is ever that.
            found = list(batch.values())
        tallies = [
            _tally(one, parts, self.ignore_index)
            for one in found
            if _is_integer(one) and one.numel() and one.numel() % parts == 0
        ]
        return max(
            tallies, key=lambda one: one.most - one.fewest, default=Tally(count=0)
        )

    def take(self, tally: Tally, num_microbatches: int) -> None:
        """Take the terms of the mean over a global batch from what its ranks counted.

        Args:
            tally: Of all samples of one step, of all ranks.
            num_microbatches: Microbatches of each data-parallel rank.

        Raises:
            ExecutionError: As :meth:`prepare` does.
        """
        parts = num_microbatches * self.data_parallel
        self._weighed = self.kind == "model" and self._uneven(tally, parts)
        if self.kind != "cross_entropy" and not self._weighed:
            # Means of equal microbatches: their mean is the global mean.
            self.count = float(parts)
            return
        self.count = float(tally.count)
        if not self.count:
            ignored = self.ignore_index if self._weighed else _IGNORED
            raise ExecutionError(
                f"every target of the batch is {ignored}, so that its mean loss is "
                f"undefined; leave such batches out"
            )

    def target(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Target of each output, see :func:`target_of`; labels that weigh a mean."""
        if self._weighed:
            return _shifted(batch["labels"], self.label_shift, self.ignore_index)
        return target_of(batch, self.kind, self.label_shift)

    def _uneven(self, tally: Tally, parts: int) -> bool:
        """Return True if the parts of a batch differ in labels that count.

        Raises:
            ExecutionError: If they do, and no weights make their means the whole one.
        """
        few, many = tally.fewest, tally.most
        if few == many:
            return False
        if self.own_loss == "tokens" and few:
            return True
        why = (
            "a mean over none is undefined"
            if self.own_loss == "tokens"
            else "the model's own loss is not known to be a mean over them"
        )
        raise ExecutionError(
            f"{parts} microbatches of the batch have {few} to {many} labels that count "
            f"(are not {self.ignore_index}), and {why}; plan with loss='cross_entropy' "
            f"and example_inputs without labels, which weighs every token alike, or "
            f"with dp_replicate=1, dp_shard=1 and num_microbatches=1"
        )

    def of(
        self,
        module: Callable[..., Any],
        inputs: Mapping[str, torch.Tensor],
        target: torch.Tensor | None,
    ) -> torch.Tensor:
        """Loss of a microbatch, with the forward that it is of.

        Args:
            module: The whole model.
            inputs: Keywords of its forward.
            target: From :meth:`target`.
        """
        self.expect(target)
        # DDP is told of each parameter once, which the reentrant kind of them breaks.
        with checkpoints_in_place():
            output = module(**inputs)
        return self(output, target)

    def expect(self, target: torch.Tensor | None) -> None:
        """Announce the target of the next forward, which may compute the loss."""
        if self.head is not None:
            self.head.expect(target)

    def __call__(
        self, output: Any, target: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        """Loss of a microbatch, as its share of the mean; a scalar in float32.

        Args:
            output: What the model, or its last stage, returned.
            target: From :meth:`target`.
        """
        loss = self._of_output(output, target)
        return loss if self.scaler is None else self.scaler.scaled(loss)

    def _of_output(self, output: Any, target: torch.Tensor | None) -> torch.Tensor:
        value = select_output(output, self.kind).float()
        scale = self.data_parallel / self.count
        if self.kind == "model":
            if self._weighed:
                assert target is not None
                counted = (target != self.ignore_index).sum()
                return value.mean() * counted * scale
            return value.mean() * scale
        if self.kind == "mean_square":
            return value.square().mean() * scale
        assert target is not None
        if self.head is not None:
            self.head.require_loss(value)
            return value * scale
        if value.shape[:-1].numel() != target.numel():
            raise ExecutionError(
                f"scores of shape {tuple(value.shape)} beside labels of shape "
                f"{tuple(target.shape)}, of which each score needs one; add 'labels' "
                f"of shape {tuple(value.shape[:-1])} to the batch"
            )
        logits, target = value.reshape(-1, value.shape[-1]), target.reshape(-1)
        if self.vocabulary is not None:
            total = sharded_cross_entropy(
                logits, target, self.vocabulary, ignored=_IGNORED
            )
        else:
            total = functional.cross_entropy(
                logits, target, ignore_index=_IGNORED, reduction="sum"
            )
        return total * scale


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        group: dist.ProcessGroup,
        ignored: int,
    ) -> torch.Tensor:
        classes = logits.shape[-1]
        highest = logits.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        exponents = (logits - highest.unsqueeze(-1)).exp_()
        own = target - classes * group.rank()
        foreign = (own < 0) | (own >= classes)
        index = own.masked_fill(foreign, 0).unsqueeze(-1)
        picked = logits.gather(-1, index).squeeze(-1).masked_fill(foreign, 0)
        # One message for both sums.
        sums = torch.stack([exponents.sum(-1), picked])
        dist.all_reduce(sums, group=group)
        losses = sums[0].log() + highest - sums[1]
        exponents.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(exponents, index, foreign, target == ignored)
        return losses.masked_fill(target == ignored, 0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        shares, index, foreign, ignored = ctx.saved_tensors
        grad = shares.clone()
        taken = (~foreign).to(grad.dtype).unsqueeze(-1)
        grad.scatter_add_(-1, index, -taken)
        grad.masked_fill_(ignored.unsqueeze(-1), 0)
        return grad.mul_(grads[0]), None, None, None


def sharded_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    ignored: int = -100,
) -> torch.Tensor:
    """Sum of cross entropies, the same on every rank of the group.

    -log softmax(logits)[target], with the maximum, the normaliser and the target's
    logit each put together over the group.

    Args:
        logits: This rank's consecutive classes, in float32. Shape [tokens, classes /
            tp].
        target: Class of each token among all. Shape [tokens].
        group: The tp axis, in order of the classes.
        ignored: Target of tokens that do not count.

    Returns:
        A scalar.
    """
    result: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, target, group, ignored
    )
    return result
