"""Where sequence parallelism divides the residual stream of a pipeline."""

from __future__ import annotations

from torch import nn

from executors.names import unit_of
from executors.strategies.tensor_parallel import styles_of_model
from planner.schema import Strategy

__all__ = ["cuts_inside_stream"]


def cuts_inside_stream(model: nn.Module, strategy: Strategy) -> frozenset[int]:
    """Cuts between stages at which each tp rank has a shard of the residual stream.

    The stream is divided from the first block with a rowwise layer to the last one.
    Sent in shards, it takes the tp-th part of the messages and of their buffers, and
    no stage gathers what the next one would scatter again.

    Args:
        model: The whole model.
        strategy: With its stages.

    Returns:
        Each cut as the index of the stage before it; none without sequence parallelism.
    """
    if not strategy.sharding.sequence_parallel or strategy.mesh.tp == 1:
        return frozenset()
    styles = styles_of_model(model, strategy.sharding)
    units = [unit for stage in strategy.stages for unit in stage.modules]
    found = {unit_of(fqn, units) for fqn, how in styles.items() if how == "rowwise"}
    blocks = [index for index, unit in enumerate(units) if unit in found]
    inside, stop = set(), 0
    for cut, stage in enumerate(strategy.stages[:-1]):
        stop += len(stage.modules)
        if blocks and blocks[0] < stop <= blocks[-1]:
            inside.add(cut)
    return frozenset(inside)
