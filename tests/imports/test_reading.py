"""Configs as people write them: what is read, told and refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planner.errors import MeshwrightError, PlanFileError, StrategyError
from planner.imports import Imported, Wanted, detect_source, import_text, name_stages
from planner.schema.strategy_parts import ShardTraffic

BASE = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size=2 --num-layers 8 "
    "--micro-batch-size 1 --global-batch-size 32 --bf16 --use-distributed-optimizer "
)

NVME = {"device": "nvme"}
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
        (
            "--tensor-paralel-size 2",
            r"'--tensor-paralel-size' \(did you mean '--tensor-model-parallel-size'",
        ),
        ("--global-batch-size 33", "--global-batch-size=33 is not a multiple of 2"),
        ("--fp16", "--bf16 and --fp16 are both given"),
        ("--context-parallel-size 3", r"world_size=8 is not a multiple of 12 \(tp=2"),
        ("--num-layers 9", "--num-layers=9 is not a multiple of 2"),
        ("--micro-batch-size one", "argument --micro-batch-size: invalid int"),
        ("--recompute-granularity some", "invalid choice: 'some'"),
        ("--pipeline-model-parallel-layout 'Ex|L'", "has 'x'; it is made of E, t"),
        ("loose", "'loose' belongs to no flag"),
        (
            "--expert-model-parallel-size 4 --num-experts 12",
            "--num-experts 12 with --expert-model-parallel-size 4 and "
            "--expert-tensor-parallel-size 2",
        ),
        (
            "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1",
            "does not divide what is sharded, 4 ranks with tp",
        ),
        (
            "--expert-model-parallel-size 3 --expert-tensor-parallel-size 1 "
            "--num-experts 8",
            "use a divisor of 8 as --expert-model-parallel-size",
        ),
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
            "fraction 0.5: Meshwright prices all states",
        ),
        ("--optimizer-offload-fraction 2", "fraction 2 is not a share"),
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
        (
            {"train_batchsize": 64, "shard_all": 1, "colour": 1},
            8,
            r"unknown key of a DeepSpeed config 'train_batchsize' \(did you mean "
            r"'train_batch_size'\?\), 'shard_all': may change the strategy",
        ),
        ({"zero_optimization": {"stage": 5}}, 8, "stage=5 is not 0 to 3"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": NVME}},
            8,
            "offload_optimizer=nvme: Meshwright prices what is offloaded to the host",
        ),
        ({"train_batch_size": "many"}, 8, "'many' is not of type int"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, 8, "both on"),
        ({"optimizer": {"type": "Lion"}}, 8, "optimizer.type=Lion is not one"),
        ({"zero_optimization": {"stage": "auto"}}, 8, "no trainer fills it in"),
        ({"amp": {"enabled": True}}, 8, "amp: apex chooses the data types"),
        (
            {"torch_autocast": {"enabled": True, "dtype": "int8"}},
            8,
            "torch_autocast.dtype=int8 is not one of",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu", "ratio": 0.3},
                }
            },
            8,
            "offload_optimizer.ratio=0.3: Meshwright prices all states",
        ),
    ],
)
def test_deepspeed_is_refused(
    keys: dict[str, Any], world_size: int | None, message: str
) -> None:
    with pytest.raises(MeshwrightError, match=message):
        deepspeed(world_size, **keys)


def told(found: Imported) -> dict[str, str]:
    return {entry.key: entry.why for entry in found.ignored}


def test_what_the_trainer_fills_in_is_priced_and_said() -> None:
    """``auto`` is no value of the file's: neither a contradiction nor a size."""
    auto = {"enabled": "auto"}
    keys: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "fp16": auto,
        "bf16": auto,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    found = deepspeed(8, **keys)
    assert found.strategy.label() == "dp_shard8 zero3 mb1x1 bfloat16_reduce"
    assert told(found)["bf16.enabled"].endswith("--dtype says another")
    assert "8 is priced" in told(found)["train_batch_size"]
    text = json.dumps(keys)
    wanted = Wanted(world_size=8, global_batch=64, microbatch_size=2, dtype="float16")
    strategy = import_text("deepspeed", text, wanted, "ds.json").strategy
    assert strategy.precision.compute == "float16"
    assert (strategy.microbatch_size, strategy.num_microbatches) == (2, 4)
    del keys["bf16"]
    assert deepspeed(8, **keys).strategy.precision.compute == "float16"


