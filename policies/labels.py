"""What a scorer is fitted to: candidates, and what rollouts say that each would block.

Rollouts are by a scorer itself, so that a new one, fitted to them, is a step of policy
iteration; the first ones are by a simple rule.

Source: Bertsekas 2020, "Rollout, policy iteration, and distributed reinforcement
learning".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.errors import StrategyError
from policies.scorer import Scorer

__all__ = ["LabelConfig", "LabelWorld", "Labels", "MadeLabels"]

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


class Labels(NamedTuple):
    """Decisions with what rollouts say of them. n decisions of a candidates.

    Attributes:
        features: Of the candidates. Shape [n, a, f].
        history: What the candidates of a decision share. Shape [n, s].
        possible: Shape [n, a].
        costs: Jobs blocked, less the mean of the possible candidates; 0 where it is not
            possible. Shape [n, a].
        variances: Of the costs, as the streams of a label differ. Shape [n, a].
    """

    features: Floats
    history: Floats
    possible: Flags
    costs: Floats
    variances: Floats

    @staticmethod
    def joined(parts: Sequence[Labels]) -> Labels:
        """Those of several, one after the other."""
        return Labels(*(np.concatenate(part) for part in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelConfig:
    """How labels are made.

    Attributes:
        futures: Streams a decision.
        arrivals: Jobs of each at most.
        labelled: Share of the decisions that rollouts are made for.
        explored: Share of the decisions that are taken at random, so that a scorer
            learns of states that it would not come to.
        other_laws: Share of episodes of deadlines, loads and processes other than the
            benchmark's, in the replay.
    """

    futures: int = 8
    arrivals: int = 48
    labelled: float = 0.1
    explored: float = 0.05
    other_laws: float = 0.3

    def __post_init__(self) -> None:
        for name in ("labelled", "explored", "other_laws"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise StrategyError(
                    f"{name}={getattr(self, name)}; a share is from 0 to 1"
                )
        if self.futures < 2 or self.arrivals < 1:
            raise StrategyError(
                f"futures={self.futures} are at least 2, arrivals={self.arrivals} at "
                f"least 1"
            )


class LabelWorld(Protocol):
    """Where decisions are labelled; sent to other processes, and so without state."""

    def draw_labels(
        self,
        actor: Scorer | None,
        base: Scorer | None,
        config: LabelConfig,
        episodes: int,
        seed: int | Sequence[int],
    ) -> Labels:
        """Play episodes, and label a part of their decisions.

        Args:
            actor: Who decides: labels should be of states that the fitted scorer will
                come to. None for a simple rule.
            base: Who decides in rollouts; likewise.
            config: How labels are made.
            episodes: To be played.
            seed: Of everything that is drawn.
        """
        ...


class MadeLabels:
    """Labels made so far."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.generic], ...]] = []

    def add(
        self,
        features: Floats,
        shared: Floats,
        possible: Flags,
        costs: Array,
        variances: Array,
    ) -> None:
        """One decision's; copied.

        Args:
            features: Of its candidates. Shape [a, f].
            shared: By its candidates. Shape [s].
            possible: Shape [a].
            costs: Whatever they are where a candidate is not possible. Shape [a].
            variances: Likewise. Shape [a].
        """
        finite = np.where(possible, costs, 0.0)
        centred = np.where(possible, finite - finite.sum() / possible.sum(), 0.0)
        self._parts.append(
            (
                features.copy(),
                shared.copy(),
                possible.copy(),
                centred.astype(np.float32),
                np.where(possible, variances, 0.0).astype(np.float32),
            )
        )

    def labels(self) -> Labels:
        """All of them.

        Raises:
            StrategyError: If there are none.
        """
        if not self._parts:
            raise StrategyError(
                "no decision was labelled; play more episodes, or label a larger share"
            )
        return Labels(*(np.stack(part) for part in zip(*self._parts, strict=True)))
