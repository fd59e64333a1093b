"""Cuts into stages of equally many layers, for launchers that make no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.schema import Stage, Strategy
from planner.targets import layers_of_stages

__all__ = ["LayerRun", "find_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """Units of a model as what comes before its layers, the layers, what comes after.

    Attributes:
        before: Units before the first layer, such as embeddings.
        layers: Units that are layers.
        after: Units after the last, such as the head.
    """

    before: int
    layers: int
    after: int

    def even_bounds(self, stages: int) -> tuple[int, ...] | None:
        """Unit at which each stage starts, then all: equally many layers in each.

        What comes before the layers is in the first stage, what comes after in the
        last. None if the stages do not divide the layers.
        """
        each, rest = divmod(self.layers, stages)
        if rest or not each:
            return None
        inner = [self.before + each * stage for stage in range(1, stages)]
        return (0, *inner, self.before + self.layers + self.after)


def find_layers(unit_names: Sequence[str]) -> LayerRun | None:
    """The layers among a model's units; None if units are not whole layers in a row."""
    whole = Strategy(stages=(Stage(rank=0, modules=tuple(unit_names)),))
    found = layers_of_stages(whole)
    if found is None or not found[0].layers:
        return None
    stage = found[0]
    return LayerRun(
        before=len(stage.before), layers=len(stage.layers), after=len(stage.after)
    )
