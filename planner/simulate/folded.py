"""Action order of the schedules whose stages are folded in a V.

Rank r holds virtual stages r and 2 pp - 1 - r, so that the last stage lies on the rank
of the first. Orders are those of torch 2.13, torch.distributed.pipelining.schedules.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from planner.simulate.actions import ActionKind, IntArray, PipelineRank

__all__ = ["dual_pipe_rows", "zero_bubble_rows"]

_F = int(ActionKind.FORWARD)
_B = int(ActionKind.BACKWARD)
_I = int(ActionKind.BACKWARD_INPUT)
_W = int(ActionKind.BACKWARD_WEIGHT)
_OVERLAP = int(ActionKind.OVERLAP_F_B)


class _Writer:
    """Appends actions, giving each the next microbatch of its stage and kind.

    ``near`` is the stage on the way out, ``far`` the one on the way back.
    """

    def __init__(self, rank: int, pp: int) -> None:
        self.near, self.far = rank, 2 * pp - 1 - rank
        self.rows: list[tuple[int, int, int, int, int]] = []
        self._next: dict[tuple[int, int], int] = {}
        self._owed: deque[tuple[int, int]] = deque()

    def done(self, stage: int, kind: int) -> int:
        """Microbatches that have got as far as ``kind`` on a stage."""
        return self._next.get((stage, kind), 0)

    def _take(self, stage: int, kind: int) -> int:
        kind = _I if kind == _B else kind
        microbatch = self._next.get((stage, kind), 0)
        self._next[stage, kind] = microbatch + 1
        return microbatch

    def add(self, stage: int, kind: int) -> None:
        """Add one action; an input gradient leaves its weight gradient owed."""
        microbatch = self._take(stage, kind)
        self.rows.append((kind, stage, microbatch, -1, -1))
        if kind == _I:
            self._owed.append((stage, microbatch))

    def overlap(self, forward: int, backward: int) -> None:
        """Add a forward of one stage together with a full backward of the other."""
        self.rows.append(
            (
                _OVERLAP,
                forward,
                self._take(forward, _F),
                backward,
                self._take(backward, _B),
            )
        )

    def pay(self, stage: int | None = None) -> None:
        """Add the oldest weight gradient owed (by a stage), if there is one."""
        for position, (owing, microbatch) in enumerate(self._owed):
            if stage is None or owing == stage:
                del self._owed[position]
                self.rows.append((_W, owing, microbatch, -1, -1))
                return

    def owes(self, stage: int) -> bool:
        """True if a stage has weight gradients to compute."""
        return any(owing == stage for owing, _ in self._owed)


def zero_bubble_rows(one: PipelineRank) -> IntArray:
    """ZBVZeroBubble. Shape [actions, 3].

    The order is written for at least 2 pp - 1 microbatches; with fewer, the actions of
    those that do not exist are left out.

    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 6.
    """
    rank, pp, _, num_microbatches = one
    out = _Writer(rank, pp)
    near, far = out.near, out.far
    count = max(2 * pp - 1, num_microbatches)
    for _ in range(2 * (pp - rank) - 1):
        out.add(near, _F)
    for _ in range(rank):
        out.add(far, _F)
        out.add(near, _F)
    for _ in range(pp - rank):
        _forward_then_backward(out, far)
    while out.done(far, _F) < out.done(near, _F) or out.done(near, _F) < count:
        if out.done(near, _F) < count:
            out.add(near, _F)
        out.add(near, _I)
        out.pay()
        _forward_then_backward(out, far)
    for _ in range(rank):
        out.add(near, _I)
        out.add(far, _I)
    for _ in range(pp - rank):
        out.add(near, _I)
        out.pay(near)
    for stage in (far, near):
        while out.owes(stage):
            out.pay(stage)
    rows = np.array(out.rows, dtype=np.int32)[:, :3]
    return rows[rows[:, 2] < num_microbatches]


def _forward_then_backward(out: _Writer, stage: int) -> None:
    out.add(stage, _F)
    out.add(stage, _I)
    out.pay()


def dual_pipe_rows(one: PipelineRank) -> IntArray:
    """DualPipeV. Shape [actions, 5], columns as in Action.

    Source: DeepSeek-AI 2024, DeepSeek-V3, section 3.2.1, cut in half as a V.
    """
    rank, pp, _, num_microbatches = one
    out = _Writer(rank, pp)
    near, far = out.near, out.far
    hops = pp - rank - 1
    for _ in range(2 * hops):
        out.add(near, _F)
    for _ in range(rank + 1):
        out.add(near, _F)
        out.add(far, _F)
    for _ in range(hops):
        out.add(far, _I)
        out.pay()
        out.add(far, _F)
    for turn in range(num_microbatches - 2 * pp + rank + 1):
        if turn == 0 and hops == 0:
            out.add(near, _F)
            out.add(far, _B)
        else:
            out.overlap(near, far)
        out.overlap(far, near)
    for _ in range(hops):
        out.add(far, _B)
        out.overlap(far, near)
    _drain(out, rank, hops)
    return np.array(out.rows, dtype=np.int32)


def _drain(out: _Writer, rank: int, hops: int) -> None:
    """Write the last backwards of DualPipeV: whole at first, then split."""
    middle, odd = divmod(rank + 1, 2)[0], rank % 2 == 1
    kind = _B
    for turn in range(rank + 1):
        if turn == middle and odd:
            kind = _I
        out.add(out.far, kind)
        if turn == middle:
            kind = _I
        out.add(out.near, kind)
    for _ in range(hops):
        out.pay()
        out.add(out.near, kind)
    for _ in range(rank + 1):
        out.pay()