def test_older_names_and_comments_are_read() -> None:
    text = """// my own
    {"train_micro_batch_size_per_gpu": 1, # a batch
     "_comment": "see https://x//y",
     "zero_optimization": {"stage": 3, "max_live_parameters": 1e9,
        "gather_fp16_weights_on_model_save": true, "cpu_offload": false,},
    }"""
    found = import_text("deepspeed", text, Wanted(world_size=4), "ds.json")
    assert found.strategy.label() == "dp_shard4 zero3 mb1x1 float32"
    assert told(found)["_comment"] == "a comment"


def test_harmless_words_that_are_not_known_are_passed_over() -> None:
    found = deepspeed(8, colour="red", zero_optimization={"stage": 1, "mood": 3})
    assert set(told(found)) == {"colour", "zero_optimization.mood"}
    flags = "--calculate-per-token-loss --colour red --empty-unused-memory-level 1"
    assert "--colour" in told(megatron(BASE + flags))
    with pytest.raises(StrategyError) as refused:
        megatron(BASE + "--shard-all 3 --colour red --tp-again --cpu-offloading")
    for word in ("'--shard-all', '--tp-again'", "--cpu-offloading: Meshwright"):
        assert word in str(refused.value)
    assert "--colour" not in str(refused.value)


def test_what_is_offloaded_is_read_or_passed_over_if_asked() -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "cpu_offload": True}
    assert deepspeed(8, zero_optimization=zero).strategy.offload.states == "parameters"
    older = {"stage": 2, "cpu_offload": True}
    assert deepspeed(8, zero_optimization=older).strategy.offload.states == "optimizer"
    text = json.dumps({"zero_optimization": zero})
    wanted = Wanted(world_size=8, without_offload=True)
    found = import_text("deepspeed", text, wanted, "ds.json")
    assert found.strategy.zero_stage == 3
    assert not found.strategy.offload
    assert told(found)["zero_optimization.offload_param"].startswith("cpu: priced wit")


def test_second_copies_and_fewer_bits_are_read() -> None:
    plus = {
        "zero_hpz_partition_size": 4,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    }
    strategy = deepspeed(8, zero_optimization={"stage": 3, **plus}).strategy
    shards = ShardTraffic(second_copy=4, weight_bits=8, gradient_bits=4)
    assert strategy.communication.shards == shards
    assert strategy.semantics == "approximate"
    exact = {"stage": 3, "zero_hpz_partition_size": 4, "zero_quantized_weights": False}
    strategy = deepspeed(8, zero_optimization=exact).strategy
    assert strategy.communication.shards == ShardTraffic(second_copy=4)
    assert strategy.semantics == "exact"
    below = deepspeed(8, zero_optimization={"stage": 2, **plus})
    assert below.strategy.communication.shards == ShardTraffic()
    assert all(
        told(below)[f"zero_optimization.{key}"] == "no effect below stage 3"
        for key in plus
    )
    with pytest.raises(StrategyError, match="zero_hpz_partition_size"):
        deepspeed(8, zero_optimization={"stage": 3, "zero_hpz_partition_size": 3})


def test_offloading_that_a_stage_of_zero_does_not_heed() -> None:
    both = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    found = deepspeed(8, zero_optimization={"stage": 2, **both})
    assert found.strategy.offload.states == "optimizer"
    key = "zero_optimization.offload_param"
    assert told(found)[key] == "no effect below stage 3"
    assert not deepspeed(8, zero_optimization=both).strategy.offload
    # Nothing gathers the weights of one replica.
    alone = deepspeed(1, zero_optimization={"stage": 3, **both})
    assert alone.strategy.offload.states == "optimizer"
    assert "weights on the device" in told(alone)["offloaded weights"]
    weights = {"stage": 3, "offload_param": {"device": "cpu"}}
    assert told(deepspeed(8, zero_optimization=weights))[key].startswith("the optimize")


