"""Residual blocks dealt out in each round, against closed forms."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost import Cost, PricingContext
from planner.schema import Optimizer, Precision
from planner.space import Regime
from tests.cost.made import (
    device,
    hosts,
    price_both_ways,
    setting_for,
    uniform_graph,
)

#: 8 hosts of one device, 0.1 GB/s between them.
CLUSTER = hosts((8, 1, device()), between=1e8)
UNITS, LAYER = 10, 2 * 512**2
#: All units but the first and the last.
BLOCKS = UNITS - 2


def context_of(pin: str, cluster: Any = CLUSTER) -> PricingContext:
    return setting_for(
        uniform_graph(UNITS),
        cluster,
        regime=Regime.from_pins({"synchronisation": pin}),
        precision=Precision(compute="float32"),
        optimizer=Optimizer(),
    )


def priced(pin: str, **degrees: int) -> tuple[Cost, dict[str, float], float]:
    """See :func:`price_both_ways`."""
    return price_both_ways(context_of(pin), **degrees)


@pytest.mark.parametrize("copies", [2, 4])
@pytest.mark.parametrize("period", [1, 50])
def test_a_mean_step_pays_its_share_of_an_exchange(copies: int, period: int) -> None:
    """An all-to-all of a copy's blocks, an all-reduce of two units, 25 MiB a piece."""
    cost, parts, _ = priced(f"resist:period={period}", dp_replicate=copies)
    common, dealt = 4.0 * 2 * LAYER, 4.0 * BLOCKS / copies * LAYER
    sent = (2 * common + dealt) * (copies - 1) / copies / period
    assert cost.breakdown_s["data_parallel"] == pytest.approx(sent / 1e8, rel=1e-6)
    assert parts["data_parallel"] == pytest.approx(sent / 1e8, rel=1e-6)
    assert cost.collective_bytes == {
        "all_reduce": pytest.approx(common / period),
        "all_to_all": pytest.approx(dealt / period),
    }
    assert cost.link_bytes == {"dp": pytest.approx(sent)}


@pytest.mark.parametrize(
    ("copies", "min_blocks", "passed"),
    [(4, 1, 2), (3, 1, 8 / 3 + 2 / 3), (4, 6, 2 + 2 * 4), (8, 8, 1 + 2 * 7)],
)
def test_shared_blocks_go_to_their_owners_and_back(
    copies: int, min_blocks: int, passed: float
) -> None:
    cost, *_ = priced(f"resist:period=1,min_blocks={min_blocks}", dp_replicate=copies)
    found = cost.collective_bytes["all_to_all"]
    assert found == pytest.approx(passed * 4 * LAYER)


@pytest.mark.parametrize(
    ("copies", "min_blocks", "depth"),
    [(2, 1, 4), (3, 1, 3), (4, 1, 2), (4, 6, 6), (8, 1, 1), (8, 8, 8)],
)
def test_a_copy_computes_its_depth_of_the_blocks(
    copies: int, min_blocks: int, depth: int
) -> None:
    """Units are equal: the first, the last, and ``depth`` of those between."""
    cost, parts, memory = priced(f"resist:min_blocks={min_blocks}", dp_replicate=copies)
    plain, others, whole = priced("local_steps", dp_replicate=copies)
    share = (2 + depth) / UNITS
    compute = plain.breakdown_s["compute"]
    assert cost.breakdown_s["compute"] == pytest.approx(share * compute, rel=1e-6)
    assert parts["compute"] == pytest.approx(share * others["compute"], rel=1e-6)
    found, usual = cost.memory, plain.memory
    assert found.parameters == pytest.approx(share * usual.parameters)
    assert found.gradients == pytest.approx(share * usual.gradients)
    assert found.optimizer == pytest.approx(share * usual.optimizer)
    assert found.optimizer > 0
    assert (found.activations < usual.activations) == (depth < BLOCKS)
    assert (memory < whole) == (depth < BLOCKS)


def test_one_copy_computes_all_blocks() -> None:
    ours, *_ = priced("resist")
    theirs, *_ = priced("all_reduce")
    assert ours.breakdown_s == pytest.approx(theirs.breakdown_s)
    assert ours.collective_bytes == theirs.collective_bytes == {}
