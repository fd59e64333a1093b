"""The computation graph of a model, coarsened into blocks."""

from planner.graph.model import (
    Block,
    BlockKind,
    Edge,
    Fusion,
    Kernel,
    KernelKind,
    ModelGraph,
    Parameter,
)

__all__ = [
    "Block",
    "BlockKind",
    "Edge",
    "Fusion",
    "Kernel",
    "KernelKind",
    "ModelGraph",
    "Parameter",
]
