"""Context parallelism: ranks have parts of every sequence, attention sees all of it.

Whatever calls ``scaled_dot_product_attention`` within a unit is served, whoever wrote
the model; nothing else mixes tokens. Two algorithms: an all-to-all that trades the
sequence for heads (Jacobs et al. 2023, DeepSpeed-Ulysses), and a ring around which keys
and values travel (Liu et al. 2023, Ring Attention).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from executors.strategies.collectives import all_to_all
from executors.strategies.ring import ring_attention
from planner.errors import ExecutionError
from planner.schema import ContextAlgorithm

__all__ = [
    "apply_context_parallel",
    "local_positions",
    "slice_sequence",
    "whole_sequences",
]

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
#: Dimensions of what attention is given: [batch, heads, sequence, features].
_HEADS, _SEQUENCE = 1, 2


def local_positions(
    length: int, index: int, count: int, algorithm: ContextAlgorithm
) -> torch.Tensor:
    """Positions in the whole sequence of the tokens that one rank has, in its order.

    For a ring, the sequence is cut into 2 x count chunks of which rank i has i and
    2 x count - 1 - i: under a causal mask all ranks then have equal work. Otherwise
    ranks have consecutive parts.

    Args:
        length: Tokens of the whole sequence.
        index: Of the rank along cp.
        count: Ranks along cp.
        algorithm: Which attention will be used.

    Returns:
        int64, shape [length / count].

    Raises:
        ExecutionError: If the sequence cannot be divided so.
    """
    parts = 2 * count if algorithm == "ring" else count
    if length % parts:
        raise ExecutionError(
            f"a sequence of {length} tokens over cp={count} ({algorithm}) needs a "
            f"multiple of {parts}; pad it, or use a cp that divides it"
        )
    chunks = torch.arange(length).chunk(parts)
    if algorithm == "ring":
        return torch.cat([chunks[index], chunks[parts - 1 - index]])
    return chunks[index]


def slice_sequence(
    inputs: Mapping[str, torch.Tensor], positions: torch.Tensor, length: int
) -> dict[str, torch.Tensor]:
    """This rank's tokens of every input that has a sequence, and their positions.

    Args:
        inputs: Keywords of forward; a sequence is dimension 1.
        positions: From :func:`local_positions`.
        length: Tokens of the whole sequence; dimension 1 of this size is sliced.

    Returns:
        The same keywords and ``position_ids`` of shape [batch, length / cp], unless
        the inputs had some.
    """
    device = next(iter(inputs.values())).device
    chosen = positions.to(device)
    sliced = {
        name: value.index_select(1, chosen)
        if value.ndim > 1 and value.shape[1] == length
        else value
        for name, value in inputs.items()
    }
    batch = next(iter(inputs.values())).shape[0]
    sliced.setdefault("position_ids", chosen.expand(batch, -1))
    return sliced


class _DistributedAttention(TorchFunctionMode):
    """Mode in which attention is computed over the whole sequence."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        algorithm: ContextAlgorithm,
        causal: bool,
    ) -> None:
        super().__init__()
        self._group = group
        self._attend = _ring if algorithm == "ring" else _all_to_all
        self._causal = causal

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _ATTENTION:
            return self._call(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        # A mask that the model made says nothing: it knows its own tokens alone. The
        # planner allows cp where attention is causal or full, and nothing else.
        del attn_mask, is_causal, enable_gqa
        return self._attend(
            query, key, value, self._group, self._causal, dropout_p, scale
        )


def _all_to_all(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    causal: bool,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    """Whole sequences of some heads, then back to parts of the sequence of all."""
    count = group.size()
    if query.shape[_HEADS] % count:
        raise ExecutionError(
            f"cp={count} does not divide {query.shape[_HEADS]} heads, which the "
            f"all-to-all needs; use a cp that does, or the ring"
        )
    key, value = (_repeat_for(each, query, count) for each in (key, value))
    query, key, value = (
        all_to_all(each, group, split=_HEADS, join=_SEQUENCE)
        for each in (query, key, value)
    )
    output = _ATTENTION(
        query,
        key,
        value,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=key.shape[_HEADS] != query.shape[_HEADS],
    )
    return all_to_all(output, group, split=_SEQUENCE, join=_HEADS)


def _repeat_for(shared: torch.Tensor, query: torch.Tensor, count: int) -> torch.Tensor:
    """Keys or values with as many heads as can be dealt out to ``count`` ranks."""
    heads = shared.shape[_HEADS]
    if heads % count == 0:
        return shared
    return shared.repeat_interleave(query.shape[_HEADS] // heads, dim=_HEADS)


def _ring(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    causal: bool,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    if dropout:
        raise ExecutionError(
            f"ring attention has no dropout, the model asks for {dropout}; set its "
            f"attention dropout to 0, or use the all-to-all"
        )
    return ring_attention(query, key, value, group, causal=causal, scale=scale)


def apply_context_parallel(
    model: nn.Module,
    units: Sequence[str],
    group: dist.ProcessGroup,
    *,
    algorithm: ContextAlgorithm,
    causal: bool,
) -> None:
    """Let attention within a model's units see the whole sequence, in place.

    Done in each unit's forward, so that recomputation does the same, in whichever
    thread autograd runs it. The model makes no masks of its own tokens: where it did,
    on ranks whose chunks do not touch, it would repeat keys that queries share, and
    they would go round as two heads on one rank and as four on the next.

    Args:
        model: The model, or one stage of it.
        units: FQNs of its pipeline units.
        group: The cp axis.
        algorithm: ``ring`` or ``all_to_all``.
        causal: Whether a token sees earlier ones alone.
    """
    for fqn in units:
        module = model.get_submodule(fqn)
        module.__dict__["forward"] = _within(module.forward, group, algorithm, causal)
    model.__dict__["forward"] = _without_masks(model.forward)


def _without_masks(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with whole_sequences():
            return forward(*args, **kwargs)

    return call


@contextmanager
def whole_sequences() -> Iterator[None]:
    """Tell ``transformers`` that no sequence restarts within a row of positions.

    It would look for that in the values of positions, and take a ring's two chunks for
    two sequences.
    """
    library = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    if not hasattr(library, name):
        yield
        return
    with mock.patch.object(library, name, return_value=None):
        yield


def _within(
    forward: Callable[..., Any],
    group: dist.ProcessGroup,
    algorithm: ContextAlgorithm,
    causal: bool,
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _DistributedAttention(group, algorithm, causal):
            return forward(*args, **kwargs)

    return call
