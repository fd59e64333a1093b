"""What a scorer believes of candidates and what rollouts say, as one estimate."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["combined", "near"]

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

#: Candidates that a scorer believes to block so many more jobs than the best one are
#: not followed: rollouts have not been seen to prefer them, and the time is better
#: spent on more futures.
_FAR = 0.6
#: Variance of a scorer's error about the differences of candidates. Source: what a fit
#: leaves unexplained (about 0.07) less the variance of its labels (0.05), rounds 8 to
#: 16 of the training of the shipped policy.
_DOUBT = 0.02


def near(believed: Array, far: float = _FAR) -> Flags:
    """Candidates that are worth following.

    Args:
        believed: Jobs that each is believed to block, infinite if it is not possible.
            Shape [a].
        far: How many more than the best one are too many.
    Returns:
        Shape [a].
    """
    found: Flags = believed <= believed.min() + far
    return found


def combined(
    believed: Array, costs: Array, variances: Array, doubt: float = _DOUBT
) -> Array:
    """Two estimates of the candidates' differences as one, weighted by variances.

    Args:
        believed: Jobs that each candidate blocks, up to a number that all share, as a
            scorer says. Shape [a].
        costs: The same as rollouts say. Shape [a].
        variances: Of what rollouts say about the differences. Shape [a].
        doubt: Variance of the scorer's error about them.
    Returns:
        Counted from the mean of the candidates. Shape [a].
    """
    weight = doubt / (doubt + np.maximum(variances, 1e-12))
    rolled, thought = costs - costs.mean(), believed - believed.mean()
    found: Array = weight * rolled + (1.0 - weight) * thought
    return found
