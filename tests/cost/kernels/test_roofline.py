"""Kernel times against the roofline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.constants import constants_of
from planner.cost.kernels.blocks import KernelTable
from planner.cost.kernels.roofline import kernel_times
from planner.cost.kernels.shapes import divide, unaligned_factors
from planner.cost.recipes import RECIPES, Recipe, get_recipe
from planner.errors import UnknownNameError
from planner.graph import Kernel
from planner.schema.cluster import DeviceType
from tests.cost.made import device

RECIPE = RECIPES["torch"]


def times(
    kernel: Kernel,
    kind: DeviceType | None = None,
    *,
    tokens: float = 1.0,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    sequence_parallel: int = 0,
    head: bool = False,
    recipe: Recipe = RECIPE,
    **options: Any,
) -> tuple[float, float, float, float]:
    """Forward, backward, weight and selective seconds of one kernel."""

    def one(value: float) -> np.ndarray:
        return np.array([float(value)])

    table = KernelTable.build([(0, kernel)], heads=[0] if head else [])
    part = divide(
        table, one(tokens), [one(tp), one(cp), one(ep)], one(sequence_parallel)
    )
    kind = kind or device()
    reach = options.pop("constants", None) or constants_of(kind, recipe)
    dtype = options.pop("dtype", "bfloat16")
    found = kernel_times(
        table, part, kind, recipe, reach, dtypes=(dtype, "bfloat16"), **options
    )
    parts = (found.forward, found.backward, found.weight, found.selective)
    return tuple(float(part[0, 0]) for part in parts)  # type: ignore[return-value]


def product(m: int = 4096, n: int = 4096, k: int = 4096, **changes: Any) -> Kernel:
    flops = 2.0 * m * n * k
    return Kernel(
        **{
            "kind": "matmul",
            "m": m,
            "n": n,
            "k": k,
            "forward_flops": flops,
            "backward_flops": 2 * flops,
            "forward_bytes": 2.0 * m * (n + k),
            "backward_bytes": 4.0 * m * (n + k),
            "weight_bytes": 2.0 * n * k,
            **changes,
        }
    )


def test_a_large_product_runs_at_the_peak() -> None:
    forward, backward, weight, selective = times(product())
    assert forward == pytest.approx(2 * 4096**3 / 1e14)
    assert backward == pytest.approx(2 * forward)
    assert weight == pytest.approx(backward / 2)
    assert selective == 0.0


def test_a_thin_product_runs_at_the_memory_bandwidth() -> None:
    forward, *_ = times(product(m=16))
    assert forward == pytest.approx((2 * 16 * 8192 + 2 * 4096**2) / 1e12)


def test_efficiency_and_half_speed_size() -> None:
    flops = 2.0 * 4096**3
    kind = device(matmul_efficiency=0.8, half_efficiency_flops=flops)
    # At the size of half efficiency, half of 80 % is reached.
    assert times(product(), kind)[0] == pytest.approx(flops / (0.4 * 1e14))


def test_every_op_pays_its_launch() -> None:
    kernel = Kernel(kind="memory", forward_bytes=1e6, backward_bytes=2e6, count=5)
    forward, backward, weight, selective = times(kernel, device(kernel_overhead_s=1e-5))
    assert forward == pytest.approx(5 * (1e-6 + 1e-5))
    assert backward == pytest.approx(5 * (2e-6 + 1e-5))
    assert weight == 0.0
    assert selective == forward


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("tp", [1, 4])
def test_every_microbatch_adds_its_gradients_to_the_sum(tokens: int, tp: int) -> None:
    recipe = replace(RECIPE, gradient_passes=3.0)
    kernel = product(style="colwise")
    forward, backward, weight, _ = times(kernel, tokens=tokens, tp=tp)
    summed = times(kernel, tokens=tokens, tp=tp, recipe=recipe)
    # Both are read and the sum is written, two bytes each, however many tokens.
    longer = 3 * kernel.weight_bytes / tp / 1e12
    assert summed[0] == forward
    assert summed[1] - backward == pytest.approx(longer)
    assert summed[2] - weight == pytest.approx(longer)


def test_what_is_not_trained_has_no_gradients_to_sum() -> None:
    recipe = replace(RECIPE, gradient_passes=3.0)
    frozen = product(trained=False)
    assert times(frozen, recipe=recipe) == times(frozen)


@pytest.mark.parametrize("style", ["colwise", "rowwise", "local"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tp_divides_the_work(style: Any, tp: int) -> None:
    whole = times(product(style=style))[0]
    assert times(product(style=style), tp=tp)[0] == pytest.approx(whole / tp)


def test_tp_leaves_alone_what_it_does_not_split() -> None:
    assert times(product(style="none"), tp=8) == times(product(style="none"))
    stream = Kernel(kind="memory", forward_bytes=1e9, style="stream")
    assert times(stream, tp=8)[0] == times(stream)[0]
    split = times(stream, tp=8, sequence_parallel=1)[0]
    assert split == pytest.approx(times(stream)[0] / 8)


def test_cp_and_the_microbatch_scale_tokens() -> None:
    whole = times(product())[0]
    assert times(product(), tokens=4, cp=2)[0] == pytest.approx(2 * whole)


def test_outputs_are_padded_to_whole_tiles_on_gpus_alone() -> None:
    odd, even = product(m=129), product(m=256)
    kind = device(memory_bandwidth_bytes_per_s=1e18)
    assert times(odd, kind)[0] == pytest.approx(times(even, kind)[0])
    on_cpu = device(memory_bandwidth_bytes_per_s=1e18, backend="gloo")
    assert times(odd, on_cpu)[0] == pytest.approx(times(even, on_cpu)[0] * 129 / 256)


def test_ep_divides_the_weights_that_are_read() -> None:
    thin, expert = product(m=1), product(m=1, expert=True)
    whole = times(thin)[0]
    assert times(expert)[0] == whole
    assert times(expert, ep=8)[0] < whole / 6
    assert times(thin, ep=8)[0] == whole


def test_bytes_follow_the_compute_dtype() -> None:
    thin = product(m=16)
    assert times(thin, element=0.5)[0] == pytest.approx(times(thin)[0] / 2)


def test_fused_attention_reaches_its_own_share_and_stays_out_of_float8() -> None:
    kernel = Kernel(
        kind="attention",
        batch=32,
        m=4096,
        n=4096,
        k=128,
        forward_flops=1e12,
        backward_flops=2e12,
        recompute_flops=5e11,
    )
    forward, backward, *_ = times(kernel)
    assert forward == pytest.approx(1e12 / (1e14 * RECIPE.attention_forward))
    assert backward == pytest.approx(2.5e12 / (1e14 * RECIPE.attention_backward))
    peaks = {"bfloat16": 1e14, "float8_e4m3fn": 2e14}
    kind = device(peak_flops_per_s=peaks)
    assert times(kernel, kind, dtype="float8")[0] == pytest.approx(forward)


def test_float8_halves_products_and_casts_their_operands() -> None:
    kind = device(peak_flops_per_s={"bfloat16": 1e14, "float8_e4m3fn": 2e14})
    forward, backward, *_ = times(product(), kind)
    found = times(product(), kind, dtype="float8")
    # The input forward and the output's gradient backward: two bytes of each scalar are
    # read, one is written, and one more of its transpose.
    cast = 4 * 4096 * 4096 / kind.memory_bandwidth_bytes_per_s
    assert found[0] == pytest.approx(forward / 2 / 0.85 + cast)
    assert found[1] == pytest.approx(backward / 2 / 0.85 + cast)


def test_heads_stay_out_of_float8() -> None:
    kind = device(peak_flops_per_s={"bfloat16": 1e14, "float8_e4m3fn": 2e14})
    assert times(product(), kind, head=True, dtype="float8") == times(product(), kind)


@pytest.mark.parametrize(
    ("changes", "tp", "old", "new"),
    [
        ({"n": 4097}, 1, 3.0, 5.0),
        ({"k": 4100}, 1, 1.5, 2.5),
        ({"k": 4102}, 1, 1.5, 2.5),
        ({"n": 4104}, 1, 1.0, 1.0),
        # A shard of 513 columns, or rows of the weight, begins anywhere.
        ({"n": 4104, "style": "colwise"}, 8, 3.0, 5.0),
        ({"n": 4104, "style": "rowwise"}, 8, 1.0, 1.0),
        ({"k": 4104, "style": "rowwise"}, 8, 3.0, 5.0),
    ],
)
def test_rows_that_begin_anywhere_take_slower_kernels(
    changes: dict[str, Any], tp: int, old: float, new: float
) -> None:
    table = KernelTable.build([(0, product(**changes))])
    one = np.ones(1)
    part = divide(table, one, [tp * one, one, one], one)
    assert unaligned_factors(table, part, scores=True) == old
    assert unaligned_factors(table, part, scores=True, newer=True) == new


def test_libraries_written_for_ampere_leave_newer_devices_idle() -> None:
    old = replace(RECIPE, newer_products=0.8)
    newer = device(peak_flops_per_s={"bfloat16": 1e14, "float8_e4m3fn": 2e14})
    assert times(product(), recipe=old) == times(product())
    found, usual = times(product(), newer, recipe=old), times(product(), newer)
    assert found[0] == pytest.approx(usual[0] / 0.8)


@settings(deadline=None, max_examples=60)
@given(
    m=st.integers(1, 4096),
    tokens=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    style=st.sampled_from(["colwise", "rowwise", "local", "stream", "none"]),
    tp=st.sampled_from([1, 2, 4]),
)
def test_more_tokens_never_take_less_time(
    m: int, tokens: tuple[int, int], style: Any, tp: int
) -> None:
    kernel = product(m=m, n=512, k=256, style=style)
    few, many = (times(kernel, tokens=t, tp=tp)[0] for t in sorted(tokens))
    assert few <= many * (1 + 1e-12)


def test_an_unknown_recipe_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'torch'"):
        get_recipe("troch")


def test_the_gradient_of_a_bias_is_a_pass_of_its_own_in_eager_torch() -> None:
    biased = product(weight_bytes=2.0 * (4096 * 4096 + 4096))
    kind = device()
    read = 2 * 4096 * 4096 / kind.memory_bandwidth_bytes_per_s
    plain, summed = times(product(), kind), times(biased, kind)
    assert summed[0] == pytest.approx(plain[0])
    assert summed[1] - plain[1] == pytest.approx(read, rel=1e-3)
    assert summed[2] - plain[2] == pytest.approx(read, rel=1e-3)
    fused = replace(RECIPE, fusion="kernels")
    assert times(biased, kind, recipe=fused)[1] == pytest.approx(plain[1])
