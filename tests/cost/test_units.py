"""Cost of a unit under tp, cp, ep, profiles and recomputation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cost import PricingContext
from planner.cost.context import Combinations
from planner.cost.recipes import RECIPES
from planner.cost.traffic.layers import context_algorithms
from planner.cost.units import UnitCosts, price_units
from planner.graph import Kernel, ModelGraph
from planner.schema import Precision
from tests.cost.made import HIDDEN, TOKENS, device, hosts, setting_for, uniform_graph

STREAM = 2.0 * TOKENS * HIDDEN
CLUSTER = hosts((2, 8, device()))


def priced(
    graph: ModelGraph, setting: PricingContext | None = None, **axes: int
) -> UnitCosts:
    names = ("tp", "cp", "ep", "microbatch")
    columns = {name: np.array([axes.get(name, 1)]) for name in names}
    parallel = np.array([axes.get("sequence_parallel", 0)])
    setting = setting or setting_for(graph, CLUSTER)
    combos = Combinations(**columns, sequence_parallel=parallel)
    return price_units(setting, combos, setting.layer_lines(combos))


def with_blocks(graph: ModelGraph, **changes: Any) -> ModelGraph:
    return replace(graph, blocks=tuple(replace(b, **changes) for b in graph.blocks))


def test_tp_reduces_once_a_forward_and_splits_parameters() -> None:
    one, two = (priced(uniform_graph(4), tp=tp) for tp in (1, 2))
    assert (one.tp_s == 0).all()
    assert two.tp_s[0] == pytest.approx([2 * 1 / 2 * STREAM / 1e11] * 4)
    assert two.tp_bytes[0] == pytest.approx([4 * STREAM / 2] * 4)
    assert two.dense_parameters == pytest.approx(one.dense_parameters / 2)
    assert two.forward_s.sum() < one.forward_s.sum()


def test_sequence_parallelism_moves_the_same_bytes_and_keeps_less() -> None:
    graph = uniform_graph(4)
    plain, split = (priced(graph, tp=4, sequence_parallel=s) for s in (0, 1))
    # The first scatters the stream, whose gradient is gathered; the last gathers it.
    ends = 3 / 4 * STREAM * np.array([1, 0, 0, 1])
    assert split.tp_s[0] == pytest.approx(plain.tp_s[0] + ends / 1e11 / 2)
    assert split.tp_bytes[0] == pytest.approx(plain.tp_bytes[0] + ends)
    # 4 of 6 streams are divided by tp, the other 2 by sequence parallelism alone.
    assert plain.saved_bytes[0, 0, 0] == pytest.approx((4 / 4 + 2) * STREAM)
    assert split.saved_bytes[0, 0, 0] == pytest.approx(6 / 4 * STREAM)
    assert split.saved_bytes[2, 0, 0] == pytest.approx(STREAM / 4)


def test_what_colwise_layers_read_is_whole_on_every_rank() -> None:
    graph = with_blocks(uniform_graph(4), saved_gathered_bytes=STREAM)
    plain, split = (priced(graph, tp=4, sequence_parallel=s) for s in (0, 1))
    assert plain.saved_bytes[0, 0, 0] == pytest.approx((4 / 4 + 2) * STREAM)
    assert split.saved_bytes[0, 0, 0] == pytest.approx((5 / 4 + 1) * STREAM)
    # What rowwise products make of it, too, before it is scattered.
    graph = with_blocks(
        uniform_graph(4), saved_bytes=9 * STREAM, saved_selective_bytes=4 * STREAM
    )
    split = priced(graph, tp=4, sequence_parallel=1)
    assert split.saved_bytes[1, 0, 0] == pytest.approx((2 / 4 + 1 / 4 + 1) * STREAM)


def test_the_divided_stream_crosses_cuts_in_shards() -> None:
    layers = uniform_graph(4)
    kinds = ("embedding", "mlp", "mlp", "head")
    ends: dict[str, Any] = {"kernels": (), "tp_collectives": 0}
    ends |= {"tp_collective_bytes": 0.0}
    graph = replace(
        layers,
        blocks=tuple(
            replace(b, kind=kind, repeat=kind, **({} if kind == "mlp" else ends))  # type: ignore[arg-type]
            for b, kind in zip(layers.blocks, kinds, strict=True)
        ),
    )
    plain, split = (priced(graph, tp=4, sequence_parallel=s) for s in (0, 1))
    assert plain.cut_bytes[0] == pytest.approx([STREAM] * 3)
    assert plain.shared_bytes == pytest.approx(plain.cut_bytes)
    assert split.cut_bytes[0] == pytest.approx([STREAM, STREAM / 4, STREAM])
    # The first layer keeps a shard of its own of what comes whole.
    assert split.shared_bytes[0] == pytest.approx([0.0, STREAM / 4, STREAM])


def test_recomputation_repeats_what_something_saved_depends_on() -> None:
    graph = with_blocks(
        uniform_graph(2),
        tp_collectives=2,
        tp_collective_bytes=2 * STREAM,
        tp_again_bytes=STREAM,
    )
    plain, split = (priced(graph, tp=2, sequence_parallel=s) for s in (0, 1))
    one = 1 / 2 * STREAM / 1e11
    assert plain.tp_again_s[0] == pytest.approx([2 * one] * 2)
    # Both regions are entered, one is left.
    assert split.tp_again_s[0] == pytest.approx([3 * one] * 2)
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    again = dict(zip(kinds, split.tp_payload[:, 1, 0, 0] / STREAM, strict=True))
    assert again == {"all_reduce": 0, "all_gather": 2, "reduce_scatter": 1}
    assert plain.tp_payload[:, 1, 0, 0] / STREAM == pytest.approx([1, 0, 0])


def test_an_embedding_is_summed_in_forward_and_a_head_in_backward() -> None:
    graph = uniform_graph(3)
    first, layer, last = graph.blocks
    product = replace(layer.kernels[0], n=3 * HIDDEN, forward_bytes=4 * STREAM)
    ends = {"tp_collectives": 0, "tp_collective_bytes": 0.0, "kernels": (product,)}
    rows = replace(first, kind="embedding", repeat="rows")
    head = replace(last, kind="head", repeat="head", **ends)
    graph = replace(graph, blocks=(rows, layer, head))
    payload = priced(graph, tp=2).tp_payload[:, 0, 0] / STREAM
    # Rows of kinds; of the head's bytes a quarter is input, the rest are logits.
    assert payload.tolist() == [[1, 2, 1], [0, 0, 3], [0, 0, 0]]
    payload = priced(graph, tp=2, sequence_parallel=1).tp_payload[:, 0, 0] / STREAM
    assert payload.tolist() == [[1, 0, 1], [0, 4, 3], [0, 2, 0]]


def test_recomputation_has_the_whole_unit_back_at_once() -> None:
    # Two blocks a unit: what both would have kept is there during its backward.
    graph = uniform_graph(4)
    paired = replace(
        graph,
        blocks=tuple(
            replace(
                b,
                layer=f"pair.{b.index // 2}",
                boundary_bytes=STREAM * (1 - b.index % 2),
            )
            for b in graph.blocks
        ),
    )
    costs = priced(paired)
    assert costs.saved_bytes[:, 0, 0] == pytest.approx(
        [12 * STREAM, 6 * STREAM, STREAM]
    )
    working = STREAM / 2
    # Its input is kept.
    extra = [working, working + 6 * STREAM, working + 11 * STREAM]
    assert costs.transient_bytes[:, 0, 0] == pytest.approx(extra)


def test_context_parallelism_passes_all_keys_and_values_round_the_ring() -> None:
    keys = 1e9
    graph = with_blocks(uniform_graph(2), sequence_bytes=keys)
    costs = priced(graph, cp=4)
    # Three hops of a quarter, forward and backward, and as many of gradients. No
    # attention kernel here to hide under.
    quarters = 3 * 3
    assert costs.cp_s[0] == pytest.approx([quarters * keys / 4 / 1e11] * 2)
    assert costs.cp_bytes[0] == pytest.approx([quarters * keys / 4] * 2)
    assert priced(graph, cp=4, tp=2).cp_s[0] == pytest.approx(costs.cp_s[0] / 2)
    assert (priced(graph).cp_s == 0).all()


def attending(heads: int, shared: int, size: int = 64) -> ModelGraph:
    """Units of one attention kernel, ``shared`` heads of keys and values."""
    kernel = Kernel(
        kind="attention", batch=heads, m=TOKENS, n=TOKENS, k=size, style="local"
    )
    keys = 2 * 2.0 * TOKENS * shared * size
    return with_blocks(uniform_graph(2), kernels=(kernel,), sequence_bytes=keys)


@pytest.mark.parametrize(
    ("shared", "cp", "tp", "each"),
    [
        (8, 4, 1, 8),  # as many keys as queries
        (4, 4, 1, 4),  # one head of keys a rank
        (2, 4, 1, 8),  # fewer than ranks: repeated for every query
        (4, 2, 2, 4),  # tp has divided the heads before
    ],
)
def test_a_sequence_traded_for_heads_goes_there_and_back(
    shared: int, cp: int, tp: int, each: int
) -> None:
    names = {"tp": tp, "cp": cp, "ep": 1, "microbatch": 1, "sequence_parallel": 0}
    setting = setting_for(attending(8, shared), CLUSTER)
    combos = Combinations(**{name: np.array([value]) for name, value in names.items()})
    costs = price_units(
        setting,
        combos,
        setting.layer_lines(combos),
        context_algorithm="all_to_all",
    )
    # Queries and outputs of 8 heads, keys and values of some, in bfloat16.
    once = 2.0 * TOKENS * 64 * (2 * 8 + 2 * each) / cp / tp
    assert costs.cp_payload[0] == pytest.approx([once] * 2)
    away = (cp - 1) / cp
    assert costs.cp_s[0] == pytest.approx([2 * once * away / 1e11] * 2)
    assert costs.cp_bytes[0] == pytest.approx([2 * once * away] * 2)
    assert costs.cp_forward == 0.5


def test_heads_must_be_enough_to_trade() -> None:
    graph = attending(8, 8)
    assert context_algorithms(graph, cp=1, tp=1) == ("ring",)
    assert context_algorithms(graph, cp=4, tp=2) == ("ring", "all_to_all")
    assert context_algorithms(graph, cp=4, tp=4) == ("ring",)
    assert context_algorithms(uniform_graph(2), cp=2, tp=1) == ("ring",)


def test_context_parallelism_divides_work_and_activations() -> None:
    one, four = (priced(uniform_graph(2), cp=cp) for cp in (1, 4))
    assert four.saved_bytes == pytest.approx(one.saved_bytes / 4)
    assert four.cut_bytes == pytest.approx(one.cut_bytes / 4)
    assert four.dense_parameters == pytest.approx(one.dense_parameters)


def test_expert_parallelism_sends_tokens_twice_a_forward() -> None:
    graph = uniform_graph(2)
    experts = replace(
        with_blocks(graph, expert_bytes=1e9, expert_parameter_count=HIDDEN * HIDDEN),
        parameters=tuple(replace(p, expert=".up." in p.name) for p in graph.parameters),
        num_experts=8,
    )
    costs = priced(experts, ep=4)
    assert costs.ep_s[0] == pytest.approx([2 * 1e9 * 3 / 4 / 1e11] * 2)
    assert costs.ep_bytes[0] == pytest.approx([4 * 1e9 * 3 / 4] * 2)
    assert costs.expert_parameters[0] == pytest.approx([HIDDEN**2 / 4] * 2)
    assert costs.dense_parameters[0] == pytest.approx([HIDDEN**2] * 2)
    assert (priced(experts).ep_s == 0).all()


def test_a_profile_of_times_counts_on_any_device() -> None:
    graph = with_blocks(
        uniform_graph(3, seq_len=None),
        kernels=(),
        forward_flops=0.0,
        backward_flops=0.0,
        measured_forward_s=0.25,
        measured_backward_s=0.5,
        tp_collectives=0,
    )
    cluster = hosts((1, 2, device()), (1, 2, device("slow", memory_bytes=1e9)))
    costs = priced(graph, setting_for(graph, cluster), microbatch=4)
    assert costs.forward_s.shape == (2, 1, 3)
    assert (costs.forward_s == 1.0).all()
    assert (costs.backward_s == 2.0).all()
    assert (costs.weight_s == 1.0).all()
    assert (costs.full_s == 1.0).all()


def test_groups_that_share_hosts_drive_a_part_of_the_interfaces() -> None:
    graph = uniform_graph(2)
    whole = setting_for(graph, CLUSTER)
    part = setting_for(
        graph, CLUSTER, recipe=replace(RECIPES["torch"], partial_rails=0.5)
    )
    degree = np.array([16, 8, 2, 8])
    stride = np.array([1, 2, 8, 1])
    ours, theirs = (one.groups(degree, stride) for one in (part, whole))
    used = np.isfinite(theirs.bandwidth)
    share = np.divide(ours.bandwidth, theirs.bandwidth, where=used, out=used * 1.0)
    share[~used] = 1.0
    # All of a host; half of it; one member a host; inside a host.
    assert share[ours.which].min(axis=1) == pytest.approx([1.0, 0.5, 1.0, 1.0])
    # Links inside a host are nobody else's.
    assert share[ours.which][1] == pytest.approx([1.0, 0.5])


def test_times_of_a_profile_do_not_replace_known_flops() -> None:
    plain = uniform_graph(2)
    both = with_blocks(plain, measured_forward_s=9.0, measured_backward_s=9.0)
    assert priced(both).forward_s == pytest.approx(priced(plain).forward_s)


@pytest.mark.parametrize(("compute", "ratio"), [("float32", 2.0), ("float8", 1.0)])
def test_activations_have_the_size_of_the_compute_dtype(
    compute: Any, ratio: float
) -> None:
    graph = uniform_graph(2)
    setting = setting_for(graph, CLUSTER, precision=Precision(compute=compute))
    assert setting.element_ratio == ratio
    costs = priced(graph, setting, tp=2)
    plain = priced(graph, tp=2)
    for name in ("saved_bytes", "cut_bytes", "tp_bytes", "transient_bytes"):
        assert getattr(costs, name) == pytest.approx(getattr(plain, name) * ratio)


def test_the_traced_batch_is_scaled_to_the_microbatch() -> None:
    graph = uniform_graph(2)
    traced_at_two = replace(graph, batch=2)
    assert priced(traced_at_two, microbatch=2).forward_s == pytest.approx(
        priced(graph).forward_s
    )
    assert priced(traced_at_two).saved_bytes == pytest.approx(
        priced(graph).saved_bytes / 2
    )