def test_megatron_offloads_its_optimizer() -> None:
    flags = "--optimizer-cpu-offload --use-precision-aware-optimizer "
    found = megatron(BASE + flags + "--overlap-cpu-optimizer-d2h-h2d")
    assert found.strategy.offload.states == "optimizer"
    assert "priced as exposed" in told(found)["--overlap-cpu-optimizer-d2h-h2d"]
    for rest in ("", flags + "--optimizer-offload-fraction 0"):
        assert not megatron(BASE + rest).strategy.offload
    wanted = Wanted(world_size=8, without_offload=True)
    left = import_text("megatron", BASE + flags, wanted, "--args")
    assert not left.strategy.offload
    assert told(left)["--optimizer-cpu-offload"].startswith("priced without offload")


def test_few_microbatches_of_1f1b_are_gpipe() -> None:
    few = megatron(BASE.replace("batch-size 32", "batch-size 2"))
    assert (few.strategy.schedule, few.strategy.num_microbatches) == ("GPipe", 1)
    assert "(1) are fewer than stages (2)" in told(few)["schedule"]
    assert megatron(BASE).strategy.schedule == "1F1B"


@pytest.mark.parametrize(
    ("keys", "compute", "reduce"),
    [
        ({"torch_autocast": {"enabled": True}}, "bfloat16", "bfloat16"),
        (
            {"torch_autocast": {"enabled": True, "dtype": "float16"}},
            "float16",
            "bfloat16",
        ),
        ({"torch_autocast": {"enabled": False}}, "float32", "float32"),
        (
            {"bf16": {"enabled": True}, "fp32_allreduce": True},
            "bfloat16",
            "float32",
        ),
    ],
)
def test_dtypes_of_deepspeed(keys: dict[str, Any], compute: str, reduce: str) -> None:
    precision = deepspeed(8, **keys).strategy.precision
    assert (precision.compute, precision.reduce) == (compute, reduce)


def test_gradients_of_float16_travel_in_16_bits() -> None:
    half = BASE.replace("--bf16", "--fp16")
    assert megatron(half).strategy.precision.reduce == "bfloat16"
    whole = megatron(half + "--accumulate-allreduce-grads-in-fp32")
    assert whole.strategy.precision.reduce == "float32"
    text = "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: fp16\n"
    assert accelerate(text).strategy.precision.reduce == "bfloat16"
    plain = accelerate(text.replace("FSDP", "MULTI_GPU"))
    assert plain.strategy.precision.reduce == "float32"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Wanted(world_size=8, recipe="tiny"), "--recipe tiny names a function"),
        (Wanted(world_size=8, script_words="A=1"), "--args gives words of a script"),
    ],
)
def test_options_of_other_formats_are_refused(wanted: Wanted, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        import_text("deepspeed", '{"zero_optimization": {}}', wanted, "ds.json")


def test_options_that_contradict_the_file_are_refused() -> None:
    with pytest.raises(StrategyError, match="--micro-batch-size 1, but microbatch_si"):
        import_text("megatron", BASE, Wanted(world_size=8, microbatch_size=2), "--args")
    with pytest.raises(StrategyError, match="--recompute full, but the file says none"):
        import_text("megatron", BASE, Wanted(world_size=8, recompute="full"), "--args")
    with pytest.raises(StrategyError, match="--dtype float16, but the arguments"):
        import_text("megatron", BASE, Wanted(world_size=8, dtype="float16"), "--args")


def test_deepspeed_inside_accelerate(tmp_path: Any) -> None:
    text = (
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
        "deepspeed_config: {zero_stage: 3, offload_optimizer_device: none, "
        "zero3_init_flag: true, gradient_accumulation_steps: 4}\n"
        "parallelism_config: {parallelism_config_sp_size: 2, "
        "parallelism_config_dp_shard_size: 4}\n"
    )
    found = accelerate(text)
    assert found.source == "accelerate"
    assert found.strategy.label() == "dp_shard4 cp2 zero3 mb1x4 bfloat16_reduce"
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true}}'
    )
    named = (
        "distributed_type: DEEPSPEED\nnum_processes: 4\n"
        "deepspeed_config: {deepspeed_config_file: ds.json}\n"
    )
    folder = tmp_path / "below"
    folder.mkdir()
    path = str(folder / "a.yaml")
    strategy = import_text("accelerate", named, Wanted(), path).strategy
    assert (strategy.zero_stage, strategy.precision.compute) == (1, "float16")
    with pytest.raises(PlanFileError, match=r"which is neither in .* nor above it"):
        import_text("accelerate", named, Wanted(), str(folder.parent.parent / "a.yaml"))


