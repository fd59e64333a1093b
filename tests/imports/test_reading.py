"""Configs as people write them: what is read, told and refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planner.errors import MeshwrightError, PlanFileError, StrategyError
from planner.imports import Imported, Wanted, detect_source, import_text, name_stages

BASE = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size=2 --num-layers 8 "
    "--micro-batch-size 1 --global-batch-size 32 --bf16 --use-distributed-optimizer "
)

NAMES = ("embed", *(f"layers.{i}" for i in range(8)), "norm", "lm_head")


def megatron(text: str, world_size: int | None = 8) -> Imported:
    return import_text("megatron", text, Wanted(world_size=world_size), "--args")


def deepspeed(world_size: int | None = None, **keys: Any) -> Imported:
    wanted = Wanted(world_size=world_size)
    return import_text("deepspeed", json.dumps(keys), wanted, "ds.json")


def accelerate(text: str, **wanted: int) -> Imported:
    return import_text("accelerate", text, Wanted(**wanted), "a.yaml")


def test_flags_with_and_without_an_equals_sign() -> None:
    found = megatron(f"{BASE} --sequence-parallel --hidden-size=512 --swiglu")
    strategy = found.strategy
    assert strategy.label() == (
        "pp2 dp_shard2 tp2 zero1 1F1B mb1x16 sp weight_decay0.01 clip1"
    )
    assert strategy.sharding.sequence_parallel
    assert strategy.grad_clip_norm == 1.0
    assert found.cut == (4, 4)
    assert [entry.key for entry in found.ignored] == ["--hidden-size", "--swiglu"]


@pytest.mark.parametrize(
    ("flags", "stage"),
    [
        ("--use-megatron-fsdp", 3),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 2),
        ("--use-torch-fsdp2", 3),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", 2),
    ],
)
def test_what_fsdp_shards_unless_it_is_said(flags: str, stage: int) -> None:
    """Flags that are left out have the defaults of Megatron's own parser."""
    text = "--micro-batch-size 1 --global-batch-size 32 --bf16 " + flags
    assert megatron(text).strategy.zero_stage == stage


def test_older_and_rarer_flags() -> None:
    found = megatron(
        f"{BASE} --recompute-activations --recompute-granularity full "
        "--rampup-batch-size 8 8 1000 --fp8-format hybrid --fp8-recipe delayed"
    )
    assert found.strategy.precision.compute == "float8"
    assert {stage.recompute for stage in name_stages(found, NAMES).stages} == {
        "selective"
    }
    told = {entry.key: entry.why for entry in found.ignored}
    assert told["--rampup-batch-size"] == "the batch that it grows to is priced"
    assert "--fp8-recipe" in told
    with pytest.raises(StrategyError, match="--fp8-format e4m3 without --bf16"):
        megatron("--micro-batch-size 1 --fp8-format e4m3")


