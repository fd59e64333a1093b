"""Which layers each stage of a measured pipeline had."""

from __future__ import annotations

import numpy as np

from planner.calibration.frameworks import Framework
from planner.errors import CalibrationError
from planner.graph import ModelGraph
from planner.schema import Stage
from planner.schema.schedules import schedule_spec

__all__ = ["ends_of", "stages_of"]


def ends_of(graph: ModelGraph) -> tuple[int, int]:
    """Units before the first and behind the last layer.

    Args:
        graph: Whose units hold embedding, layers and head in this order.
    Returns:
        How many of each.
    """
    kinds = [
        {block.kind for block in graph.blocks[a:b]} & {"embedding", "head"}
        for a, b in graph.units
    ]
    before = next((i for i, kind in enumerate(kinds) if not kind), 0)
    after = next((i for i, kind in enumerate(kinds[::-1]) if not kind), 0)
    return before, after


def stages_of(
    graph: ModelGraph,
    framework: Framework,
    pp: int,
    virtual: int,
    schedule: str,
    recompute: str,
) -> tuple[Stage, ...]:
    """Stages as a framework deals layers out, in order.

    Args:
        graph: The model.
        framework: How it deals.
        pp: Ranks of the pipeline.
        virtual: Stages of each.
        schedule: Folded ones come back to the first rank.
        recompute: Of every stage.
    Returns:
        One a stage, with its rank.
    Raises:
        CalibrationError: If there are more stages than units.
    """
    number, folded = pp * virtual, schedule_spec(schedule).folded
    if number > len(graph.unit_names):
        layers = len(graph.unit_names) - sum(ends_of(graph))
        raise CalibrationError(
            f"pp x vp={number} stages for {layers} layers; lower one of them"
        )
    by_weights = framework.dealing == "weights" and pp > 1
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
    """Equal numbers of layers; what comes before joins the first, behind the last.

    What is left over goes behind the first stage. Source: torchtitan,
    torchtitan/parallelisms/pipelining_utils.py of December 2024
    (generate_split_points), which spares the first and the last stage.
    """
    names = [str(name) for name in graph.unit_names]
    before, after = ends_of(graph)
    layers = names[before : len(names) - after]
    if number > len(layers):
        # Embedding and loss count as layers where there are not enough of these.
        return [list(part) for part in np.array_split(np.array(names), number)]
    each, over = divmod(len(layers), number)
    sizes = [each + (0 < place <= over) for place in range(number)]
    ends = np.cumsum(sizes)
    parts = [layers[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    parts[0] = [*names[:before], *parts[0]]
    parts[-1] = [*parts[-1], *names[len(names) - after :]]
    return parts


def _by_weights(graph: ModelGraph, number: int) -> list[list[str]]:
    """Equal numbers of weights of products, the head's among them.

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
