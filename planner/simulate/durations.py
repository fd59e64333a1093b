"""Durations of every op of a schedule, checked and laid out for the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.errors import StrategyError
from planner.simulate.actions import ActionTable

__all__ = ["Durations", "FloatArray", "stage_durations"]

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Durations of a batch of candidates that share one schedule.

    Attributes:
        shape: Shape of the batch.
        compute_s: Per kind and stage, row kind * stages + stage: forward, whole
            backward, input gradient, weight gradient. Shape [batch, 4 * stages].
        transfer_s: Row 0 is no transfer, then activations over each boundary, then
            gradients. Shape [batch, 2 * stages - 1].
    """

    shape: tuple[int, ...]
    compute_s: FloatArray
    transfer_s: FloatArray


def stage_durations(
    table: ActionTable,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    weight_s: ArrayLike | None = None,
    send_forward_s: ArrayLike | None = None,
    send_backward_s: ArrayLike | None = None,
) -> Durations:
    """Check durations and lay them out.

    Args:
        table: The schedule.
        forward_s: One microbatch, each virtual stage. Shape [..., stages].
        backward_s: Its input gradient; or its whole backward, if ``weight_s`` is left
            out. Shape [..., stages].
        weight_s: Its weight gradient; 0 if left out. A full backward takes
            ``backward_s + weight_s``. Shape [..., stages].
        send_forward_s: Activations from each stage to the next. 0 if left out.
            Shape [..., stages - 1].
        send_backward_s: Gradients over the same boundaries. Shape [..., stages - 1].
    Raises:
        StrategyError: If a shape does not fit the schedule, or a duration is negative
            or not finite.
    """
    stages = table.num_stages
    forward = _checked("forward_s", forward_s, stages)
    backward = _checked("backward_s", backward_s, stages)
    weight = _checked("weight_s", 0.0 if weight_s is None else weight_s, stages)
    there = _checked(
        "send_forward_s", 0.0 if send_forward_s is None else send_forward_s, stages - 1
    )
    back = _checked(
        "send_backward_s",
        0.0 if send_backward_s is None else send_backward_s,
        stages - 1,
    )
    parts = (forward, backward, weight, there, back)
    shape = np.broadcast_shapes(*(part.shape[:-1] for part in parts))
    batch = int(np.prod(shape, dtype=np.int64))
    compute = np.empty((*shape, 4, stages))
    compute[..., 0, :] = forward
    compute[..., 1, :] = backward + weight
    compute[..., 2, :] = backward
    compute[..., 3, :] = weight
    transfer = np.zeros((*shape, 2 * stages - 1))
    transfer[..., 1:stages] = there
    transfer[..., stages:] = back
    return Durations(
        shape=shape,
        compute_s=compute.reshape(batch, 4 * stages),
        transfer_s=transfer.reshape(batch, 2 * stages - 1),
    )


def _checked(name: str, values: ArrayLike, size: int) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 0:
        array = np.broadcast_to(array, (size,))
    if array.shape[-1] != size:
        raise StrategyError(
            f"{name} has shape {list(array.shape)}, the schedule needs "
            f"[..., {size}]; give one value for each"
        )
    if array.size and not (array.min() >= 0 and array.max() < np.inf):
        raise StrategyError(
            f"{name} has a value that is negative or not finite; "
            f"durations are seconds, 0 or more"
        )
    return array
