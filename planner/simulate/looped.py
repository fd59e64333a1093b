"""Action order of the schedules whose stages loop over the ranks.

Rank r holds virtual stages r, r + pp, r + 2 pp … Orders are those of torch 2.13,
torch.distributed.pipelining.schedules; the comments name the papers.
"""

from __future__ import annotations

import numpy as np

from planner.simulate.actions import ActionKind, IntArray, PipelineRank

__all__ = [
    "breadth_first_rows",
    "fill_drain_rows",
    "interleaved_rows",
    "interleaved_zero_bubble_rows",
    "microbatches_per_round",
    "one_forward_one_backward_rows",
]

_F = int(ActionKind.FORWARD)
_B = int(ActionKind.BACKWARD)
_I = int(ActionKind.BACKWARD_INPUT)
_W = int(ActionKind.BACKWARD_WEIGHT)


def _rows(kind: int, stage: int | IntArray, microbatch: IntArray) -> IntArray:
    rows = np.empty((len(microbatch), 3), dtype=np.int32)
    rows[:, 0] = kind
    rows[:, 1] = stage
    rows[:, 2] = microbatch
    return rows


def fill_drain_rows(one: PipelineRank) -> IntArray:
    """GPipe: all forwards, then all backwards. Shape [actions, 3].

    Source: Huang et al. 2019, GPipe.
    """
    order = np.arange(one.num_microbatches)
    return np.concatenate([_rows(_F, one.rank, order), _rows(_B, one.rank, order)])


def one_forward_one_backward_rows(one: PipelineRank) -> IntArray:
    """1F1B: pp - rank forwards ahead, then backward and forward in turn.

    Source: Narayanan et al. 2019, PipeDream (flushed each step).
    """
    order = np.arange(one.num_microbatches)
    ahead = min(one.pp - one.rank - 1, one.num_microbatches)
    forward, backward = (_rows(kind, one.rank, order) for kind in (_F, _B))
    return _in_turn(forward, [backward], ahead=ahead, late=(0,))


def breadth_first_rows(one: PipelineRank) -> IntArray:
    """LoopedBFS: a stage runs all microbatches before the next stage starts.

    Source: Lamy-Poirier 2023, Breadth-First Pipeline Parallelism; torch runs the
    microbatches of a backward in reverse.
    """
    order = np.arange(one.num_microbatches)
    stages = [one.rank + one.pp * turn for turn in range(one.virtual_stages)]
    forward = [_rows(_F, stage, order) for stage in stages]
    backward = [_rows(_B, stage, order[::-1]) for stage in reversed(stages)]
    return np.concatenate(forward + backward)


def microbatches_per_round(pp: int, num_microbatches: int) -> int:
    """Microbatches that a stage runs before the rank turns to its next stage."""
    return num_microbatches // max(1, num_microbatches // pp)


def interleaved_rows(one: PipelineRank) -> IntArray:
    """Interleaved1F1B: rounds of microbatches over the virtual stages of a rank.

    Source: Narayanan et al. 2021, section 2.2.
    """
    return _in_rounds(one, split_backward=False)


def interleaved_zero_bubble_rows(one: PipelineRank) -> IntArray:
    """InterleavedZeroBubble: the same rounds with a split backward.

    It needs one forward ahead per hop instead of two, and runs each weight gradient
    ``rank`` backwards after its input gradient.

    Source: Qi et al. 2023, ZB-H1.
    """
    return _in_rounds(one, split_backward=True)


def _in_rounds(one: PipelineRank, *, split_backward: bool) -> IntArray:
    rank, pp, virtual_stages, num_microbatches = one
    per_round = microbatches_per_round(pp, num_microbatches)
    step = np.arange(virtual_stages * num_microbatches)
    turn = (step // per_round) % virtual_stages
    microbatch = step // (per_round * virtual_stages) * per_round + step % per_round
    last_turn = virtual_stages - 1
    hops = pp - 1 - rank
    ahead = last_turn * per_round + (1 if split_backward else 2) * hops
    ahead = min(ahead, len(step))
    forward = _rows(_F, rank + pp * turn, microbatch)
    backward_stage = rank + pp * (last_turn - turn)
    if not split_backward:
        backward = [_rows(_B, backward_stage, microbatch)]
        return _in_turn(forward, backward, ahead=ahead, late=(0,))
    halves = [_rows(kind, backward_stage, microbatch) for kind in (_I, _W)]
    return _in_turn(forward, halves, ahead=ahead, late=(0, rank))


def _in_turn(
    forward: IntArray, backward: list[IntArray], *, ahead: int, late: tuple[int, ...]
) -> IntArray:
    """``ahead`` forwards, then one of each sequence in turn until all are done.

    Sequence k of ``backward`` starts ``late[k]`` turns after the first turn.
    """
    parts = [forward, *backward]
    keys = [np.arange(len(forward)) - ahead]
    keys += [
        np.arange(len(rows)) + delay for rows, delay in zip(backward, late, strict=True)
    ]
    place = np.concatenate([np.full(len(key), k) for k, key in enumerate(keys)])
    turn = np.concatenate(keys)
    return np.concatenate(parts)[np.lexsort((place, turn))]
