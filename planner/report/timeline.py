"""What each device does in a step, and when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "SPAN_KINDS",
    "Span",
    "SpanKind",
    "StageFacts",
    "TimelineData",
    "TimelineRow",
]

#: What a device does, in the order in which legends list it.
SPAN_KINDS = (
    "forward",
    "backward",
    "backward input",
    "backward weight",
    "transfer",
    "communication",
    "optimizer",
    "bubble",
)
SpanKind = Literal[
    "forward",
    "backward",
    "backward input",
    "backward weight",
    "transfer",
    "communication",
    "optimizer",
    "bubble",
]


class Span(NamedTuple):
    """What a device does from ``start_s`` to ``end_s``.

    ``stage`` and ``microbatch`` are -1 where they mean nothing.
    """

    kind: SpanKind
    stage: int
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRow:
    """The step of each device of one pp rank; spans follow each other without gaps.

    Attributes:
        rank: Pp rank.
        devices: How many devices do the same at the same time.
        first_rank: Rank of the first of them.
        kind: Index into :data:`SPAN_KINDS`. Shape [spans].
        stage: Virtual stage; -1 if none. Shape [spans].
        microbatch: -1 if none. Shape [spans].
        start_s: From the start of the step. Shape [spans].
        end_s: Shape [spans].
    """

    rank: int
    devices: int
    first_rank: int
    device_type: str
    kind: NDArray[np.int64]
    stage: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.kind)

    def spans(self) -> Iterator[Span]:
        """One by one, in order of time."""
        columns = (self.kind, self.stage, self.microbatch, self.start_s, self.end_s)
        for kind, *rest in zip(*(c.tolist() for c in columns), strict=True):
            yield Span(SPAN_KINDS[kind], *rest)  # type: ignore[arg-type]

    def seconds(self) -> dict[str, float]:
        """Time by kind; sums to the step."""
        spent = np.bincount(
            self.kind, weights=self.end_s - self.start_s, minlength=len(SPAN_KINDS)
        )
        return dict(zip(SPAN_KINDS, spent.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """One virtual stage.

    Attributes:
        modules: FQNs of its first and last unit, and how many it has.
        forward_s: One microbatch's forward; None if the step could not be timed.
        forward_communication_s: Part of it that is exposed communication.
        backward_s: Its whole backward, recomputation included.
        backward_communication_s: Part of it that is exposed communication.
        recompute_s: Part of it that is recomputation.
    """

    stage: int
    rank: int
    modules: tuple[str, str, int]
    recompute: str
    forward_s: float | None = None
    forward_communication_s: float | None = None
    backward_s: float | None = None
    backward_communication_s: float | None = None
    recompute_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineData:
    """The simulated step.

    Attributes:
        step_time_s: When the last device is done; :attr:`Header.step_time_s`, unless
            ``caveat`` says otherwise.
        rows: One a pp rank.
        caveat: Why the end is not what the plan predicts; empty if it is.
    """

    step_time_s: float
    rows: tuple[TimelineRow, ...]
    caveat: str = ""

    @property
    def num_spans(self) -> int:
        """Of all rows."""
        return sum(map(len, self.rows))
