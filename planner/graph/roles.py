"""Effect of tensor parallelism on each op and parameter of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["OpStyle", "ParameterStyle", "Roles"]

OpStyle = Literal["colwise", "rowwise", "local", "stream", "none"]
ParameterStyle = Literal["colwise", "rowwise", "vocab", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Tensor-parallel roles.

    Attributes:
        ops: Style of each op, see :class:`planner.graph.Kernel`.
        parameters: Style of each parameter, by index.
        divided: Storages that tp divides.
        gathered: Storages that colwise layers read, whole on every rank.
        collectives: Op to the bytes of the all-reduce that its output needs.
        patterns: Pattern of module names to style.
        whole: Pattern of the names of paired layers that cannot be split, to why.
    """

    ops: list[OpStyle]
    parameters: list[ParameterStyle]
    divided: frozenset[int] = frozenset()
    gathered: frozenset[int] = frozenset()
    collectives: Mapping[int, float] = field(default_factory=dict)
    patterns: Mapping[str, Literal["colwise", "rowwise", "vocab"]] = field(
        default_factory=dict
    )
    whole: Mapping[str, str] = field(default_factory=dict)
