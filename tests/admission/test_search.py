"""Decisions beside all schedules of tiny clusters, tried one by one."""

from __future__ import annotations

import itertools
import random

from planner.admission import admit, reschedule
from planner.schema.admission import ResizePrice, StateHost, StateJob
from tests.admission.small import request, state, table

_RATES = (0.0, 1.0, 2.0, 2.0, 3.0)
_SLOT_S = 10.0
_DEVICES = 4


def _possible(jobs: tuple[tuple[float, int], ...]) -> bool:
    """Return True if degrees that change every 10 s for free meet all deadlines.

    Args:
        jobs: Iterations, and the slot by whose start they are due, of each job.
    """
    seen = set()

    def ahead(slot: int, left: tuple[float, ...]) -> bool:
        if not any(left):
            return True
        most = max(_RATES) * _SLOT_S
        pairs = zip(left, jobs, strict=True)
        if (slot, left) in seen or any(n > most * (d - slot) for n, (_, d) in pairs):
            return False
        seen.add((slot, left))
        for degrees in itertools.product((0, 1, 2, 4), repeat=len(jobs)):
            if sum(degrees) > _DEVICES:
                continue
            rest = zip(left, degrees, strict=True)
            after = tuple(max(0.0, n - _RATES[k] * _SLOT_S) for n, k in rest)
            if ahead(slot + 1, after):
                return True
        return False

    return ahead(0, tuple(left for left, _ in jobs))


def test_what_is_proven_impossible_is_and_most_that_can_be_is_found() -> None:
    draw = random.Random(3)
    free = ResizePrice(restart_s=0.0, checkpoint_bytes=0.0)
    host = (StateHost(name="h0", device="gpu", devices=_DEVICES),)
    possible = found = proven = 0
    for _ in range(150):
        jobs = tuple(
            (float(draw.randrange(10, 90, 10)), draw.randint(2, 5)) for _ in range(3)
        )
        if not _possible(jobs[:2]):
            continue
        old = (
            StateJob(
                request=request(f"old{at}", left, due * _SLOT_S),
                iterations_left=left,
                promised=True,
            )
            for at, (left, due) in enumerate(jobs[:2])
        )
        before = state(*old, price=free, throughputs=table(), hosts=1)
        before = before.model_copy(update={"hosts": host})
        if reschedule(before).broken:
            continue
        left, due = jobs[2]
        made = admit(request("new", left, due * _SLOT_S), before)
        can = _possible(jobs)
        assert not (can and made.proven), jobs
        possible += can
        found += can and made.admitted
        proven += made.proven
    assert proven >= 5
    # What it misses needs every device all the time.
    assert found >= 0.9 * possible >= 40
