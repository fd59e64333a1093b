"""Weights averaged once a period, against closed forms and against plain replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cost import Cost, CostModel, PricingContext
from planner.schema import Precision
from planner.schema.methods import read_method
from planner.schema.methods.local_steps import LocalSteps
from planner.search import score
from planner.search.base import scores_of
from planner.space import Regime
from tests.cost.made import (
    device,
    hosts,
    price_both_ways,
    row,
    setting_for,
    table_of,
    uniform_graph,
)

#: 0.1 GB/s between hosts.
SLOW = hosts((8, 1, device()), between=1e8)
WEIGHTS = 16 * 512**2
PERIODS = (1, 4, 100)
FULL = Precision(compute="float32")


def regime_of(**pins: str) -> Regime:
    return Regime.from_pins(pins)


def context_of(regime: Regime) -> PricingContext:
    return setting_for(uniform_graph(8), SLOW, regime=regime, precision=FULL)


def priced(regime: Regime, **degrees: int) -> tuple[Cost, dict[str, float], float]:
    """See :func:`price_both_ways`."""
    return price_both_ways(context_of(regime), **degrees)


@pytest.mark.parametrize("period", PERIODS)
@pytest.mark.parametrize("shard", [1, 2])
def test_a_mean_step_pays_its_share_of_an_average(period: int, shard: int) -> None:
    degrees = {"dp_replicate": 8 // shard, "dp_shard": shard}
    zero = {"zero_stage": 1} if shard > 1 else {}
    regime = regime_of(synchronisation=f"local_steps:period={period}")
    cost, parts, _ = priced(regime, **degrees, **zero)
    held = 4.0 * WEIGHTS / shard
    assert cost.collective_bytes["all_reduce"] == held / period
    inside = 2 * 4.0 * WEIGHTS / 2 if shard > 1 else 0.0
    copies = 8 // shard
    average = 2 * (copies - 1) / copies * held
    assert cost.link_bytes["dp"] == pytest.approx(inside + average / period)
    exposed = cost.breakdown_s["data_parallel"]
    alone, *_ = priced(
        regime_of(synchronisation="local_steps:period=1000000"), **degrees, **zero
    )
    once = (exposed - alone.breakdown_s["data_parallel"]) * period
    assert once == pytest.approx(average / 1e8, rel=0.02)
    assert parts["data_parallel"] == pytest.approx(exposed, rel=1e-9)


def test_time_falls_with_the_period_as_its_reciprocal() -> None:
    seconds = [
        priced(
            regime_of(synchronisation=str(LocalSteps(period=period))), dp_replicate=8
        )[0].breakdown_s["data_parallel"]
        for period in PERIODS
    ]
    assert np.multiply(seconds, PERIODS) == pytest.approx([seconds[0]] * 3)
    plain, *_ = priced(Regime(), dp_replicate=8)
    # All of it shows, where a reduction in every step hides under the backward.
    assert seconds[0] >= plain.breakdown_s["data_parallel"]
    assert seconds[1] < plain.breakdown_s["data_parallel"]


def test_a_piece_is_copied_when_activations_are_gone() -> None:
    plain, *_ = priced(Regime(), dp_replicate=8)
    apart, *_ = priced(regime_of(synchronisation="local_steps"), dp_replicate=8)
    piece = min(4.0 * WEIGHTS, LocalSteps.PIECE_BYTES)
    activations = np.maximum(plain.memory.activations, piece)
    assert apart.memory.activations == pytest.approx(activations)
    assert apart.memory.optimizer == pytest.approx(plain.memory.optimizer)


@pytest.mark.parametrize(
    "pins",
    [
        {},
        {"synchronisation": "local_steps:period=3"},
        {"gradient_compression": "float16"},
        {"gradient_compression": "powersgd"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_replicate": 8},
        {"dp_replicate": 4, "dp_shard": 2, "zero_stage": 3},
        {"dp_replicate": 4, "pp": 2, "num_microbatches": 4},
    ],
    ids=str,
)
def test_a_table_prices_a_regime_as_a_strategy_is_priced(
    pins: dict[str, Any], degrees: dict[str, int]
) -> None:
    values = {slot: str(read_method(slot, value)) for slot, value in pins.items()}
    cost, parts, memory = priced(regime_of(**values), **degrees)
    found = cost.breakdown_s["data_parallel"]
    assert parts["data_parallel"] == pytest.approx(found, rel=1e-6)
    plain, _, plain_memory = priced(Regime(), **degrees)
    changes = bool(pins) and (
        "synchronisation" in pins or set(degrees) == {"dp_replicate"}
    )
    assert (plain.breakdown_s["data_parallel"] != found) == changes
    kept = cost.memory.gradients - plain.memory.gradients
    assert memory - plain_memory == pytest.approx(float(kept.max()), abs=1.0)


def test_a_score_counts_progress_not_steps() -> None:
    whole = regime_of(synchronisation="local_steps")
    half = replace(whole, efficiency=0.5)
    (cost, *_), (full, *_) = (
        priced(regime, dp_replicate=8) for regime in (half, whole)
    )
    slow, fast = (CostModel(context_of(regime)) for regime in (half, whole))
    assert cost.step_time_s == full.step_time_s
    for objective in ("throughput", "throughput_per_device"):
        assert score(cost, 8, objective) == 2 * score(full, 8, objective)
        table = table_of(row(dp_replicate=8))
        few, many = (
            float(scores_of(model.table(table), table, objective)[0])
            for model in (slow, fast)
        )
        assert few == 2 * many == pytest.approx(score(cost, 8, objective), rel=1e-6)
    assert score(cost, 8, "memory") == score(full, 8, "memory")


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({}, 0),
        ({"delay": 2}, 1),
        ({"outer_learning_rate": 0.5}, 1),
        ({"outer_momentum": 0.9}, 2),
        ({"outer_momentum": 0.9, "nesterov": True, "fragments": 4, "delay": 1}, 2.25),
        ({"outer_momentum": 0.9, "offload": True}, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("shard", [1, 2])
def test_an_outer_optimizer_keeps_weights_and_momentum(
    settings: dict[str, Any], copies: float, shard: int
) -> None:
    degrees = {"dp_replicate": 8 // shard, "dp_shard": shard}
    zero = {"zero_stage": 3} if shard > 1 else {}
    apart = str(LocalSteps(period=8, **settings))
    cost, _, memory = priced(regime_of(synchronisation=apart), **degrees, **zero)
    plain, _, plain_memory = priced(
        regime_of(synchronisation="local_steps"), **degrees, **zero
    )
    kept = copies * 4.0 * WEIGHTS / shard
    assert cost.memory.gradients - plain.memory.gradients == pytest.approx(kept)
    assert memory - plain_memory == pytest.approx(kept, abs=1.0)


def test_a_delayed_exchange_hides_under_so_many_steps() -> None:
    def exposed(**settings: int) -> tuple[float, float]:
        settings = {"period": 1000, **settings}
        pin = str(LocalSteps(**settings))  # type: ignore[arg-type]
        cost, parts, _ = priced(regime_of(synchronisation=pin), dp_replicate=8)
        found = cost.breakdown_s["data_parallel"]
        assert parts["data_parallel"] == pytest.approx(found, rel=1e-9, abs=1e-12)
        return found, cost.breakdown_s["compute"]

    (at_once, compute), (parted, _) = exposed(), exposed(fragments=4)
    (later, _), (hidden, _) = exposed(delay=2), exposed(delay=900)
    assert later == pytest.approx(at_once - 2 * compute / 1000, rel=1e-3)
    assert hidden == 0
    # As many bytes, in more messages.
    assert at_once <= parted <= 1.5 * at_once
