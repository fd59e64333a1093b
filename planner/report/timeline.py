"""The simulated step as rows of spans without gaps, one row a pp rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from planner.schema import Plan

if TYPE_CHECKING:
    from planner.cost import StepTimeline

__all__ = [
    "SPAN_KINDS",
    "Span",
    "SpanKind",
    "StageFacts",
    "TimelineData",
    "TimelineRow",
    "stage_facts",
    "timeline_rows",
]

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
#: Kinds of work of a device, in the order in which legends list them.
SPAN_KINDS: tuple[SpanKind, ...] = get_args(SpanKind)


class Span(NamedTuple):
    """Work of a device from ``start_s`` to ``end_s``.

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
        devices: Number of devices that do the same at the same time.
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
            yield Span(SPAN_KINDS[kind], *rest)

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
        """Number of spans of all rows."""
        return sum(map(len, self.rows))


_TRANSFER, _COMMUNICATION, _OPTIMIZER, _BUBBLE = (
    SPAN_KINDS.index(name)
    for name in ("transfer", "communication", "optimizer", "bubble")
)
#: Shorter spans than this share of the step are rounding, not time.
_NOTHING = 1e-9


def timeline_rows(plan: Plan, step: StepTimeline) -> tuple[TimelineRow, ...]:
    """Every pp rank's step, from its start to the step's end.

    Where a rank waits for another's output, the last part of its wait is the transfer;
    the rest is bubble.
    """
    strategy = plan.strategy
    mesh, actions = strategy.mesh, step.actions
    devices = mesh.num_devices // mesh.pp
    rows = []
    for rank in range(mesh.pp):
        mine = slice(*np.searchsorted(actions.rank, [rank, rank + 1]))
        columns = _busy(step, rank, mine)
        filled = _without_gaps(columns, _transfers(step, mine), step.step_time_s)
        rows.append(
            TimelineRow(
                rank=rank,
                devices=devices,
                first_rank=rank * devices,
                device_type=plan.prediction.memory[rank].device_type,
                kind=filled[0].astype(np.int64),
                stage=filled[1].astype(np.int64),
                microbatch=filled[2].astype(np.int64),
                start_s=filled[3],
                end_s=filled[4],
            )
        )
    return tuple(rows)


def _busy(step: StepTimeline, rank: int, mine: slice) -> NDArray[np.float64]:
    """Actions, then what follows them: kind, stage, microbatch, start, end. [5, n]."""
    run = step.actions
    ended, exchanged, updated = (
        float(column[rank])
        for column in (step.pipeline_end_s, step.exchanged_s, step.updated_s)
    )
    after = [
        (_COMMUNICATION, -1, -1, ended, exchanged),
        (_OPTIMIZER, -1, -1, exchanged, updated),
    ]
    work = np.stack(
        [
            run.kind[mine],
            run.stage[mine],
            run.microbatch[mine],
            run.start_s[mine],
            run.end_s[mine],
        ]
    )
    return np.concatenate([work, np.array(after).T], axis=1)


def _transfers(step: StepTimeline, mine: slice) -> NDArray[np.float64]:
    """Longest transfer that each action may have waited for. Shape [actions]."""
    from planner.simulate import ActionKind

    run = step.actions
    stage, kind = run.stage[mine], run.kind[mine]
    last = len(step.send_s)
    forward = kind == ActionKind.FORWARD
    takes = (
        forward | (kind == ActionKind.BACKWARD) | (kind == ActionKind.BACKWARD_INPUT)
    )
    # Activations come over the boundary before a stage, gradients over the one after.
    boundary = np.where(forward, stage - 1, stage)
    there = takes & (boundary >= 0) & (boundary < last)
    waits = np.zeros(len(stage))
    waits[there] = step.send_s[boundary[there]]
    return waits


def _without_gaps(
    columns: NDArray[np.float64], waits: NDArray[np.float64], until: float
) -> NDArray[np.float64]:
    """Put transfers and bubbles where nothing is done. Shape [5, spans]."""
    start, end = columns[3], columns[4]
    before = np.concatenate([[0.0], end[:-1]])
    gap = np.maximum(start - before, 0.0)
    moved = np.zeros(len(gap))
    moved[: len(waits)] = np.minimum(gap[: len(waits)], waits)
    nobody = np.full(len(gap), -1.0)
    idle = np.stack(
        [np.full(len(gap), float(_BUBBLE)), nobody, nobody, before, start - moved]
    )
    sent = np.stack(
        [
            np.full(len(gap), float(_TRANSFER)),
            columns[1],
            columns[2],
            start - moved,
            start,
        ]
    )
    rest = np.array([[float(_BUBBLE)], [-1.0], [-1.0], [end[-1]], [until]])
    # Of each action: its bubble, its transfer, itself.
    parts = np.stack([idle, sent, columns], axis=2).reshape(5, -1)
    every = np.concatenate([parts, rest], axis=1)
    return np.asarray(every[:, every[4] - every[3] > _NOTHING * until])


def stage_facts(plan: Plan, step: StepTimeline | None) -> tuple[StageFacts, ...]:
    """Every virtual stage; with seconds where the step could be timed."""
    facts = []
    for index, stage in enumerate(plan.strategy.stages):
        names = stage.modules or ("",)
        times = None if step is None else step.times
        facts.append(
            StageFacts(
                stage=index,
                rank=stage.rank,
                modules=(names[0], names[-1], len(stage.modules)),
                recompute=stage.recompute,
                **(
                    {}
                    if times is None
                    else {
                        "forward_s": float(times.forward[index]),
                        "forward_communication_s": float(times.forward_talk[index]),
                        "backward_s": float(times.backward[index]),
                        "backward_communication_s": float(times.backward_talk[index]),
                        "recompute_s": float(times.again[index]),
                    }
                ),
            )
        )
    return tuple(facts)
