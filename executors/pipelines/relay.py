"""What crosses the cut between two pipeline stages, in either direction.

Source of the constraints: torch.distributed.pipelining sends stage outputs and input
gradients as they are, so both must be contiguous and complete.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["receive", "send"]


class _Receive(torch.autograd.Function):
    """Passes relayed tensors; every one gets a gradient, contiguous, if only zeros.

    The sending stage waits for as many gradients as it sent floats.
    """

    @staticmethod
    def forward(_: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Not views to autograd, which refuses to let a unit change one in place.
        return tuple(tensor.data for tensor in tensors)

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
