"""The chains of actions that can be the longest of a schedule, as counts.

The makespan of a fixed order is the length of its longest chain, and a chain's length
is a sum: so many forwards, input gradients, weight gradients and transfers. For 1F1B
without transfers there is one such sum, (M + pp - 1) (f + b), the textbook's;
zero-bubble orders have up to two dozen. They are read off the engine at chosen ratios
of f : b : w : send, until none of these is explained less than fully, and kept.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from planner.errors import StrategyError
from planner.schema.schedules import schedule_spec
from planner.simulate.actions import ActionKind, ActionTable, IntArray, actions
from planner.simulate.compiled import compiled
from planner.simulate.durations import FloatArray, stage_durations
from planner.simulate.engine import makespan, op_ends
from planner.simulate.program import compile_table

__all__ = [
    "bubble_coefficients",
    "critical_path_counts",
]

#: From this many rounds of pp microbatches on, the sums grow evenly with each round;
#: the second number over pp is added, because few ranks need more rounds to settle.
_STEADY_ROUNDS = (4, 24)
#: Rounds after which every chain repeats itself.
_PERIOD = 2
#: Chains are added until none of the probed ratios is further off than this.
_TOLERANCE = 1e-4
_PROBES = 768
_CHAINS_A_ROUND = 6


@lru_cache(maxsize=1)
def _probes() -> FloatArray:
    """Ratios f : b : w : send_f : send_b at which chains are read. Shape [n, 5].

    A lattice of irrational steps covers compute within 1 : 9, with and without a
    weight gradient, and transfers from a thousandth of it to three times as long; no
    two different chains are equally long by chance.
    Source of the steps: powers of the root of x^6 = x + 1 (Roberts 2018, R sequence).
    """
    steps = 0.8812714616335696 ** np.arange(1, 6)
    spread = (np.arange(1, _PROBES + 1)[:, None] * steps) % 1.0
    ratios = 9.0 ** (spread - 0.5)
    ratios[:, 3:] = 10 ** (3.5 * spread[:, 3:] - 3)
    ratios[::3, 2] *= 1e-3
    ratios[::4, 3:] *= 1e-3
    ratios[1::4, 3:] *= 0.1
    ratios[2::4, 3:] = ratios[2::4, :2] * 9.0 ** (spread[2::4, 3:] - 0.5)
    ratios.setflags(write=False)
    return ratios


@lru_cache(maxsize=4096)
def bubble_coefficients(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int
) -> FloatArray:
    """Find the sums of which a makespan is the greatest.

    Args:
        schedule: torch's name.
        pp: Ranks.
        virtual_stages: Of each rank.
        num_microbatches: In a step.
    Returns:
        Per chain the number of forwards, input gradients, weight gradients, activation
        and gradient transfers, of one virtual stage and microbatch each.
        Shape [chains, 5].
    Raises:
        UnknownNameError: If the schedule has no such name.
        StrategyError: If torch refuses the combination.
    """
    spec = schedule_spec(schedule)
    reason = spec.violation(pp, virtual_stages, num_microbatches)
    if reason is not None:
        raise StrategyError(reason)
    if spec.closed_form == "fill":
        fill = num_microbatches + pp - 1.0
        return np.array([[fill, fill, fill, pp - 1.0, pp - 1.0]])
    steady = (_STEADY_ROUNDS[0] + _STEADY_ROUNDS[1] // pp) * pp
    # Schedules in rounds take counts that pp does not divide, all below pp squared;
    # there, a round more is another number of equal rounds, or none at all.
    uneven = num_microbatches % pp and num_microbatches < pp * pp
    if uneven or num_microbatches <= steady + 2 * _PERIOD * pp:
        chains, _ = _chains(schedule, pp, virtual_stages, num_microbatches)
        return _undominated(chains)
    base = steady + (num_microbatches - steady) % (_PERIOD * pp)
    chains, slope = _growth(schedule, pp, virtual_stages, base)
    return _undominated(chains + slope * ((num_microbatches - base) // (_PERIOD * pp)))


def _chains(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int
) -> tuple[FloatArray, FloatArray]:
    """Chains that explain every probe, and the ratios at which each was read."""
    table = actions(schedule, pp, virtual_stages, num_microbatches)
    probes = _probes()
    columns = [
        np.repeat(part, table.num_stages, axis=1) for part in probes.T[..., None]
    ]
    compute, sends = columns[:3], [part[:, 1:] for part in columns[3:]]
    exact = makespan(table, *compute, *sends)
    chains, read = np.zeros((0, 5)), np.zeros((0, 5))
    known = np.zeros(_PROBES)
    while (known < exact * (1 - _TOLERANCE)).any():
        worst = np.argsort(known / exact, kind="stable")[:_CHAINS_A_ROUND]
        worst = worst[known[worst] < exact[worst] * (1 - _TOLERANCE)]
        new = _read(table, probes[worst])
        chains, read = (
            np.concatenate([chains, new]),
            np.concatenate([read, probes[worst]]),
        )
        known = (probes @ chains.T).max(axis=1)
    return chains, read


def _read(table: ActionTable, ratios: FloatArray) -> FloatArray:
    found = [critical_path_counts(table, *row) for row in ratios.tolist()]
    return np.array(found, dtype=np.float64)


@lru_cache(maxsize=512)
def _growth(
    schedule: str, pp: int, virtual_stages: int, base: int
) -> tuple[FloatArray, FloatArray]:
    """Chains at ``base`` microbatches and what each gains in a period more.

    A chain whose gain is not yet steady is left out: another one is about to pass it.
    """
    first, ratios = _chains(schedule, pp, virtual_stages, base)
    second, third = (
        _read(actions(schedule, pp, virtual_stages, base + _PERIOD * pp * more), ratios)
        for more in (1, 2)
    )
    steady = (third - second == second - first).all(axis=1)
    return first[steady], (second - first)[steady]


def _undominated(chains: FloatArray) -> FloatArray:
    rows = np.unique(chains, axis=0)
    # No two rows are equal: one that is nowhere less than another is more somewhere.
    above = (rows[:, None] >= rows[None]).all(axis=2).sum(axis=0) > 1
    result = np.asarray(rows[~above])
    result.setflags(write=False)
    return result


# -- One chain -------------------------------------------------------------------

_F = int(ActionKind.FORWARD)
_I = int(ActionKind.BACKWARD_INPUT)
_W = int(ActionKind.BACKWARD_WEIGHT)


def critical_path_counts(
    table: ActionTable,
    forward_s: float,
    backward_s: float,
    weight_s: float,
    send_forward_s: float,
    send_backward_s: float,
) -> IntArray:
    """Count the actions that the makespan of equal stages is a sum of.

    The counts of every chain, times any durations, bound the makespan from below; at
    the durations given here they are it.

    Returns:
        Forwards, input gradients, weight gradients, activation and gradient transfers
        on the longest chain. Shape [5].
    """
    times = stage_durations(
        table, forward_s, backward_s, weight_s, send_forward_s, send_backward_s
    )
    program = compile_table(table)
    ends = op_ends(table, times)
    last = program.last_of_rank[np.argmax(ends[program.last_of_rank])]
    return _walk_back(
        int(last),
        program.kind,
        program.previous,
        program.producer,
        program.delay_row,
        times.transfer_s[0],
        ends,
        table.num_stages,
        np.zeros(5, dtype=np.int64),
    )


@compiled
def _walk_back(
    op: int,
    kind: IntArray,
    previous: IntArray,
    producer: IntArray,
    delay_row: IntArray,
    transfer: FloatArray,
    ends: FloatArray,
    stages: int,
    counts: IntArray,
) -> IntArray:
    while op > 0:
        row = op - 1
        what = kind[row]
        if what == _F:
            counts[0] += 1
        elif what == _I:
            counts[1] += 1
        elif what == _W:
            counts[2] += 1
        else:
            counts[1] += 1
            counts[2] += 1
        arrival = ends[producer[row]] + transfer[delay_row[row]]
        if producer[row] > 0 and arrival > ends[previous[row]]:
            counts[3 if delay_row[row] < stages else 4] += 1
            op = producer[row]
        else:
            op = previous[row]
    return counts
