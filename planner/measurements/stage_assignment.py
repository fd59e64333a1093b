"""The layers of each stage of a measured pipeline."""

from __future__ import annotations

import numpy as np

from planner.errors import CalibrationError
from planner.graph import ModelGraph
from planner.measurements.catalogues import Framework
from planner.schema import Stage
from planner.schema.schedules import schedule_spec

__all__ = ["assign_stages", "outer_units"]


def outer_units(graph: ModelGraph) -> tuple[int, int]:
    """Return the numbers of units before the first and behind the last layer.

    Layers are elements of a list of modules: the last part of their names is a number.

    Args:
        graph: Model whose units hold embedding, layers and head in this order.
    """
    layers = [name.rpartition(".")[2].isdigit() for name in graph.unit_names]
    if not any(layers):
        return 0, 0
    return layers.index(True), layers[::-1].index(True)


def assign_stages(
    graph: ModelGraph,
    framework: Framework,
    pp: int,
    virtual: int,
    schedule: str,
    recompute: str,
) -> tuple[Stage, ...]:
    """Return the stages, in order, with the layers that a framework assigns to them.

    Args:
        graph: The model.
        framework: Framework, which assigns by layers or by weights.
        pp: Ranks of the pipeline.
        virtual: Stages of each rank.
        schedule: Name; folded ones come back to the first rank.
        recompute: Recomputation of every stage.
    Returns:
        One a stage, with its rank.
    Raises:
        CalibrationError: If there are more stages than units.
    """
    number, folded = pp * virtual, schedule_spec(schedule).folded
    by_weights = framework.stage_assignment == "weights" and pp > 1
    layers = len(graph.unit_names) - sum(outer_units(graph))
    if number > (len(graph.unit_names) if by_weights else layers + 2):
        raise CalibrationError(
            f"pp={pp} x vp={virtual} are {number} stages for layers={layers}; lower "
            f"pp or vp, or correct layers"
        )
    parts = _by_weights(graph, number) if by_weights else _evenly(graph, number)
    return tuple(
        Stage(
            rank=2 * pp - 1 - index if folded and index >= pp else index % pp,
            modules=tuple(part),
            recompute=recompute,  # type: ignore[arg-type]
        )
        for index, part in enumerate(parts)
    )


def _evenly(graph: ModelGraph, number: int) -> list[list[str]]:
    """Assign equal numbers of layers; other units join the first or the last stage.

    Layers that are left over go to the stages behind the first. Source: torchtitan,
    torchtitan/parallelisms/pipelining_utils.py of December 2024
    (generate_split_points), which spares the first and the last stage.
    """
    names = [str(name) for name in graph.unit_names]
    before, after = outer_units(graph)
    layers = names[before : len(names) - after]
    if number > len(layers):
        # Embedding and loss count as a layer each where there are not enough of these.
        last = names[len(names) - after :]
        whole = [names[:before], *([layer] for layer in layers), last]
        found = np.array_split(np.arange(len(whole)), number)
        return [[name for one in part for name in whole[one]] for part in found]
    each, over = divmod(len(layers), number)
    sizes = [each + (0 < place <= over) for place in range(number)]
    ends = np.cumsum(sizes)
    parts = [layers[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    parts[0] = [*names[:before], *parts[0]]
    parts[-1] = [*parts[-1], *names[len(names) - after :]]
    return parts


def _by_weights(graph: ModelGraph, number: int) -> list[list[str]]:
    """Assign equal numbers of weights of products, the head's among them.

    A stage goes on until it has more than its share, so that the first ones have a
    layer more. Source: nanotron 0.4, models/base.py (build_model), and
    get_block_compute_costs of its Llama. Where too few units would be left for the
    stages behind, the next stage begins before.
    """
    names = [str(name) for name in graph.unit_names]
    weights = [
        sum(
            kernel.weight_bytes * kernel.count
            for block in graph.blocks[a:b]
            for kernel in block.kernels
            if kernel.kind == "matmul"
        )
        for a, b in graph.units
    ]
    shares = np.cumsum(weights) / max(sum(weights), 1e-9)
    parts: list[list[str]] = [[]]
    for place, (name, share) in enumerate(zip(names, shares, strict=True)):
        left, behind = len(names) - place, number - len(parts)
        if parts[-1] and left == behind:
            parts.append([])
            behind -= 1
        parts[-1].append(name)
        if behind and share > len(parts) / number and left > 1:
            parts.append([])
    return parts
