"""Dropout switched off, whatever modules or graphs say of training."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DropoutOff"]

_ATEN = torch.ops.aten


class DropoutOff(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which nothing is dropped: masks have the mean of what would be drawn.

    It sees the ops of modules, of exported graphs and of recomputation alike.

    Attributes:
        found: True if something would have been dropped.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.bernoulli_.float:
            self.found = True
            # Torch leaves out what is equal to the default.
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        rate = _rate_argument(func)
        if rate is not None:
            position, name = rate
            if args[position] if len(args) > position else kwargs.get(name):
                self.found = True
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs = {**kwargs, name: 0.0}
        return func(*args, **kwargs)


@cache
def _rate_argument(func: Any) -> tuple[int, str] | None:
    """Position and name of the share that an op drops; None if it drops nothing."""
    wanted = "p" if func is _ATEN.native_dropout.default else "dropout_p"
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == wanted:
            return position, wanted
    return None
