"""What an experienced practitioner would do by hand.

tensor parallelism inside a host and no further, as little of it as fits; a pipeline
across hosts only if sharding alone does not fit; all remaining devices data parallel,
ZeRO-sharded; recomputation only when memory asks for it; the largest microbatch that
keeps a pipeline's bubble small. Sources: Narayanan et al. 2021 (2104.04473),
takeaways 1 to 3; torchtitan and Megatron-LM example configurations.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from planner.cost import CostModel
from planner.schema import SCHEDULES
from planner.search.base import Candidate, Request, SearchResult, finish
from planner.search.refine import candidates_of_row
from planner.space import StrategyTable, legal

__all__ = ["ExpertPartitioner"]

_MOST_TRIES = 200


class ExpertPartitioner:
    """The first rule of thumb that fits, and the few after it.

    Args:
        keep: Fitting strategies to price before stopping.
    """

    name = "expert"

    def __init__(self, keep: int = 3) -> None:
        self._keep = keep

    def search(self, request: Request) -> SearchResult:
        """Answer a request; see :class:`planner.search.base.Partitioner`."""
        started = time.perf_counter()
        model = CostModel(request.setting)
        candidates: list[Candidate] = []
        fitting = 0
        limit = request.evaluation_budget or _MOST_TRIES
        for row in _ladder(request):
            if fitting >= self._keep or model.evaluations["simulated"] >= limit:
                break
            priced = candidates_of_row(model, row, free_recompute=False, most=1)
            candidates += priced
            fitting += sum(candidate.cost.fits for candidate in priced)
        return finish(self.name, request, model, candidates, started)


def _divisors(number: int, limit: int) -> list[int]:
    return [d for d in range(1, min(number, limit) + 1) if number % d == 0]


def _host_size(request: Request) -> int:
    hosts = np.asarray(request.setting.cluster.host_of_device)[request.setting.order]
    return int(np.bincount(hosts).max())


def _ladder(request: Request) -> Iterator[dict[str, int]]:
    """Rows from the simplest to the most elaborate; only legal ones."""
    devices = len(request.setting.order)
    tps = _divisors(devices, _host_size(request))
    pps = _divisors(devices, request.facts.num_units)
    meshes = sorted(
        ((pp, tp) for pp in pps for tp in tps if devices % (pp * tp) == 0),
        key=lambda mesh: (mesh[0] * mesh[1], mesh[0]),
    )
    rows = [
        row
        for pp, tp in meshes
        for recompute in (0, 1, 2)
        for zero in (0, 1, 2, 3)
        for row in _rows(request, pp, tp, zero, recompute)
        if all(row[knob] == value for knob, value in request.pins.items())
    ]
    if not rows:
        return
    table = StrategyTable.from_columns(
        **{name: [row[name] for row in rows] for name in rows[0]}
    )
    for index in np.flatnonzero(legal(table, request.facts)):
        yield rows[index]


def _rows(
    request: Request, pp: int, tp: int, zero: int, recompute: int
) -> Iterator[dict[str, int]]:
    """One mesh, from the largest sensible microbatch down."""
    facts = request.facts
    dp = len(request.setting.order) // (pp * tp)
    if facts.global_batch % dp or (zero and dp == 1):
        return
    per_replica = facts.global_batch // dp
    sequence_parallel = tp > 1 and facts.seq_len is not None and facts.seq_len % tp == 0
    for size in (8, 4, 2, 1):
        many = per_replica // size
        if per_replica % size or (pp > 1 and many < 4 * pp and size > 1):
            continue
        yield {
            "pp": pp,
            "dp_replicate": 1 if zero else dp,
            "dp_shard": dp if zero else 1,
            "cp": 1,
            "tp": tp,
            "ep": 1,
            "zero_stage": zero,
            "schedule": SCHEDULES.index("1F1B" if pp > 1 else "GPipe"),
            "virtual_stages": 1,
            "microbatch_size": size,
            "num_microbatches": many,
            "recompute": recompute,
            "sequence_parallel": int(sequence_parallel),
        }