def test_a_file_of_flags_may_have_comments() -> None:
    text = f"# mine\n{BASE}\n  # and\n--lr 1e-4\n"
    assert detect_source(text, "x") == "megatron"
    assert megatron(text).strategy.optimizer.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("layout", "cut", "virtual"),
    [("Et*3|t*5L", (3, 5), 1), ("E|(t|)*2,t*6mL", (0, 1, 1, 6), 2)],
)
def test_layouts(layout: str, cut: tuple[int, ...], virtual: int) -> None:
    found = megatron(f"{BASE} --pipeline-model-parallel-layout '{layout}'")
    assert found.cut == cut
    assert found.strategy.virtual_stages == virtual
    stages = name_stages(found, NAMES).stages
    assert [m for stage in stages for m in stage.modules] == list(NAMES)
    with pytest.raises(StrategyError, match="cuts 8 layers, the model has 7"):
        name_stages(found, NAMES[:8])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-paralel-size 2", "--tensor-paralel-size is not known"),
        ("--global-batch-size 33", "--global-batch-size=33 is not a multiple of 2"),
        ("--fp16", "--bf16 and --fp16 are both given"),
        ("--context-parallel-size 3", r"world_size=8 is not a multiple of 12 \(tp=2"),
        ("--num-layers 9", "--num-layers=9 is not a multiple of 2"),
        ("--micro-batch-size one", "argument --micro-batch-size: invalid int"),
        ("--recompute-granularity some", "invalid choice: 'some'"),
        ("--pipeline-model-parallel-layout 'Ex|L'", "has 'x'; it is made of E, t"),
        ("loose", "'loose' belongs to no flag"),
        (
            "--expert-model-parallel-size 2",
            "--expert-tensor-parallel-size left out, which is tp, with tp=2",
        ),
        (
            "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1",
            "does not divide what is sharded, 4 ranks with tp",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2 "
            "--num-layers-per-virtual-pipeline-stage 2",
            "both cut the model",
        ),
    ],
)
def test_what_contradicts_itself_is_named(flags: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        megatron(BASE + flags if flags != "loose" else f"loose {BASE}")


def test_arguments_do_not_say_how_many_processes_there_are() -> None:
    with pytest.raises(StrategyError, match="give --world-size"):
        megatron(BASE, world_size=None)


def test_deepspeed_counts_devices_by_its_batch() -> None:
    found = deepspeed(
        train_batch_size=64,
        train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=4,
        zero_optimization={"stage": 3, "overlap_comm": True},
        bf16={"enabled": True},
        tensor_parallel={"autotp_size": 2},
    )
    assert found.strategy.label() == "dp_shard8 tp2 zero3 mb2x4 bfloat16_reduce"
    assert [entry.key for entry in found.ignored] == ["zero_optimization.overlap_comm"]


@pytest.mark.parametrize(
    ("keys", "world_size", "message"),
    [
        ({"train_batch_size": 64}, None, "how many devices there are; give --world"),
        (
            {"train_batch_size": 60, "train_micro_batch_size_per_gpu": 8},
            8,
            "train_batch_size=60 is not a multiple of 64",
        ),
        (
            {
                "train_batch_size": 64,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
            },
            8,
            "train_batch_size=64 is not train_micro_batch_size_per_gpu=2 x",
        ),
        ({"train_batchsize": 64}, 8, "unknown key of a DeepSpeed config 'train_batch"),
        ({"zero_optimization": {"stage": 5}}, 8, "stage=5 is not 0 to 3"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            8,
            "does not price offloading",
        ),
        ({"train_batch_size": "many"}, 8, "'many' is not of type int"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, 8, "both on"),
        ({"optimizer": {"type": "Lion"}}, 8, "optimizer.type=Lion is not one"),
    ],
)
def test_deepspeed_is_refused(
    keys: dict[str, Any], world_size: int | None, message: str
) -> None:
    with pytest.raises(MeshwrightError, match=message):
        deepspeed(world_size, **keys)


FSDP = "distributed_type: FSDP\nnum_processes: 8\n"


def test_accelerate_shards_over_all_without_a_mesh() -> None:
    found = accelerate(f"{FSDP}fsdp_config: {{fsdp_sharding_strategy: SHARD_GRAD_OP}}")
    assert found.strategy.label() == "dp_shard8 zero2 mb1x1 float32"
    assert any(entry.key == "microbatch_size" for entry in found.ignored)


@pytest.mark.parametrize(
    ("text", "wanted", "message"),
    [
        (
            f"{FSDP}parallelism_config: {{parallelism_config_tp_size: 4}}",
            {},
            r"num_processes=8, but parallelism_config has .*tp=4.* = 4",
        ),
        (FSDP, {"world_size": 4}, "num_processes=8, but world_size=4"),
        (FSDP, {"global_batch": 12}, "global_batch=12 is not a multiple of 8"),
        (f"{FSDP}mixed_precison: bf16", {}, "unknown key of an accelerate config"),
        (f"{FSDP}fsdp_config: {{fsdp_offload_params: true}}", {}, "offloading"),
        ("distributed_type: MEGATRON_LM\n", {}, "price what it hands over to"),
        ("distributed_type: NO\nnum_processes: 2\n", {}, "use MULTI_GPU or FSDP"),
        (f"{FSDP}mixed_precision: int4", {}, "mixed_precision=int4 is not one of"),
        ("distributed_type: FSDP\n", {}, "has no num_processes; give --world-size"),
    ],
)
def test_accelerate_is_refused(text: str, wanted: dict[str, int], message: str) -> None:
    with pytest.raises(MeshwrightError, match=message):
        accelerate(text, **wanted)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ('{"mesh": {"tp": 2}}', "strategy"),
        ("mesh: {tp: 2}\n", "strategy"),
        ('{"strategy": {}, "schema_version": 1}', "plan"),
        ("compute_environment: LOCAL_MACHINE\n", "accelerate"),
        ('{"train_batch_size": 8}', "deepspeed"),
    ],
)
def test_configs_are_told_apart_by_their_content(text: str, source: str) -> None:
    assert detect_source(text, "x") == source


@pytest.mark.parametrize("text", ["{", "- 1\n", "a: [", "hello: there\n", ""])
def test_what_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(PlanFileError, match="x"):
        detect_source(text, "x")


def test_yaml_makes_no_objects() -> None:
    with pytest.raises(
        PlanFileError, match=r"not YAML \(line 1\): could not determine"
    ):
        accelerate("distributed_type: !!python/object/apply:os.system ['true']\n")


def test_context_parallel_ranks_shard_without_data_parallelism() -> None:
    one = BASE + "--context-parallel-size 2 "
    strategy = megatron(one).strategy
    assert (strategy.mesh.dp_shard, strategy.mesh.cp, strategy.zero_stage) == (1, 2, 1)
    found = deepspeed(
        4,
        train_batch_size=1,
        train_micro_batch_size_per_gpu=1,
        sequence_parallel_size=4,
        zero_optimization={"stage": 3},
    ).strategy
    assert (found.mesh.dp_shard, found.mesh.cp, found.zero_stage) == (1, 4, 3)


def test_experts_of_megatron_go_over_tp_ranks() -> None:
    flags = "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    mesh = megatron(BASE + flags).strategy.mesh
    assert (mesh.tp, mesh.dp_shard, mesh.ep, mesh.expert_shards) == (2, 2, 4, 1)
