"""Modules that a forward may pass by, with hooks and all-gathers of their own.

The only file that uses ``nn.Module._compiled_call_impl``, which a module's call looks
up on the module before all hooks, and ``_call_impl``. Seen to work with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["let_pass_by"]


def let_pass_by(
    module: nn.Module, passes: Callable[[], bool], check: Callable[[Any, Any], None]
) -> None:
    """Let calls of a module return their first argument as it is, in place.

    Neither its forward nor its hooks run then, so that its weights are not looked at.

    Args:
        module: One that takes the stream first and returns one like it.
        passes: True where the stream passes by the module; asked at each call.
        check: Called with the stream and what the module has made of it.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        stream = (*args, *kwargs.values())[0]
        if passes():
            return stream
        found = module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        check(stream, found)
        return found

    module.__dict__["_compiled_call_impl"] = call
