"""What crosses the cut between two pipeline stages, and how it is packed.

Source of the constraints: torch.distributed.pipelining sends stage outputs and input
gradients as they are, so both must be contiguous and complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["Rebuild", "Relay", "leaf_of", "receive", "send"]


class _Receive(torch.autograd.Function):
    """Passes relayed tensors; every one gets a gradient, contiguous, if only zeros.

    The sending stage waits for as many gradients as it sent floats.
    """

    @staticmethod
    def forward(_: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(_: Any, *grads: Any) -> Any:
        return tuple(grad.contiguous() for grad in grads)


def receive(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Take relayed tensors in: floats become inputs that surely get a gradient."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floats:
        return tensors
    passed = iter(_Receive.apply(*floats))  # type: ignore[no-untyped-call]
    return tuple(next(passed) if t.is_floating_point() else t for t in tensors)


def send(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor as it crosses a cut: contiguous, of its own storage, of a dtype."""
    # A clone, not a view: split backward detaches stage outputs in place.
    result = tensor.to(dtype)
    if result is tensor or not result.is_contiguous():
        result = result.clone(memory_format=torch.contiguous_format)
    return result


def leaf_of(value: Any, index: int) -> torch.Tensor:
    """One tensor of a value that is more than one."""
    leaf: torch.Tensor = tree_flatten(value)[0][index]
    return leaf


@dataclass(frozen=True, kw_only=True)
class Relay:
    """One value that crosses a cut: its node, and its fake value's tensors."""

    node: fx.Node
    leaves: tuple[Any, ...]
    spec: Any

    @property
    def tensors(self) -> tuple[tuple[int, torch.Tensor], ...]:
        """Position and fake tensor of each leaf that is sent."""
        pairs = enumerate(self.leaves)
        return tuple((i, leaf) for i, leaf in pairs if isinstance(leaf, torch.Tensor))


class Rebuild(nn.Module):
    """Puts a relayed value that is more than one tensor together again."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self.positions = [position for position, _ in relay.tensors]
        self.rest = [None if torch.is_tensor(leaf) else leaf for leaf in relay.leaves]
        self.spec = relay.spec

    def forward(self, *received: torch.Tensor) -> Any:
        """The value, from its tensors in order."""
        leaves = list(self.rest)
        for position, tensor in zip(self.positions, received, strict=True):
            leaves[position] = tensor
        return tree_unflatten(leaves, self.spec)
