"""Remember in a graph what functions of it returned, as ``cached_property`` does."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from planner.graph.model import ModelGraph

__all__ = ["once_per_graph"]

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


def once_per_graph(
    function: Callable[Concatenate[ModelGraph, Given], Returned],
) -> Callable[Concatenate[ModelGraph, Given], Returned]:
    """Call a function once for each graph and further arguments.

    A graph that is planned for many sub-clusters is read once. Results belong to all
    callers, who must not change them, and live as long as the graph.

    Args:
        function: Takes a graph and hashable positional arguments.
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def look_up(
        graph: ModelGraph, /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Returned:
        known: dict[object, Returned] = vars(graph).setdefault(name, {})
        key = args, tuple(sorted(kwargs.items()))
        if key not in known:
            known[key] = function(graph, *args, **kwargs)
        return known[key]

    return look_up
