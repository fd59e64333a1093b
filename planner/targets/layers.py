"""Stages counted in layers, as frameworks do, from a plan that names modules."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from planner.schema import Strategy

__all__ = ["StageLayers", "layer_stem", "layers_of_stages", "may_be_even"]

_NUMBERED = re.compile(r"^(?P<stem>.*?)\.(?P<index>\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """Layers of one virtual stage.

    Attributes:
        before: Modules that come before its first layer, such as the embedding.
        layers: Indices of its whole layers, ascending.
        after: Modules that come after its last layer, such as the head.
    """

    before: tuple[str, ...]
    layers: tuple[int, ...]
    after: tuple[str, ...]


def layer_stem(strategy: Strategy) -> str | None:
    """Return the prefix of the names of the model's layers, such as ``model.layers``.

    It is the numbered stem with the most indices; None if no module is numbered.
    """
    indices: dict[str, set[str]] = {}
    for stage in strategy.stages:
        for module in stage.modules:
            match = _NUMBERED.match(module)
            if match:
                indices.setdefault(match["stem"], set()).add(match["index"])
    if not indices:
        return None
    counts = Counter({stem: len(found) for stem, found in indices.items()})
    return counts.most_common(1)[0][0]


def layers_of_stages(strategy: Strategy) -> tuple[StageLayers, ...] | None:
    """Return the layers of every virtual stage, in order of execution.

    None if stages have no names, the model has no numbered layers, or a cut goes
    through the middle of one: a framework that counts layers cannot express that.
    """
    stem = layer_stem(strategy)
    if stem is None:
        return None
    whole = re.compile(re.escape(stem) + r"\.(\d{1,9})$")
    found: list[StageLayers] = []
    for stage in strategy.stages:
        before: list[str] = []
        layers: list[int] = []
        after: list[str] = []
        for module in stage.modules:
            match = whole.match(module)
            if match:
                if after:
                    return None
                layers.append(int(match[1]))
            elif module.startswith(f"{stem}."):
                return None
            else:
                (after if layers or found else before).append(module)
        found.append(
            StageLayers(before=tuple(before), layers=tuple(layers), after=tuple(after))
        )
    return tuple(found)


def may_be_even(strategy: Strategy) -> bool:
    """Return True if every stage has equally many layers, the rest at either end.

    Modules before the layers are in the first stage, modules after them in the last.
    """
    stages = layers_of_stages(strategy)
    if stages is None:
        return False
    inner = all(not s.before for s in stages[1:]) and all(
        not s.after for s in stages[:-1]
    )
    return inner and len({len(stage.layers) for stage in stages}) == 1
