"""One model for dry runs of several ranks: built and cut into stages once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

from executors import trainer
from executors.stages import LoweredStage, lower
from executors.tied import TiedCopies, find_copies

__all__ = ["ModelSource"]


class ModelSource:
    """Hands a model out, built anew when another rank has had the same stages of it.

    Ranks on different stages take different modules of the model apart. What a trainer
    would find out again (the exported graph, its stages, which weights they share) is
    found once.

    Args:
        build: The model, on fake tensors.
        check: Refuses one that is not the plan's.
    """

    def __init__(
        self, build: Callable[[], nn.Module], check: Callable[[nn.Module], None]
    ) -> None:
        self._build, self._check = build, check
        self._model: nn.Module | None = None
        self._taken: set[tuple[int, bool]] = set()
        self._lowered: list[LoweredStage] | None = None
        self._copies: tuple[TiedCopies, ...] | None = None

    def take(self, pp_rank: int, follow: bool) -> nn.Module:
        """The model, for a rank to take its part of.

        Args:
            pp_rank: Says which stages that are.
            follow: Whether the rank's tokens are neighbours, on which graphs depend.
        """
        taken = pp_rank in {each for each, _ in self._taken}
        if taken or any(each != follow for _, each in self._taken):
            self.spoil()
        if self._model is None:
            self._model = self._build()
            self._check(self._model)
        self._taken.add((pp_rank, follow))
        return self._model

    def spoil(self) -> None:
        """Let the next one have a new model."""
        self._model = self._lowered = self._copies = None
        self._taken.clear()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Let trainers that are built in the block have what is known."""
        with (
            mock.patch.object(trainer, "lower", self._lower),
            mock.patch.object(trainer, "find_copies", self._find_copies),
        ):
            yield

    def _lower(self, *args: Any, **kwargs: Any) -> list[LoweredStage]:
        if self._lowered is None:
            self._lowered = lower(*args, **kwargs)
        return self._lowered

    def _find_copies(self, stages: list[nn.Module]) -> tuple[TiedCopies, ...]:
        # Of stages that no rank has changed yet.
        if self._copies is None:
            self._copies = find_copies(stages)
        return self._copies
