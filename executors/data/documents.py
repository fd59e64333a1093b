"""Documents packed into one row of tokens, which are not to see each other.

A row is split behind each separator, the token that ends a document. Positions begin at
0 in every document; a model that builds its mask of positions that restart, as those of
``transformers`` do, then attends within documents alone. The first token of a document
is no target: nothing before it says which it is. Megatron-LM calls the three
--reset-position-ids, --reset-attention-mask and --eod-mask-loss.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn

from executors.data.batches import Batch
from planner.errors import ExecutionError
from planner.schema import Plan

__all__ = [
    "document_positions",
    "require_documents",
    "require_no_restarts",
    "split_documents",
]

_IGNORED = -100


def document_positions(tokens: torch.Tensor, separator: int) -> torch.Tensor:
    """Position of each token in its document.

    Args:
        tokens: Ids. Shape [batch, sequence].
        separator: Id of the token that ends a document, and belongs to it.

    Returns:
        int64, shape [batch, sequence].
    """
    every = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    begins = torch.zeros_like(tokens, dtype=torch.bool)
    begins[:, 1:] = tokens[:, :-1] == separator
    starts = every.masked_fill(~begins, 0).cummax(1).values
    return every - starts


def split_documents(
    batch: Batch, separator: int, shift: int
) -> dict[str, torch.Tensor]:
    """Add positions and labels of packed documents to a batch.

    Args:
        batch: ``input_ids`` of shape [batch, sequence]; labels if it has some.
        separator: Id of the token that ends a document.
        shift: By how many tokens a label is ahead of its output, 0 or 1.

    Returns:
        The batch with ``position_ids``, and ``labels`` of -100 at the first token of
        every document.

    Raises:
        ExecutionError: If it has no rows of tokens, or a mask or positions of its own.
    """
    tokens = batch.get("input_ids")
    if tokens is None or tokens.ndim != 2:
        raise ExecutionError(
            f"document_separator={separator}, but the batch has {', '.join(batch)} and "
            f"no 'input_ids' of shape [batch, sequence]; leave document_separator out"
        )
    own = next((n for n in ("attention_mask", "position_ids") if n in batch), None)
    if own is not None:
        raise ExecutionError(
            f"document_separator={separator}, but the batch has {own!r} of its own; "
            f"leave one of them out"
        )
    positions = document_positions(tokens, separator)
    labels = batch.get("labels", tokens)
    if labels.shape == tokens.shape and shift:
        first = positions == 0
        # The row's first token is nobody's target already.
        first[:, 0] = False
        labels = labels.masked_fill(first, _IGNORED)
    return {**batch, "position_ids": positions, "labels": labels}


def require_no_restarts(batch: Batch, cp: int) -> None:
    """Refuse positions that restart where ranks share sequences.

    Attention over ranks has the mask of one sequence: documents would see each other.

    Args:
        batch: What a step is given.
        cp: Ranks that share a sequence.

    Raises:
        ExecutionError: If a row has positions that are not consecutive.
    """
    positions = batch.get("position_ids")
    if cp == 1 or positions is None or positions.ndim != 2:
        return
    if bool((positions.diff(dim=1) != 1).any()):
        raise ExecutionError(
            f"position_ids restart within a row, and cp={cp}: ranks that share a "
            f"sequence attend to all of it, so that its documents would see each "
            f"other; plan with cp=1, or give each document rows of its own"
        )


def require_documents(plan: Plan, model: nn.Module, separator: int) -> None:
    """Refuse to separate documents where positions cannot be given to the model.

    Args:
        plan: What to do.
        model: The whole model.
        separator: Id of the token that ends a document.

    Raises:
        ExecutionError: If an axis cannot carry positions, or forward takes none.
    """
    mesh, workload = plan.strategy.mesh, plan.workload
    named = {spec.name: spec for spec in workload.inputs}
    what = f"document_separator={separator}"
    if mesh.cp > 1:
        raise ExecutionError(
            f"{what} with cp={mesh.cp}; ranks that share a sequence attend to all of "
            f"it, so that its documents would see each other: plan with cp=1"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ExecutionError(
            f"{what}, but forward of {plan.model.name} takes no position_ids, which "
            f"say where a document begins; leave it out"
        )
    if mesh.pp > 1 and "position_ids" not in named:
        raise ExecutionError(
            f"{what} with pp={mesh.pp}, whose stages were cut for "
            f"{', '.join(named)} alone; plan with example_inputs that have "
            f"position_ids, or with pp=1"
        )
    tokens = named.get("input_ids")
    high = None if tokens is None else tokens.high
    if tokens is None or separator < 0 or (high is not None and separator >= high):
        raise ExecutionError(
            f"{what} is none of the model's tokens, input_ids from 0 to "
            f"{(high or 0) - 1}; give the id of its end-of-text token"
        )
