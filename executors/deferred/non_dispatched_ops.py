"""Operations of torch that pass its dispatcher by, on tensors without values.

The only file that knows which private parts of torch do without it:
``nn.init._no_grad_trunc_normal_``, and ``torch.utils.swap_tensors`` within
``Module.to``. Seen to work with torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

__all__ = ["non_dispatched_ops"]

#: What hands a tensor's values to code outside of torch.
_READERS: tuple[Any, ...] = (torch.Tensor.numpy, torch.Tensor.__array__)


@contextlib.contextmanager
def non_dispatched_ops(
    replay: Callable[[torch.Tensor], torch.Tensor], whole: Callable[..., Any]
) -> Iterator[None]:
    """Handle operations on deferred tensors, in the block, that no mode sees.

    Args:
        replay: The values of a deferred tensor.
        whole: Called with a function that fills one tensor, the tensor and further
            arguments; defers the call as one operation.
    """
    draw = mock.patch.object(
        nn.init,
        "_no_grad_trunc_normal_",
        _Whole(whole, nn.init._no_grad_trunc_normal_),
    )
    swap = mock.patch.object(torch.utils, "swap_tensors", _take_over)
    with draw, swap, _Functions(replay):
        yield


class _Functions(TorchFunctionMode):
    """Mode that handles functions which torch does below its dispatcher."""

    def __init__(self, replay: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._replay = replay

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _READERS and isinstance(args[0], FakeTensor):
            args = (self._replay(args[0]), *args[1:])
        elif func is torch.Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            return _deep_copy(args[0], args[1])
        return func(*args, **(kwargs or {}))


class _Whole:
    """Replacement of a function of torch that draws until its values fit.

    It looks at what it has drawn: done one by one, its operations would all have to be
    done at once.
    """

    def __init__(self, whole: Callable[..., Any], function: Callable[..., Any]) -> None:
        self._whole = whole
        self._function = function

    def __call__(
        self,
        tensor: torch.Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: torch.Generator | None = None,
    ) -> Any:
        return self._whole(self._function, tensor, mean, std, a, b, generator)


def _take_over(old: torch.Tensor, new: torch.Tensor) -> None:
    """Replacement of ``swap_tensors`` where ``Module.to`` changes parameters.

    It refuses tensors that torch keeps weak references to, as it does to fake ones.
    """
    old.data = new.data


def _deep_copy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    known = memo.get(id(tensor))
    if known is None:
        known = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            known = nn.Parameter(known, requires_grad=tensor.requires_grad)
        else:
            known.requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = known
    copied: torch.Tensor = known
    return copied
