"""One model for dry runs of several ranks: built and cut into stages once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import nn
from torch.utils._pytree import TreeSpec

from executors import building
from executors.deferred.model import held_tensors
from executors.pipelines.stages import LoweredStage, lower
from executors.pipelines.tied import TiedCopies, find_copies

__all__ = ["ModelSource"]


class ModelSource:
    """Hands a model out, built anew only where a rank has taken it apart.

    What a trainer would find out again (the exported graph, its stages, which weights
    they share) is found once: exporting takes most of a dry run. Each trainer has
    copies of its stages, so that a rank can be begun again, and ranks of one stage
    follow each other.

    Args:
        build: The model, on fake tensors.
        check: Refuses one that is not the plan's.
        pipelined: Whether it is cut into stages; otherwise each rank takes it whole.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        check: Callable[[nn.Module], None],
        *,
        pipelined: bool,
    ) -> None:
        self._build, self._check, self._pipelined = build, check, pipelined
        self._model: nn.Module | None = None
        self._own: tuple[int, ...] = ()
        self._lowered: list[LoweredStage] | None = None
        self._copies: tuple[TiedCopies, ...] | None = None

    def take(self, own: tuple[int, ...]) -> nn.Module:
        """Model for a rank, which has the stages ``own``, to take its part of."""
        if not self._pipelined:
            self.discard()
        if self._model is None:
            self._model = self._build()
            self._check(self._model)
        self._own = own
        return self._model

    def discard(self) -> None:
        """Drop the model, so that the next rank builds a new one."""
        self._model = self._lowered = self._copies = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Share the cut model with trainers that are built in the block."""
        with (
            mock.patch.object(building, "lower", self._lower),
            mock.patch.object(building, "find_copies", self._find_copies),
        ):
            yield

    def _lower(self, *args: Any, **kwargs: Any) -> list[LoweredStage]:
        if self._lowered is None:
            self._lowered = lower(*args, **kwargs)
            self._copies = find_copies([stage.module for stage in self._lowered])
        mine = [self._lowered[index].module for index in self._own]
        # All in one go, so that weights which they share stay shared.
        copied = dict(zip(self._own, _fake_copies(mine), strict=True))
        return [
            replace(stage, module=copied.get(stage.index, stage.module))
            for stage in self._lowered
        ]

    def _find_copies(self, stages: list[nn.Module]) -> tuple[TiedCopies, ...]:
        """Find ties among the stages themselves: copies are tied to nothing."""
        return find_copies(stages) if self._copies is None else self._copies


def _fake_copies(modules: list[nn.Module]) -> list[nn.Module]:
    """Copy modules and their tensors; copying a fake tensor's memory would crash."""
    memo: dict[int, Any] = {}
    for module in modules:
        for tensor in held_tensors(module):
            if id(tensor) not in memo:
                other = tensor.detach().clone()
                if isinstance(tensor, nn.Parameter):
                    other = nn.Parameter(other, requires_grad=tensor.requires_grad)
                memo[id(tensor)] = other
        for part in module.modules():
            # Nothing changes these, and torch warns when they are copied.
            memo |= {id(v): v for v in vars(part).values() if isinstance(v, TreeSpec)}
    return copy.deepcopy(modules, memo)
