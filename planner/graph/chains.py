"""A model as a chain of units that hand on one vector a sample, and score classes."""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph.model import ModelGraph
from planner.graph.residual import adds_input

__all__ = ["Chain", "find_chain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Obstacles that keep a model's units from learning by themselves.

    Attributes:
        no_classes: Reason why the model is no chain of units between which one vector
            a sample passes, and which ends in scores of classes, in words that may
            follow "but"; empty if it is one.
        no_layers: Reason why units are not one linear layer each; likewise.
    """

    no_classes: str = ""
    no_layers: str = ""


def find_chain(graph: ModelGraph) -> Chain:
    """Look at the loss, at what passes between units, and at what is in each."""
    return Chain(no_classes=_no_classes(graph), no_layers=_no_layers(graph))


def _no_classes(graph: ModelGraph) -> str:
    loss = graph.config.get("loss", "cross_entropy")
    if loss != "cross_entropy":
        return (
            f"the loss is {loss}, and labels are of classes that the model scores "
            f"(capture it with loss='cross_entropy')"
        )
    if graph.seq_len is not None:
        return (
            f"samples are sequences of {graph.seq_len} tokens, a label each, and "
            f"labels are to be one class a sample"
        )
    unit_of = graph.unit_of_block
    for edge in graph.edges:
        source, target = (int(unit_of[end]) for end in (edge.source, edge.target))
        names = graph.unit_names[source], graph.unit_names[target]
        if source == target or edge.recomputable >= edge.bytes:
            continue
        if target != source + 1:
            return f"{names[1]} reads what {names[0]} makes, past units between them"
        if len(edge.tensors) > 1 or len(edge.tensors[0][0]) != 2:
            shown = " and ".join(str(list(shape)) for shape, _ in edge.tensors)
            return f"{names[0]} hands on {shown}, no vector a sample"
    return ""


def _no_layers(graph: ModelGraph) -> str:
    for name, (start, stop) in zip(graph.unit_names, graph.units, strict=True):
        kernels = [k for b in graph.blocks[start:stop] for k in b.kernels]
        heavy = [k.kind for k in kernels if k.kind != "memory" for _ in range(k.count)]
        if heavy != ["matmul"]:
            shown = ", ".join(heavy) or "none"
            return f"{name} is not one linear layer (its products: {shown})"
        if adds_input(graph, name, unknown=False):
            return f"{name} adds what it is given to what it computes"
    held: dict[str, list[int]] = {}
    for parameter in graph.parameters:
        unit = graph.blocks[parameter.block].layer
        held.setdefault(unit, []).append(len(parameter.shape))
    for name in graph.unit_names:
        if held.get(name, []) not in ([2], [2, 1]):
            return f"{name} holds parameters beside a weight and a bias"
    return ""
