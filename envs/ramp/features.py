"""Candidates for the job at the head, and features of them.

Candidate 0 turns the job away, candidate 1 + i runs it at the i-th degree. A candidate
is described by the state that it leaves behind: the shares of the cluster that are
free, and free in blocks, at several times after the decision.

All functions take one episode, and are called by other compiled code (a lookahead needs
the features of every decision that it simulates); :func:`encode` takes many.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.episodes import servers_in
from envs.ramp.jobs import RampTables
from envs.ramp.placement import BlockTable, servers_given
from envs.ramp.state import Moment, RampState, moment_of
from planner.simulate.compiled import compiled, inlined, inner

__all__ = [
    "BLOCK_SIZES",
    "NUM_FEATURES",
    "NUM_SHARES",
    "OFFSETS",
    "Candidates",
    "ShareMemo",
    "busy_at",
    "empty_candidates",
    "encode",
    "list_candidates",
    "make_memo",
    "write_features",
    "write_shares",
]

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Masks = NDArray[np.uint64]

#: Times at which the state left behind is described, in mean intervals from now.
OFFSETS = (1.0, 2.0, 3.0, 4.0, 6.0, 9.0, 13.0, 19.0, 28.0)
#: Sizes of blocks that are counted.
BLOCK_SIZES = (2, 4, 8, 16)
#: Shares of the cluster at one time: free servers, and those in blocks of each size.
NUM_SHARES = 1 + len(BLOCK_SIZES)
#: Features of a candidate: the shares at each offset, and six of its own.
NUM_FEATURES = len(OFFSETS) * NUM_SHARES + 6

#: Completion times above this, in mean intervals, look equal.
_LONGEST = 40.0
#: Ends of jobs and times this close count as equal, as in RampWorld.
_SAME_TIME_S = 1e-7


class Candidates(NamedTuple):
    """Candidates of one decision, or of b decisions with a leading axis. c candidates.

    Attributes:
        possible: True if the benchmark's mask allows it, there is a free block, and the
            completion time as far as it is known meets the deadline. Turning away is
            always possible. Shape [c].
        servers: Servers it would hold, as bits; 0 if not possible. Shape [c].
        jct_s: Completion time as far as it is known; 0 for turning away. Shape [c].
        features: Zeros if it is not possible. Shape [c, NUM_FEATURES].
    """

    possible: Flags
    servers: Masks
    jct_s: Array
    features: Floats


def empty_candidates(tables: RampTables, *batch: int) -> Candidates:
    """Allocate candidates, with a leading axis if a batch size is given."""
    shape = (*batch, 1 + len(tables.degrees))
    return Candidates(
        possible=np.zeros(shape, dtype=np.bool_),
        servers=np.zeros(shape, dtype=np.uint64),
        jct_s=np.zeros(shape),
        features=np.zeros((*shape, NUM_FEATURES), dtype=np.float32),
    )


class ShareMemo(NamedTuple):
    """Cache of the servers in free blocks, by the servers that are held.

    Successive states, and candidates of one decision, ask for the same again and again.
    A slot keeps the last answer. Not to be shared by threads.

    Attributes:
        keys: Mask of held servers of each slot, plus 1. Shape [slots].
        counts: Free servers and those in blocks of each size, a byte each. Shape
            [slots].
    """

    keys: Masks
    counts: Masks


#: Binary logarithm of the slots of a memo, 1 MiB in all.
_SLOT_BITS = 16


def make_memo() -> ShareMemo:
    """Make an empty memo, for one topology."""
    slots = 1 << _SLOT_BITS
    # An empty slot has the key of the mask of all ones, which leaves nothing free.
    return ShareMemo(np.zeros(slots, np.uint64), np.zeros(slots, np.uint64))


@inner
def _count_free(blocks: BlockTable, num_servers: int, busy: np.uint64) -> np.uint64:
    """Count servers that are free, and free in blocks of each size, a byte each."""
    free = num_servers - servers_in(busy)
    counts = np.uint64(free)
    for index in range(len(BLOCK_SIZES)):
        size = BLOCK_SIZES[index]
        taken, left = busy, free
        if size < len(blocks.first) - 1:
            for block in range(blocks.first[size], blocks.first[size + 1]):
                if left < size:
                    break
                if blocks.masks[block] & taken == 0:
                    taken |= blocks.masks[block]
                    left -= size
        counts |= np.uint64(free - left) << np.uint64(8 * (1 + index))
    return counts


@inlined
def write_shares(
    blocks: BlockTable, num_servers: int, busy: np.uint64, memo: ShareMemo, out: Floats
) -> None:
    """Compute the shares of the cluster free, and free in disjoint blocks of each size.

    Args:
        blocks: Blocks of the topology. They are taken greedily, in the order in which
            placements try them.
        num_servers: Servers of the topology.
        busy: Servers that are held, as bits.
        memo: Memo of the topology.
        out: Filled in. Shape [NUM_SHARES].
    """
    # A product with 2^64 over the golden ratio: upper bits depend on the whole mask.
    mixed = busy * np.uint64(0x9E3779B97F4A7C15)
    slot = np.int64(mixed >> np.uint64(64 - _SLOT_BITS))
    key = busy + np.uint64(1)
    if memo.keys[slot] != key:
        memo.counts[slot] = _count_free(blocks, num_servers, busy)
        memo.keys[slot] = key
    counts = memo.counts[slot]
    for index in range(NUM_SHARES):
        count = (counts >> np.uint64(8 * index)) & np.uint64(255)
        out[index] = np.int64(count) / num_servers


@inlined
def busy_at(moment: Moment, time_s: float) -> np.uint64:
    """Return the servers that jobs running now still hold at a later time, as bits."""
    busy = np.uint64(0)
    for job in range(moment.number):
        if moment.ends_s[job] > time_s + _SAME_TIME_S:
            busy |= moment.masks[job]
    return busy


@inner
def list_candidates(
    tables: RampTables,
    moment: Moment,
    model: int,
    beta: float,
    jct_s: Array,
    out: Candidates,
) -> None:
    """Find the possible candidates, and the servers that each would hold.

    Args:
        tables: Tables of the jobs.
        moment: State before the decision.
        model: Number of the job at the head.
        beta: Its deadline, as a share of its time on one device.
        jct_s: Its completion time at each degree. Shape [d].
        out: Filled in, but for the features.
    """
    out.possible[0], out.servers[0], out.jct_s[0] = True, np.uint64(0), 0.0
    left = tables.num_servers - moment.held
    deadline_s = beta * tables.sequential_jct_s[model]
    for k in range(len(tables.degrees)):
        given = np.uint64(0)
        if tables.degrees[k] <= left and jct_s[k] <= deadline_s:
            given = servers_given(tables.sizes[model, k], tables.blocks, moment.busy)
        out.possible[1 + k] = given != 0
        out.servers[1 + k] = given
        out.jct_s[1 + k] = jct_s[k]


@inner
def write_features(
    tables: RampTables,
    moment: Moment,
    deadline_s: float,
    memo: ShareMemo,
    out: Candidates,
) -> None:
    """Write features of the candidates that :func:`list_candidates` found possible.

    At each of the OFFSETS the shares of :func:`write_shares`, with the candidate's
    servers held until it ends; then whether it turns the job away, whether it ends
    after the horizon, its share of the servers, its completion time in mean intervals
    (capped at 40, over 40), the share of its last interval in which it no longer runs,
    and the share of the time to the deadline that it leaves.

    Args:
        tables: Tables of the jobs.
        moment: State before the decision.
        deadline_s: Largest acceptable completion time of the job at the head.
        memo: Memo of the topology.
        out: Its features are filled in.
    """
    last = len(OFFSETS) * NUM_SHARES
    out.features[:] = 0.0
    before = np.uint64(0)
    for offset in range(len(OFFSETS)):
        at_s = moment.now_s + OFFSETS[offset] * moment.interval_s
        begin, end = offset * NUM_SHARES, (offset + 1) * NUM_SHARES
        staying = busy_at(moment, at_s)
        # Without an end of a job since the last offset, nothing has changed.
        same = offset > 0 and staying == before
        for choice in range(len(out.possible)):
            if not out.possible[choice]:
                continue
            shares = out.features[choice, begin:end]
            held = staying | out.servers[choice]
            gone = moment.now_s + out.jct_s[choice] <= at_s + _SAME_TIME_S
            # Loops, because assigning slices also checks whether they overlap.
            if choice > 0 and gone:
                for index in range(NUM_SHARES):
                    shares[index] = out.features[0, begin + index]
            elif same:
                for index in range(NUM_SHARES):
                    shares[index] = out.features[choice, begin - NUM_SHARES + index]
            else:
                write_shares(tables.blocks, tables.num_servers, held, memo, shares)
        before = staying
    out.features[0, last] = 1.0
    for choice in range(1, len(out.possible)):
        if not out.possible[choice]:
            continue
        own, jct_s = out.features[choice, last:], out.jct_s[choice]
        intervals = jct_s / moment.interval_s
        own[1] = moment.now_s + jct_s > moment.horizon_s + _SAME_TIME_S
        own[2] = servers_in(out.servers[choice]) / tables.num_servers
        own[3] = min(intervals, _LONGEST) / _LONGEST
        own[4] = np.ceil(intervals) - intervals
        own[5] = 1.0 - jct_s / deadline_s


@compiled
def _encode(
    tables: RampTables,
    state: RampState,
    features: bool,
    memo: ShareMemo,
    out: Candidates,
) -> None:
    for row in range(len(state.over)):
        one = Candidates(
            out.possible[row], out.servers[row], out.jct_s[row], out.features[row]
        )
        if state.over[row]:
            one.possible[:] = False
            one.possible[0] = True
            one.servers[:] = np.uint64(0)
            one.jct_s[:] = 0.0
            if features:
                one.features[:] = 0.0
            continue
        moment, model, beta = moment_of(state, row), state.model[row], state.beta[row]
        list_candidates(tables, moment, model, beta, state.jct_s[row, model], one)
        if features:
            deadline_s = beta * tables.sequential_jct_s[model]
            write_features(tables, moment, deadline_s, memo, one)


def encode(
    tables: RampTables,
    state: RampState,
    out: Candidates,
    memo: ShareMemo | None = None,
    *,
    features: bool = True,
) -> Candidates:
    """List the candidates of many episodes, with their features if asked for.

    Args:
        tables: Tables of the jobs.
        state: State of the episodes. After the end, only turning away is possible.
        out: Filled in, and returned; from :func:`empty_candidates`.
        memo: Memo of the topology; None for one for this call alone.
        features: Whether to write features.
    """
    _encode(tables, state, features, memo or make_memo(), out)
    return out
