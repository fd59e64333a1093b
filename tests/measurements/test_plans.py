"""Plans of rows: what they say is kept, what they leave out is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import CalibrationError
from planner.graph import ModelGraph
from planner.measurements.catalogues import frameworks
from planner.measurements.model_configs import graph_of
from planner.measurements.model_shapes import shape_of
from planner.measurements.plans import (
    AssumedPlan,
    assume_plan,
    batches,
    expert_degree,
    replicated_and_sharded,
)
from planner.measurements.points import Point
from planner.measurements.store import calibrated_recipe, shipped
from tests.measurements.rows import small

LAYERS = 12


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    return graph_of(shape_of(small(layers=LAYERS, hidden=128, heads=2, seq=64)))


def _plan(graph: ModelGraph, framework: str = "megatron", **row: object) -> AssumedPlan:
    return assume_plan(_row(**row), graph, frameworks()[framework])


def _row(**changes: object) -> Point:
    return small(**{"n_gpus": 16, "dp": None, "global_batch": 64, **changes})


def _said(plan: AssumedPlan, *words: str) -> bool:
    return any(all(word in text for word in words) for text in plan.why)


def test_degrees_and_batches_follow(graph: ModelGraph) -> None:
    plan = _plan(graph, tp=2, pp=4, microbatch=2, zero=1, recompute="full")
    mesh = plan.strategy.mesh
    assert (mesh.pp, mesh.tp, mesh.cp, mesh.ep) == (4, 2, 1, 1)
    assert (mesh.dp_replicate, mesh.dp_shard) == (1, 2)
    assert plan.strategy.num_microbatches == 64 // (2 * 2)
    assert plan.strategy.global_batch == 64
    assert {stage.recompute for stage in plan.strategy.stages} == {"full"}


def test_without_zero_replicas_are_whole(graph: ModelGraph) -> None:
    mesh = _plan(graph, zero=0).strategy.mesh
    assert (mesh.dp_replicate, mesh.dp_shard) == (16, 1)


def test_degrees_that_do_not_divide_the_devices(graph: ModelGraph) -> None:
    with pytest.raises(CalibrationError, match="tp=3 x pp=1 x cp=1") as caught:
        _plan(graph, tp=3)
    assert "n_gpus=16" in str(caught.value)


def test_what_is_left_out_is_said(graph: ModelGraph) -> None:
    plan = _plan(
        graph, tp=None, pp=None, microbatch=None, global_batch=None, recompute=""
    )
    assert _said(plan, "tp=1")
    assert _said(plan, "pp=1")
    assert _said(plan, "microbatch")
    assert _said(plan, "global batch not given")
    assert _said(plan, f"ZeRO {frameworks()['megatron'].zero_stage}")
    assert _said(plan, "recompute")


def test_a_batch_that_does_not_divide_is_rounded(graph: ModelGraph) -> None:
    plan = _plan(graph, microbatch=1, global_batch=40)
    assert plan.strategy.num_microbatches == 2


def test_fewer_samples_than_replicas_share_their_tokens(graph: ModelGraph) -> None:
    row = {"tp": 2, "pp": 1, "cp": None, "microbatch": None}
    plan = _plan(graph, global_batch=4, **row)
    assert (plan.strategy.mesh.cp, plan.strategy.global_batch) == (2, 4)
    assert _said(plan, "cp=2")
    # Where cp or dp is given, or samples suffice, it is as the row says.
    for others in ({"cp": 1}, {"dp": 8}, {"global_batch": 8}, {"global_batch": 3}):
        plan = _plan(graph, **{**row, "global_batch": 4, **others})
        assert plan.strategy.mesh.cp == 1


def test_a_batch_below_one_microbatch_each(graph: ModelGraph) -> None:
    plan = _plan(graph, microbatch=8, global_batch=64)
    assert plan.strategy.num_microbatches == 1


@pytest.mark.parametrize("total", [16, 48, 64, 80, 112])
def test_a_guessed_microbatch_divides_the_batch(graph: ModelGraph, total: int) -> None:
    strategy = _plan(graph, microbatch=None, global_batch=total).strategy
    assert strategy.global_batch == total


def test_ep_that_does_not_fit_is_lowered(graph: ModelGraph) -> None:
    assert _plan(graph, ep=8).strategy.mesh.ep == 8
    plan = _plan(graph, ep=64)
    assert plan.strategy.mesh.ep == 16
    assert _said(plan, "ep=64 priced as 16")


@pytest.mark.parametrize(
    ("words", "vp", "batch", "schedule", "virtual"),
    [
        ("gpipe", None, 64, "GPipe", 1),
        ("1f1b", None, 64, "1F1B", 1),
        ("", None, 64, "1F1B", 1),
        # 3 microbatches never fill 4 stages.
        ("1f1b", None, 12, "Interleaved1F1B", 1),
        ("1f1b", 3, 64, "Interleaved1F1B", 3),
        ("interleaved vp=3", None, 64, "Interleaved1F1B", 3),
        ("interleaved", None, 64, "Interleaved1F1B", 3),
        # 6 microbatches are no whole rounds of 4 stages.
        ("interleaved", 2, 24, "1F1B", 1),
        ("zero bubble", None, 64, "InterleavedZeroBubble", 1),
        ("zero bubble", 2, 64, "InterleavedZeroBubble", 2),
        ("ZB-V", None, 64, "ZBVZeroBubble", 2),
        ("DualPipe", None, 64, "DualPipeV", 2),
    ],
)
def test_schedules(
    graph: ModelGraph,
    words: str,
    vp: int | None,
    batch: int,
    schedule: str,
    virtual: int,
) -> None:
    row = {"pp": 4, "vp": vp, "schedule": words, "microbatch": 1}
    strategy = _plan(graph, **row, global_batch=batch).strategy
    assert (strategy.schedule, strategy.virtual_stages) == (schedule, virtual)
    assert len(strategy.stages) == 4 * virtual


def test_interleaving_that_is_not_given_deals_out_layers_evenly() -> None:
    for layers, virtual in ((9, 3), (6, 2), (7, 2), (3, 1)):
        made = graph_of(shape_of(small(layers=layers, hidden=128, heads=2, seq=64)))
        row = {"pp": 3, "n_gpus": 12, "global_batch": 72, "microbatch": 1}
        found = _plan(made, schedule="interleaved", **row).strategy
        assert found.virtual_stages == virtual, layers


@pytest.mark.parametrize(
    ("tp", "notes", "framework", "split"),
    [
        (2, "", "megatron", True),
        (1, "", "megatron", False),
        (2, "no sequence parallelism", "megatron", False),
        (2, "", "alpa", False),
        (2, "with sequence parallelism", "alpa", True),
    ],
)
def test_sequence_parallelism(
    graph: ModelGraph, tp: int, notes: str, framework: str, split: bool
) -> None:
    plan = _plan(graph, framework, tp=tp, notes=notes)
    assert plan.strategy.sharding.sequence_parallel == split


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("no", "none"),
        ("False", "none"),
        ("none", "none"),
        ("selective", "selective"),
        ("Full", "full"),
        ("minimal", "selective"),
        ("yes", "full"),
    ],
)
def test_recomputation(graph: ModelGraph, words: str, kind: str) -> None:
    plan = _plan(graph, recompute=words)
    assert {stage.recompute for stage in plan.strategy.stages} == {kind}
    assert _said(plan, "taken as full") == (words == "yes")


@pytest.mark.parametrize(
    ("words", "compute"),
    [
        ("bf16", "bfloat16"),
        ("", "bfloat16"),
        ("fp16", "float16"),
        ("compile fp8", "float8"),
        ("MXFP8", "float8"),
        ("fp32", "float32"),
        ("TF32", "float32"),
    ],
)
def test_precisions(graph: ModelGraph, words: str, compute: str) -> None:
    plan = _plan(graph, precision=words)
    assert plan.precision.compute == compute
    rounded = {"TF32": "tensorfloat32", "MXFP8": "mxfp8"}
    assert plan.product_dtype == rounded.get(words)


@pytest.mark.parametrize(
    "row",
    [
        {"schedule": "hanayo", "pp": 2},
        {"schedule": "chimera"},
        {"recompute": "save_qkv"},
        {"precision": "int8"},
    ],
)
def test_words_that_are_not_known_are_refused(
    graph: ModelGraph, row: dict[str, object]
) -> None:
    column = next(iter(row))
    with pytest.raises(CalibrationError, match=f"{column}='{row[column]}' is not"):
        _plan(graph, **row)


@pytest.mark.parametrize(
    ("framework", "half", "bfloat16"),
    [("megatron-2021", 3, 5), ("megatron-deepspeed", 3, 9), ("megatron", 0, 0)],
)
def test_sums_of_gradients_follow_framework_and_precision(
    graph: ModelGraph, framework: str, half: int, bfloat16: int
) -> None:
    found = [
        _plan(graph, framework, precision=one).recipe.gradient_passes
        for one in ("fp16", "bf16", "fp16/bf16")
    ]
    assert found == [half, bfloat16, half]


def test_deepspeed_keeps_gradients_in_bfloat16_beside_their_sum(
    graph: ModelGraph,
) -> None:
    def gradients(framework: str, precision: str) -> str:
        return _plan(graph, framework, precision=precision).recipe.gradients

    assert gradients("megatron-deepspeed", "bf16") == "both"
    assert gradients("megatron-deepspeed", "fp16") == "kept"
    assert gradients("megatron-deepspeed", "fp16/bf16") == "kept"
    assert gradients("megatron-2021", "bf16") == "kept"


def test_eager_runs_fuse_nothing(graph: ModelGraph) -> None:
    framework = frameworks()["torchtitan"]
    plan = assume_plan(_row(precision="eager bf16"), graph, framework)
    assert plan.recipe.fusion == "none"
    assert assume_plan(_row(), graph, framework).recipe.fusion == "compiled"


def test_old_torch_has_the_attention_of_ampere(graph: ModelGraph) -> None:
    for name in ("torch", "torchtitan"):
        ampere = {
            year: _plan(graph, name, source=f"a page, {year}").recipe.ampere_attention
            for year in (2024, 2025, 2026)
        }
        assert ampere == {2024: True, 2025: True, 2026: False}
        assert not frameworks()[name].recipe.ampere_attention


def test_runs_that_say_torch_compile_fuse(graph: ModelGraph) -> None:
    framework = frameworks()["torch"]
    plan = assume_plan(_row(notes="FSDP=8; torch.compile"), graph, framework)
    assert plan.recipe.fusion == "compiled"
    assert assume_plan(_row(), graph, framework).recipe.fusion == "none"


@settings(max_examples=60, deadline=None)
@given(pp=st.sampled_from([1, 2, 4, 8, 16]), vp=st.integers(1, 4))
def test_stages_hold_every_module_once_and_layers_evenly(
    graph: ModelGraph, pp: int, vp: int
) -> None:
    row = {"pp": pp, "vp": vp, "microbatch": 1, "schedule": "interleaved"}
    names = list(graph.unit_names)
    if pp > 1 and pp * vp > LAYERS + 2:
        with pytest.raises(CalibrationError, match=f"stages for layers={LAYERS};"):
            _plan(graph, **row)
        return
    stages = _plan(graph, **row).strategy.stages
    assert [name for stage in stages for name in stage.modules] == names
    assert [stage.rank for stage in stages] == [i % pp for i in range(len(stages))]
    if len(stages) <= LAYERS:
        layers = [
            sum(name.rpartition(".")[2].isdigit() for name in stage.modules)
            for stage in stages
        ]
        assert max(layers) - min(layers) <= 1
        assert sum(layers) == LAYERS


def test_a_framework_s_own_defaults_count(graph: ModelGraph) -> None:
    torch = frameworks()["torch"]
    framework = replace(torch, zero_stage=2, recompute="selective")
    strategy = assume_plan(_row(recompute=""), graph, framework).strategy
    assert strategy.zero_stage == 2
    assert strategy.stages[0].recompute == "selective"


def test_a_run_whose_host_waited_for_each_kernel(graph: ModelGraph) -> None:
    assert not _plan(graph, notes="").recipe.blocking
    assert _plan(graph, notes="CUDA_LAUNCH_BLOCKING=1").recipe.blocking
    assert _plan(graph, source="BLOOM 176B").recipe.blocking


def test_gradients_are_reduced_in_the_dtype_of_the_framework(graph: ModelGraph) -> None:
    row = {"precision": "bf16"}
    assert _plan(graph, "megatron", **row).precision.reduce == "bfloat16"
    assert _plan(graph, "torchtitan", **row).precision.reduce == "float32"


def test_products_add_gradients_up_themselves_since_2022(graph: ModelGraph) -> None:
    old = _plan(graph, "megatron-2021", source="Megatron-LM SC21", precision="fp16")
    new = _plan(graph, "megatron-2021", source="Megatron-LM 2022", precision="fp16")
    assert old.recipe.gradient_passes == 3
    assert new.recipe.gradient_passes == 0


def test_pax_computes_scores_in_memory_without_transformer_engine(
    graph: ModelGraph,
) -> None:
    def fused(source: str, precision: str) -> bool:
        row = {"source": source, "precision": precision}
        return _plan(graph, "jax", **row).recipe.fused_attention

    assert not fused("NVIDIA JAX-Toolbox Pax README (2023-2024)", "bf16")
    assert fused("NVIDIA JAX-Toolbox Pax README (2023-2024)", "TE bf16")
    assert fused("JAX-Toolbox MaxText README", "bf16")


def test_nanotron_adds_gradients_up_in_float32(graph: ModelGraph) -> None:
    assert _plan(graph, "nanotron", precision="bf16").recipe.gradient_passes == 5.0


def test_deepspeed_gathers_one_by_one_under_zero_3_alone(graph: ModelGraph) -> None:
    fitted = frameworks()["deepspeed"].recipe
    whole = _plan(graph, "deepspeed", source="DeepSpeed", zero=3).recipe
    parts = _plan(graph, "deepspeed", source="DeepSpeed", zero=2).recipe
    assert (whole.pieces, parts.pieces) == (fitted.pieces, 1.0)
    # What was fitted under ZeRO 3 stays with it: the others differ from the framework.
    assert whole.replica_efficiency == fitted.replica_efficiency
    assert parts.replica_efficiency != fitted.replica_efficiency


def test_deepspeed_of_today_has_flash_attention() -> None:
    assert calibrated_recipe("deepspeed", shipped()).fused_attention
    assert not calibrated_recipe("megatron-2021", shipped()).fused_attention


@pytest.mark.parametrize(
    ("source", "gpu", "fused"),
    [
        ("DeepSpeed 2021", "A100", False),
        ("DeepSpeed 2024", "A100", True),
        ("DeepSpeed", "H100", True),
        ("DeepSpeed 2024", "V100", False),
    ],
)
def test_deepspeed_has_flash_attention_when_and_where_there_is_any(
    graph: ModelGraph, source: str, gpu: str, fused: bool
) -> None:
    assert _plan(graph, "deepspeed", source=source, gpu=gpu).recipe.fused_attention == (
        fused
    )


def test_runs_of_bfloat16_alone(graph: ModelGraph) -> None:
    for words in ("pure bf16", "pure bfloat16"):
        precision = _plan(graph, "torch", precision=words).precision
        assert (precision.parameter, precision.reduce) == ("bfloat16", "bfloat16")
    assert _plan(graph, "torch", precision="bf16").precision.parameter == "float32"


@pytest.mark.parametrize(
    ("total", "found"),
    [
        (16, (4, 2)),  # 8 a replica
        (12, (3, 2)),  # 6 a replica
        (10, (1, 5)),  # 5 a replica: a prime
        (2, (1, 1)),
        # What replicas do not divide: OPT-175B's 1,024 samples on 124 of them.
        (17, (4, 2)),
        (5, (2, 1)),
        (1, (1, 1)),
        (None, (1, 1)),
    ],
)
def test_a_blank_microbatch(total: int | None, found: tuple[int, int]) -> None:
    why: list[str] = []
    row = small(microbatch=None, global_batch=total, pp=None)
    assert batches(row, frameworks()["fsdp"], 2, why) == found
    assert why[0] == f"microbatch {found[0]}, not given"


def test_a_pipeline_takes_one_sample_at_once() -> None:
    row = small(microbatch=None, global_batch=16, pp=4)
    assert batches(row, frameworks()["megatron"], 2, []) == (1, 8)
    assert batches(
        small(microbatch=None, global_batch=None, pp=4),
        frameworks()["megatron"],
        2,
        [],
    ) == (1, 16)


def test_jax_takes_a_replicas_batch_at_once() -> None:
    # gradient_accumulation_steps is 1 unless a configuration says otherwise.
    row = small(microbatch=None, global_batch=32, pp=None)
    assert batches(row, frameworks()["jax"], 2, []) == (16, 1)


@pytest.mark.parametrize(
    ("framework", "given", "experts", "ways", "ep"),
    [
        # Not given: within a host, as far as ranks and experts go.
        ("megatron", None, 128, 64, 8),
        ("megatron-2025", None, 8, 64, 8),
        ("megatron", None, 60, 8, 4),
        ("megatron", None, 128, 2, 2),
        # Others gather all; models without experts have nothing to spread.
        ("torchtitan", None, 128, 64, 1),
        ("alpa", None, 16, 8, 1),
        ("megatron", None, 0, 64, 1),
        # Given: as it says, or the most that plans can.
        ("megatron", 1, 128, 64, 1),
        ("megatron", 64, 128, 64, 64),
        ("torchtitan", 64, 128, 16, 16),
    ],
)
def test_experts_are_spread_over(
    framework: str, given: int | None, experts: int, ways: int, ep: int
) -> None:
    why: list[str] = []
    row = small(ep=given)
    found = expert_degree(row, experts, frameworks()[framework], ways, why)
    assert found == ep
    assumed = given is None and framework.startswith("megatron") and experts > 0
    assert bool(why) == (assumed or (given is not None and given != ep))


@pytest.mark.parametrize(
    ("notes", "zero", "tp", "found"),
    [
        ("", 1, 1, (1, 64)),
        ("", 0, 1, (64, 1)),
        ("optimizer-state shard group zero1=8 (-1 = all)", 1, 1, (8, 8)),
        ("zero1 group=4, packed samples", 1, 2, (16, 4)),
        ("optimizer-state shard group zero1=-1 (-1 = all)", 1, 1, (1, 64)),
        ("sharding HSDP", 3, 1, (8, 8)),
        ("sharding HSDP", 3, 4, (32, 2)),
        ("HYBRID_SHARD within a host", 3, 1, (8, 8)),
        # Not what a row without ZeRO, or with fewer replicas, can do.
        ("zero1=8", 0, 1, (64, 1)),
        ("zero1=64", 1, 1, (1, 64)),
        ("dp_shard=24", 3, 1, (1, 64)),
    ],
)
def test_groups(notes: str, zero: int, tp: int, found: tuple[int, int]) -> None:
    why: list[str] = []
    assert replicated_and_sharded(small(notes=notes), zero, 64, tp, why) == found
    assert any("copies of that" in words for words in why) == (1 not in found)
