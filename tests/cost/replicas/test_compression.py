"""Smaller gradients against what the hooks of torch send."""

from __future__ import annotations

import pytest

from planner.cost import CostModel
from planner.cost.replicas.codecs import size_up
from planner.schema import GradientCompression, Precision, Strategy
from planner.space import build_strategy
from tests.cost.made import device, hosts, row, setting_for, uniform_graph

FULL = Precision(compute="float32")


@pytest.mark.parametrize(
    ("how", "size"), [("none", 4), ("bfloat16", 2), ("float16", 2)]
)
def test_casts_send_two_bytes(how: GradientCompression, size: int) -> None:
    found = size_up(((7,), (50, 50)), how)
    assert found.reduced_bytes == size * (7 + 2500)
    assert found.hidden_share == 1
    assert (found.moved_bytes > 0) == (how != "none")
    assert found.kept_bytes == 0


def test_power_sgd_sends_factors_where_they_are_half_as_small() -> None:
    # (100 + 200) x 4 is well below 20,000 / 2; a convolution counts as 64 x 72. A
    # 16 x 16 matrix has factors of 128 scalars, exactly half, and is sent whole, as is
    # a vector: rank 1 would need as many and one.
    shapes = (100, 200), (64, 8, 3, 3), (16, 16), (500,)
    found = size_up(shapes, "powersgd")
    factors = 4 * (100 + 200) + 4 * (64 + 72)
    assert found.reduced_bytes == 4 * (factors + 256 + 500)
    assert found.calls == 2  # one bucket: first factors, then second ones
    # Errors of the two matrices, and the message.
    assert found.kept_bytes == 4 * (20_000 + 4_608) + found.reduced_bytes
    assert found.hidden_share == 0.5


def plain(how: GradientCompression) -> tuple[CostModel, Strategy]:
    graph = uniform_graph(8)
    cluster = hosts((4, 1, device()), between=1e8)
    strategy = build_strategy(
        row(dp_replicate=4),
        unit_names=graph.unit_names,
        bounds=[0, 8],
        sharding={},
        precision=FULL,
    )
    model = CostModel(setting_for(graph, cluster, precision=FULL))
    semantics = "exact" if how == "none" else "approximate"
    changes = {"gradient_compression": how, "semantics": semantics}
    return model, strategy.model_copy(update=changes)


def test_slow_networks_are_where_compression_pays() -> None:
    costs = {}
    for how in ("none", "bfloat16", "powersgd"):
        model, strategy = plain(how)  # type: ignore[arg-type]
        costs[how] = model.cost(strategy)
    exposed = {how: cost.breakdown_s["data_parallel"] for how, cost in costs.items()}
    scalars = 16 * 512**2
    for how, size in (("none", 4.0 * scalars), ("bfloat16", 2.0 * scalars)):
        assert costs[how].collective_bytes["all_reduce"] == size
        assert costs[how].link_bytes["dp"] == pytest.approx(1.5 * size)
        # 2 (n - 1) / n of the payload at 0.1 GB/s, less what the backward hides.
        assert exposed[how] == pytest.approx(1.5 * size / 1e8, rel=0.02)
    factors = 16 * 2 * 512 * 4
    assert costs["powersgd"].collective_bytes["all_reduce"] == 4 * factors
    assert exposed["powersgd"] < exposed["bfloat16"] / 10
    # The error of one step is kept for the next.
    more = costs["powersgd"].memory.gradients - costs["none"].memory.gradients
    assert more == pytest.approx([4 * (scalars + factors)])
