"""What tensor parallelism may divide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.graph.coarsen import Structure
from planner.graph.model import Block
from planner.graph.ops import OpGraph
from planner.graph.roles import Roles

__all__ = ["infer_roles", "parallel_dims"]


def infer_roles(graph: OpGraph, plan: Structure, given: Mapping[str, str]) -> Roles:
    return Roles(ops=["none"] * len(graph), parameters=["none"] * len(graph.parameters))


def parallel_dims(
    graph: OpGraph, roles: Roles, blocks: Sequence[Block], dims: Mapping[str, int]
) -> tuple[dict[str, int], int]:
    return {}, dims.get("num_experts", 0)
