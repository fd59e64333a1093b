"""Activation checkpoints of a model's own, while its forward is looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch.utils import checkpoint

__all__ = ["checkpoints_in_place"]


class _InPlace:
    """Stands in for ``CheckpointFunction``, torch's reentrant checkpoints."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Call a function; the argument list is that of the reentrant kind."""
        return checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve
        )


def checkpoints_in_place() -> contextlib.AbstractContextManager[Any]:
    """While open, the reentrant kind of checkpoint is done as the newer one is.

    Its forward runs without gradients and its backward begins another graph, so that
    neither a trace nor an export sees the blocks of a model in the one that it makes.
    Numbers are the same. Seen to work on torch 2.11 to 2.13; a torch without that kind
    is left as it is.
    """
    if not hasattr(checkpoint, "CheckpointFunction"):
        return contextlib.nullcontext()
    return mock.patch.object(checkpoint, "CheckpointFunction", _InPlace)
