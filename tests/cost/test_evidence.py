"""Evidence: which mechanisms a strategy leans on, and how that ranks it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cost import CostModel, Evidence, Risk
from planner.cost.evidence import (
    Place,
    RecipeEvidence,
    Seen,
    interval_of,
    mechanisms,
    tokens_of,
)
from planner.schema.schedules import schedule_spec
from planner.space import StrategyTable
from tests.cost.made import device, hosts, row, setting_for, uniform_graph

PLACE = Place(devices_per_host=8, seq_len=4096, compute="bfloat16", experts=0)

#: Fully sharded data parallelism was measured, tp under another recipe, cp never.
EVIDENCE = Evidence(
    recipes={
        "torch": RecipeEvidence(
            runs=20,
            base=0.05,
            tokens=4096.0,
            seen={"ZeRO 3": Seen(runs=20, tokens=4096.0)},
        ),
        "megatron": RecipeEvidence(
            runs=9, base=0.08, tokens=2048.0, seen={"tp": Seen(runs=9, tokens=2048.0)}
        ),
    },
    base=0.2,
    elsewhere=0.1,
    unseen=0.2,
)


def table(**changes: int) -> StrategyTable:
    return StrategyTable.from_columns(**row(**changes))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"dp_shard": 8, "zero_stage": 3}, {"ZeRO 3"}),
        (
            {"dp_replicate": 2, "dp_shard": 4, "zero_stage": 2},
            {"replicas", "ZeRO 2", "hybrid sharding"},
        ),
        ({"tp": 8}, {"tp"}),
        ({"tp": 16}, {"tp across hosts"}),
        ({"cp": 4, "tp": 2, "zero_stage": 1}, {"ZeRO 1", "tp", "cp"}),
        ({"cp": 8, "tp": 2}, {"tp", "cp across hosts"}),
        ({"pp": 4, "recompute": 2}, {"GPipe", "full recomputation"}),
        (
            {
                "pp": 4,
                "virtual_stages": 2,
                "schedule": schedule_spec("Interleaved1F1B").code,
            },
            {"Interleaved1F1B"},
        ),
        (
            {
                "pp": 4,
                "virtual_stages": 2,
                "schedule": schedule_spec("ZBVZeroBubble").code,
            },
            {"ZBVZeroBubble"},
        ),
        (
            {
                "pp": 4,
                "virtual_stages": 2,
                "schedule": schedule_spec("InterleavedZeroBubble").code,
            },
            {"InterleavedZeroBubble", "interleaved split backward"},
        ),
        ({"dp_shard": 16, "ep": 16}, {"ep across hosts"}),
    ],
)
def test_a_strategy_has_the_mechanisms_of_its_columns(
    changes: dict[str, int], names: set[str]
) -> None:
    one = table(**changes)
    assert {name for name, has in mechanisms().items() if has(one, PLACE)[0]} == names


def test_spreads_of_what_lacks_runs_add_up() -> None:
    def spread(recipe: str = "torch", **changes: int) -> float:
        return float(EVIDENCE.spread(recipe, table(**changes), PLACE)[0])

    assert spread(dp_shard=8, zero_stage=3) == pytest.approx(0.05)
    assert spread(dp_shard=4, tp=2, zero_stage=3) == pytest.approx(np.hypot(0.05, 0.1))
    # A part of a sequence is fewer tokens than any run of the recipe had, too.
    assert spread(dp_shard=4, cp=2, zero_stage=3) == pytest.approx(
        np.sqrt(0.05**2 + 0.2**2 + 0.2**2)
    )
    assert spread("nobody's", dp_shard=8, zero_stage=3) == pytest.approx(
        np.hypot(0.2, 0.1)
    )


def test_tokens_are_those_of_a_rank() -> None:
    one = table(cp=4, microbatch_size=2)
    assert tokens_of(one, PLACE).tolist() == [2048.0]
    assert tokens_of(one, PLACE._replace(seq_len=None)).tolist() == [0.5]


def test_findings_name_the_range_that_lacks() -> None:
    found = [
        one.mechanism
        for one, mask in EVIDENCE.findings("torch", table(cp=2), PLACE)
        if mask[0]
    ]
    assert found == ["cp", "microbatches below 4,096 tokens a rank"]


def test_four_of_five_draws_lie_in_the_interval() -> None:
    draws = np.exp(np.random.default_rng(0).normal(0.0, 0.3, 100_000))
    low, high = interval_of(1.0, 0.3)
    inside = float(((draws >= low) & (draws <= high)).mean())
    assert inside == pytest.approx(0.8, abs=0.005)
    assert low * high == pytest.approx(1.0)


def test_a_quantile_ranks_tables_and_strategies_alike() -> None:
    context = setting_for(uniform_graph(8), hosts((2, 8, device())))
    risky = replace(context, risk=Risk(quantile=0.9, evidence=EVIDENCE))
    rows = StrategyTable.concatenate(
        [table(dp_shard=16, zero_stage=3), table(dp_shard=8, cp=2, zero_stage=3)]
    )
    plain, ranked = CostModel(context).table(rows), CostModel(risky).table(rows)
    assert (plain.step_time_s == ranked.step_time_s).all()
    assert isinstance(ranked.caution, np.ndarray)
    assert plain.caution == 1.0
    assert 1.0 < ranked.caution[0] < ranked.caution[1]
    even = replace(context, risk=Risk(quantile=0.5, evidence=EVIDENCE))
    assert CostModel(even).table(rows).caution == 1.0
