"""Stages that hand microbatches on and wait for nothing to come back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["relay_starts"]

Array = NDArray[np.float64]


def relay_starts(ahead_s: Array, work_s: Array, send_s: Array, many: int) -> Array:
    """Times at which stages begin each microbatch.

    A stage begins when it is free, and the microbatch has come from the stage before;
    messages over one boundary wait for each other.

    Args:
        ahead_s: Seconds of a microbatch until it is handed on. Shape [stages].
        work_s: Seconds of it in all, no less. Shape [stages].
        send_s: Seconds of a message over each boundary. Shape [stages - 1].
        many: Number of microbatches.

    Returns:
        Seconds from the first. Shape [stages, many].
    """
    stages = len(ahead_s)
    start, come = np.zeros((stages, many)), np.zeros(many)
    for stage in range(stages):
        free = 0.0
        for index in range(many):
            start[stage, index] = max(free, come[index])
            free = start[stage, index] + work_s[stage]
        if stage < stages - 1:
            through = 0.0
            for index in range(many):
                made = start[stage, index] + ahead_s[stage]
                through = max(through, made) + send_s[stage]
                come[index] = through
    return start
