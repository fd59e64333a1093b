"""Core steps and full steps in turn, against closed forms."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost import Cost, PricingContext
from planner.graph.neurons import count_outside, only_neurons
from planner.schema import Precision
from planner.space import Regime
from tests.cost.made import (
    device,
    hosts,
    price_both_ways,
    setting_for,
    uniform_graph,
)

#: 4 hosts of one device, 0.1 GB/s between them.
CLUSTER = hosts((4, 1, device()), between=1e8)
#: Of 8 layers with two products of 512 neurons each, which have all weights.
WEIGHTS = 4.0 * 16 * 512**2


def context_of(pin: str, cluster: Any = CLUSTER) -> PricingContext:
    regime = Regime.from_pins({"synchronisation": pin})
    graph = uniform_graph(8)
    if regime.synchronisation.of_neurons:
        graph = only_neurons(graph)
    precision = Precision(compute="float32")
    return setting_for(graph, cluster, regime=regime, precision=precision)


def priced(
    pin: str, cluster: Any = CLUSTER, **degrees: int
) -> tuple[Cost, dict[str, float], float]:
    """See :func:`price_both_ways`."""
    return price_both_ways(context_of(pin, cluster), **degrees)


def compute_s(pin: str, cluster: Any = CLUSTER) -> float:
    """Seconds of compute of a mean step of four copies, in table and simulation."""
    cost, parts, _ = priced(pin, cluster, dp_replicate=4)
    found = cost.breakdown_s["compute"]
    assert parts["compute"] == pytest.approx(found, rel=1e-6)
    return found


@pytest.mark.parametrize("copies", [2, 4])
@pytest.mark.parametrize(("core", "every"), [(0.5, 2), (0.25, 4), (1.0, 2)])
def test_a_mean_step_reduces_the_core_and_a_share_of_the_rest(
    copies: int, core: float, every: int
) -> None:
    pin = f"masked:core={core},every={every}"
    cost, parts, _ = priced(pin, dp_replicate=copies)
    reduced = WEIGHTS * (core + (1 - core) / every)
    sent = 2 * (copies - 1) / copies * reduced
    assert cost.collective_bytes == {"all_reduce": pytest.approx(reduced)}
    assert cost.link_bytes == {"dp": pytest.approx(sent)}
    assert cost.breakdown_s["data_parallel"] == pytest.approx(sent / 1e8, rel=1e-6)
    assert parts["data_parallel"] == pytest.approx(sent / 1e8, rel=1e-6)


@pytest.mark.parametrize(("weak", "strong"), [("3", 3), ("0+1", 2), ("0+1+2", 1)])
def test_the_rest_goes_among_strong_replicas(weak: str, strong: int) -> None:
    cost, *_ = priced(f"masked:weak_replicas={weak}", dp_replicate=4)
    half = WEIGHTS / 2
    rest = half / 2 if strong > 1 else 0.0
    assert cost.collective_bytes == {"all_reduce": pytest.approx(half + rest)}
    sent = 2 * (3 / 4 * half + (strong - 1) / strong * rest)
    assert cost.link_bytes == {"dp": pytest.approx(sent)}


def test_compute_is_the_mean_of_core_and_full_steps() -> None:
    """Bytes that are saved go with the neurons that core steps leave out."""
    plain = compute_s("all_reduce")
    saved = plain - compute_s("masked")
    assert 0 < saved < plain / 4
    for core, every in ((0.5, 4), (0.25, 2), (0.75, 8), (1.0, 2)):
        share = (1 - core) * (1 - 1 / every)
        found = plain - compute_s(f"masked:core={core},every={every}")
        assert found == pytest.approx(saved * share / 0.25, abs=plain * 1e-9)


def test_weak_replicas_on_slow_devices_hold_up_core_steps_alone() -> None:
    slow = device("slow", peak_flops_per_s={"float32": 1e13, "bfloat16": 2e13})
    mixed = hosts((3, 1, device()), (1, 1, slow), between=1e8)
    slows = hosts((4, 1, slow), between=1e8)
    full, held_up = compute_s("all_reduce"), compute_s("all_reduce", slows)
    assert held_up > 2 * full
    assert compute_s("masked", mixed) == pytest.approx(compute_s("masked", slows))
    core = 2 * compute_s("masked", slows) - held_up
    weak = compute_s("masked:weak_replicas=3", mixed)
    assert weak == pytest.approx((core + full) / 2)
    # A fast weak replica saves nothing.
    other = compute_s("masked:weak_replicas=0", mixed)
    assert other == pytest.approx(compute_s("masked", slows))


def test_memory_is_that_of_a_full_step() -> None:
    ours, _, memory = priced("masked", dp_replicate=4)
    plain, _, whole = priced("local_steps", dp_replicate=4)
    for name in ("parameters", "gradients", "optimizer", "activations"):
        found = getattr(ours.memory, name)
        assert found == pytest.approx(getattr(plain.memory, name)), name
    assert ours.memory.parameters == pytest.approx(WEIGHTS)
    assert memory == pytest.approx(whole)


def test_what_is_outside_of_the_core_is_counted_by_whole_neurons() -> None:
    graph = only_neurons(uniform_graph(2))
    assert count_outside(graph, lambda neurons: neurons) == 0
    assert count_outside(graph, lambda neurons: neurons - 3) == 4 * 3 * 512
