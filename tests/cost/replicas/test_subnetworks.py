"""Neurons dealt out every few steps, against closed forms."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from torch import nn

from planner.capture import capture
from planner.cost import Cost, PricingContext
from planner.cost.recipes import RECIPES
from planner.graph.neurons import only_chains, only_neurons
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
WEIGHTS = 4.0 * 16 * 512**2
FULL = Precision(compute="float32")


def context_of(pin: str, cluster: Any = CLUSTER, **changes: Any) -> PricingContext:
    regime = Regime.from_pins({"synchronisation": pin})
    graph = uniform_graph(8, **changes)
    if regime.synchronisation.splits:
        graph = only_neurons(graph)
    return setting_for(graph, cluster, regime=regime, precision=FULL)


def priced(
    pin: str, cluster: Any = CLUSTER, **degrees: int
) -> tuple[Cost, dict[str, float], float]:
    """See :func:`price_both_ways`."""
    return price_both_ways(context_of(pin, cluster), **degrees)


@pytest.mark.parametrize("copies", [2, 4])
@pytest.mark.parametrize("steps", [1, 80])
def test_a_mean_step_pays_its_share_of_an_exchange(copies: int, steps: int) -> None:
    """An all-to-all of W/n, of which each copy keeps an nth; nothing is averaged."""
    cost, parts, _ = priced(f"subnetworks:local_steps={steps}", dp_replicate=copies)
    part = WEIGHTS / copies
    sent = part * (copies - 1) / copies / steps
    assert cost.breakdown_s["data_parallel"] == pytest.approx(sent / 1e8, rel=1e-6)
    assert parts["data_parallel"] == pytest.approx(sent / 1e8, rel=1e-6)
    assert cost.collective_bytes == {"all_to_all": pytest.approx(part / steps)}
    assert cost.link_bytes == {"dp": pytest.approx(sent)}


def test_it_sends_a_480th_of_an_all_reduce() -> None:
    ours, *_ = priced("ist", dp_replicate=4)
    theirs, *_ = priced("all_reduce", dp_replicate=4)
    ratio = ours.link_bytes["dp"] / theirs.link_bytes["dp"]
    # On the wire: (n - 1)/n W/n / J of 2 (n - 1)/n W.
    assert ratio == pytest.approx(1 / (2 * 4 * 80))
    payload = ours.collective_bytes["all_to_all"]
    assert payload / theirs.link_bytes["dp"] == pytest.approx(1 / 480)


@pytest.mark.parametrize("copies", [2, 4])
def test_compute_and_memory_are_those_of_tp_without_its_collectives(
    copies: int,
) -> None:
    ours, parts, memory = priced("subnetworks", dp_replicate=copies)
    tensor, theirs, _ = priced("all_reduce", tp=copies)
    assert tensor.breakdown_s["tensor"] > 0 == ours.breakdown_s["tensor"]
    # As much of a batch: a copy has its own samples.
    compute = ours.breakdown_s["compute"]
    assert compute == pytest.approx(tensor.breakdown_s["compute"], rel=1e-9)
    assert parts["compute"] == pytest.approx(theirs["compute"], rel=1e-6)
    for name in ("parameters", "optimizer"):
        found = getattr(ours.memory, name)
        assert found == pytest.approx(getattr(tensor.memory, name)), name
    assert ours.memory.parameters == pytest.approx(WEIGHTS / copies)
    # Those of the other are no more when activations are most.
    assert ours.memory.gradients == pytest.approx(WEIGHTS / copies)
    plain, _, whole = priced("local_steps", dp_replicate=copies)
    assert memory < whole
    assert compute < plain.breakdown_s["compute"]


def test_what_has_no_neurons_stays_whole() -> None:
    """Units without a rowwise layer, and attention of models without a config."""
    graph = uniform_graph(2, heads=8, kv_heads=8)
    whole = only_neurons(graph)
    assert {p.style for p in whole.parameters} == {"none"}
    assert {k.style for b in whole.blocks for k in b.kernels} == {"none"}
    assert whole.sharding == {}
    narrow = only_neurons(uniform_graph(2))
    assert [p.style for p in narrow.parameters] == ["colwise", "rowwise"] * 2
    assert narrow.sharding == graph.sharding
    assert {block.tp_collectives for block in narrow.blocks} == {0}


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_layers_cut_both_ways_are_an_nth_of_an_nth(copies: int) -> None:
    """Compute, weights and traffic of a perceptron of three hidden layers."""
    sizes, batch = (64, 512, 256, 512, 32), 16
    graph = capture(
        lambda: nn.Sequential(
            *(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))
        ),
        {"input": ((batch, sizes[0]), "float32")},
        dtype="float32",
        name="deep",
    )
    regime = Regime.from_pins({"synchronisation": "gist:local_steps=10"})
    # Products alone take time.
    fast = device(memory_bandwidth_bytes_per_s=1e30)
    context = setting_for(
        only_chains(graph) if copies > 1 else graph,
        hosts((4, 1, fast), between=1e8),
        regime=regime,
        precision=FULL,
    )
    cost, parts, memory = price_both_ways(
        context, dp_replicate=copies, microbatch_size=batch
    )
    first, *inner, last = (a * b for a, b in pairwise(sizes))
    one_way, both = (first + last) / copies, sum(inner) / copies**2
    # Backward makes no gradient of the model's input.
    flops = 2 * batch * (3 * (one_way + both) - first / copies)
    assert cost.breakdown_s["compute"] == pytest.approx(flops / 5e13, rel=1e-6)
    assert parts["compute"] == pytest.approx(flops / 5e13, rel=1e-6)
    assert cost.memory.parameters == pytest.approx(4 * (one_way + both))
    assert memory == pytest.approx(cost.memory.total, rel=0.01)
    moved = 4 * (one_way + 2 * both) / 10
    if copies == 1:
        assert cost.collective_bytes == {}
        return
    assert cost.collective_bytes == {"all_to_all": pytest.approx(moved)}
    sent = moved * (copies - 1) / copies
    assert cost.link_bytes == {"dp": pytest.approx(sent)}
    assert cost.breakdown_s["data_parallel"] == pytest.approx(sent / 1e8, rel=1e-6)
    # An nth of each inner layer is kept.
    exact, *_ = price_both_ways(
        setting_for(only_chains(graph), hosts((4, 1, fast)), precision=FULL), tp=copies
    )
    kept = cost.memory.gradients - exact.memory.gradients
    assert kept == pytest.approx(4 * both * copies)


def test_parts_of_a_copy_pay_no_dispatch_of_sharded_tensors() -> None:
    """On the CPU tp's tensors take the host longer; a copy's are plain ones."""
    cluster = hosts((4, 1, device(backend="gloo")), between=1e8)
    ours, parts, _ = priced("subnetworks", cluster, dp_replicate=4)
    tensor, *_ = priced("all_reduce", cluster, tp=4)
    overhead = RECIPES["torch"].sharded_op_overhead_s
    # Two products a layer, forward and backward.
    slower = 8 * 2 * 2 * overhead
    gap = tensor.breakdown_s["compute"] - ours.breakdown_s["compute"]
    assert gap == pytest.approx(slower)
    assert parts["compute"] == pytest.approx(ours.breakdown_s["compute"], rel=1e-6)