def test_megatron_inside_accelerate() -> None:
    text = (
        "distributed_type: MEGATRON_LM\nmixed_precision: bf16\nnum_processes: 8\n"
        "megatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_pp_degree: 2, "
        "megatron_lm_num_micro_batches: 4, "
        "megatron_lm_use_distributed_optimizer: true}\n"
    )
    mesh = accelerate(text).strategy.mesh
    assert (mesh.pp, mesh.dp_shard, mesh.tp) == (2, 2, 2)
    assert accelerate(text).strategy.num_microbatches == 4


def test_sections_without_effect_are_said() -> None:
    text = (
        "distributed_type: MULTI_XPU\nmixed_precision: bf16\nnum_processes: 2\n"
        "fsdp_config: {fsdp_version: 2}\ndeepspeed_config: {}\n"
    )
    found = accelerate(text)
    assert found.strategy.mesh.dp_replicate == 2
    assert told(found)["fsdp_config"] == "no effect with distributed_type=MULTI_XPU"
    assert "deepspeed_config" not in told(found)


def test_hybrid_sharding_is_over_a_machine() -> None:
    text = f"{FSDP}num_machines: 2\nfsdp_config: {{fsdp_sharding_strategy: %s}}\n"
    strategy = accelerate(text % "HYBRID_SHARD").strategy
    assert (strategy.mesh.dp_replicate, strategy.mesh.dp_shard) == (2, 4)
    assert strategy.zero_stage == 3
    assert accelerate(text % "HYBRID_SHARD_ZERO2").strategy.zero_stage == 2


def test_a_script_may_checkpoint_what_fsdp_does_not() -> None:
    text = f"{FSDP}fsdp_config: {{fsdp_activation_checkpointing: %s}}\n"

    def stages(flag: str, recompute: Any) -> str:
        wanted = Wanted(recompute=recompute)
        found = import_text("accelerate", text % flag, wanted, "a.yaml")
        return found.strategy.stages[0].recompute

    assert stages("false", None) == "none"
    assert stages("false", "full") == "full"
    assert stages("true", None) == "full"
    with pytest.raises(StrategyError, match="--recompute none, but the file says full"):
        stages("true", "none")


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
        (f"{FSDP}mixed_precison: bf16", {}, "did you mean 'mixed_precision'"),
        ("distributed_type: TPU\nnum_processes: 8\n", {}, "TPU is not read; NO, MULTI"),
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


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("#!/bin/bash\nA=1\ntorchrun x.py --bf16\n", "megatron"),
        ("GPUS=8\nARGS=(\n  --bf16\n)\ntorchrun x.py ${ARGS[@]}\n", "megatron"),
        ("# mine\n[parallelism]\ntensor_parallel_degree = 2\n", "torchtitan"),
        (
            "from torchtitan.trainer import Trainer\n"
            "def small() -> Trainer.Config:\n    return Trainer.Config()\n",
            "torchtitan",
        ),
        ("parallelism: {dp: 2}\ntokens: {micro_batch_size: 1}\n", "nanotron"),
        ("base_model: a/b\nmicro_batch_size: 1\ndatasets: []\n", "axolotl"),
        (
            "model_name_or_path: a/b\nfinetuning_type: full\nstage: sft\n",
            "llamafactory",
        ),
    ],
)
def test_further_configs_are_told_apart(text: str, source: str) -> None:
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


def test_experts_that_megatron_splits_are_dealt_out_over_as_many_ranks() -> None:
    flags = "--expert-model-parallel-size 2 --num-experts 8 "
    found = megatron(BASE + flags)
    assert found.strategy.mesh.ep == 4
    assert "split over 2 ranks" in told(found)["--expert-tensor-parallel-size"]
    one = megatron(BASE + flags + "--expert-tensor-parallel-size 1")
    assert one.strategy.mesh.ep == 2
    assert "--expert-tensor-parallel-size" not in told(one)
    # Without expert parallelism, too, tp splits the experts of a model that has some.
    assert megatron(BASE + "--num-experts 8").strategy.mesh.ep == 2


def test_experts_of_megatron_go_over_tp_ranks() -> None:
    flags = "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    mesh = megatron(BASE + flags).strategy.mesh
    assert (mesh.tp, mesh.dp_shard, mesh.ep, mesh.expert_shards) == (2, 2, 4, 1)
