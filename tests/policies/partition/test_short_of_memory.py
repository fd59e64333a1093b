"""The learned partitioner where most long pipelines are too large by closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cost import CostModel
from planner.search import Request, SearchResult
from planner.search.arranging.screening import screen
from planner.search.base import score
from policies.partition.partitioner import LearnedPartitioner, SearchConfig
from tests.cost.made import device, hosts
from tests.search.arranging.made import arranged

#: A host short of memory and one that has a little more.
CLUSTER = hosts(
    (1, 4, device(memory_bytes=1.72e9)), (1, 4, device("big", memory_bytes=2.5e9))
)


def _found(request: Request, config: SearchConfig | None = None) -> SearchResult:
    found = LearnedPartitioner(config=config).search(request)
    assert found.candidates
    return found


def test_what_fits_once_it_is_cut_is_found_without_evolution() -> None:
    request, groups, choices = arranged(CLUSTER, units=12, global_batch=48)
    every = np.arange(len(choices))
    seen = screen(request, CostModel(request.setting), groups, choices, every)
    best = _found(request, SearchConfig(generations=0)).candidates[0]
    assert best.cost.fits
    proposed = score(best.cost, best.strategy.mesh.num_devices, request.objective)
    assert proposed < 0.8 * seen.score.min()


@pytest.mark.parametrize("budget", [1, 3, 9])
def test_few_simulations_are_kept_for_what_fits(budget: int) -> None:
    request, _, _ = arranged(CLUSTER, units=12, global_batch=48)
    found = _found(replace(request, evaluation_budget=budget))
    assert found.candidates[0].cost.fits
    assert found.evaluations["simulated"] <= budget
