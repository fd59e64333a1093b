"""axolotl, LlamaFactory, nanotron and torchtitan: what their files say."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from planner.errors import PlanFileError, StrategyError, UnknownNameError
from planner.imports import Imported, Wanted, import_text

AXOLOTL = {
    "base_model": "meta-llama/Llama-3.1-8B",
    "sequence_len": 2048,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": "adamw_torch_fused",
    "learning_rate": "2e-5",
    "bf16": "auto",
    "gradient_checkpointing": True,
    "val_set_size": 0.0,
}


def read(source: str, data: dict[str, Any], world: int | None = 8) -> Imported:
    text = yaml.safe_dump(data)
    return import_text(source, text, Wanted(world_size=world), f"{source}.yaml")


def told(found: Imported) -> dict[str, str]:
    return {entry.key: entry.why for entry in found.ignored}


def test_axolotl_with_fsdp_on_several_axes() -> None:
    config = {"offload_params": False, "reshard_after_forward": True}
    keys = {"dp_shard_size": 2, "tensor_parallel_size": 2, "context_parallel_size": 2}
    found = read("axolotl", AXOLOTL | keys | {"fsdp_version": 2, "fsdp_config": config})
    assert found.strategy.label() == (
        "dp_shard2 cp2 tp2 zero3 mb2x4 full bfloat16_reduce lr2e-05 ring clip1"
    )


def test_axolotl_with_older_keys_of_fsdp() -> None:
    config = {"fsdp_offload_params": False, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}
    fsdp = {"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": config}
    assert read("axolotl", AXOLOTL | fsdp).strategy.zero_stage == 2
    config["fsdp_offload_params"] = True
    assert read("axolotl", AXOLOTL | fsdp).strategy.offload.states == "parameters"


@pytest.mark.parametrize(
    "keys", [{"activation_offloading": True}, {"gradient_checkpointing": "offload"}]
)
def test_axolotl_offloads_what_recomputation_begins_with(keys: dict[str, Any]) -> None:
    strategy = read("axolotl", AXOLOTL | keys).strategy
    assert strategy.offload.activations
    assert {stage.recompute for stage in strategy.stages} == {"full"}


def test_axolotl_without_a_launcher_is_plain_replicas() -> None:
    found = read(
        "axolotl", AXOLOTL | {"deepspeed": None, "optimizer": "adamw_bnb_8bit"}
    )
    strategy = found.strategy
    assert (strategy.mesh.dp_replicate, strategy.zero_stage) == (8, 0)
    assert strategy.optimizer.name == "AdamW8bit"


def test_adapters_are_the_models() -> None:
    found = read("axolotl", AXOLOTL | {"adapter": "qlora", "load_in_4bit": True})
    assert told(found)["adapter"].startswith("qlora: the model's; price a module:fac")
    assert "4 bits" in told(found)["quantization"]


def test_experts_of_axolotl() -> None:
    found = read(
        "axolotl",
        AXOLOTL
        | {
            "expert_parallel_size": 2,
            "dp_shard_size": 4,
            "fsdp_config": {"reshard_after_forward": True},
        },
    )
    assert (found.strategy.mesh.dp_shard, found.strategy.mesh.ep) == (8, 2)
    assert "priced as over all of them" in told(found)["dp_shard_size"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"optimizer": "lion_32bit"}, "the optimizer lion_32bit is not one"),
        ({"activation_offloading": "disk"}, "activation_offloading=disk: Meshwright"),
        (
            {"expert_parallel_size": 4, "deepspeed": "z3.json"},
            "expert_parallel_size=4 without fsdp_config",
        ),
        ({"expert_parallel_size": 4}, "expert_parallel_size=4 without fsdp_config"),
        ({"dp_shard_size": 3}, "data parallel=8 is not a multiple of 3"),
        (
            {"shard_everything": 1},
            "unknown key of an axolotl config 'shard_everything'",
        ),
        (
            {"deepspeed": "nowhere/zero3.json"},
            "names the DeepSpeed config nowhere/zero",
        ),
    ],
)
def test_axolotl_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises((StrategyError, PlanFileError), match=message):
        read("axolotl", AXOLOTL | keys)


def test_a_deepspeed_config_beside_the_trainers(tmp_path: Any) -> None:
    folder = tmp_path / "examples" / "train"
    folder.mkdir(parents=True)
    (tmp_path / "ds").mkdir()
    text = (
        '{"train_batch_size": "auto", "bf16": {"enabled": "auto"}, '
        '"fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}'
    )
    (tmp_path / "ds" / "z3.json").write_text(text)
    data = {
        "model_name_or_path": "Qwen/Qwen3-4B",
        "finetuning_type": "full",
        "deepspeed": "ds/z3.json",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "bf16": True,
    }
    found = import_text(
        "llamafactory",
        yaml.safe_dump(data),
        Wanted(world_size=8),
        str(folder / "sft.yaml"),
    )
    assert found.strategy.label() == "dp_shard8 zero3 mb1x2 full bfloat16_reduce clip1"
    both = import_text(
        "axolotl",
        yaml.safe_dump(AXOLOTL | {"deepspeed": "ds/z3.json"}),
        Wanted(world_size=8),
        str(folder / "a.yml"),
    )
    assert both.strategy.label() == (
        "dp_shard8 zero3 mb2x4 full bfloat16_reduce lr2e-05 clip1"
    )


LLAMA = {
    "model_name_or_path": "Qwen/Qwen3-30B-A3B",
    "finetuning_type": "full",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "bf16": True,
}


def test_fsdp_config_of_transformers_may_be_a_file(tmp_path: Any) -> None:
    (tmp_path / "fsdp.json").write_text('{"activation_checkpointing": true}')
    data = LLAMA | {
        "fsdp": "shard_grad_op auto_wrap offload",
        "fsdp_config": "fsdp.json",
        "disable_gradient_checkpointing": True,
    }
    text, where = yaml.safe_dump(data), str(tmp_path / "sft.yaml")
    found = import_text("llamafactory", text, Wanted(world_size=8), where).strategy
    assert (found.zero_stage, found.offload.states) == (2, "parameters")
    words = AXOLOTL | {"fsdp": "full_shard auto_wrap"}
    assert read("axolotl", words).strategy.zero_stage == 3


def test_llamafactory_by_megatron_core() -> None:
    keys = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 4,
        "expert_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "recompute_granularity": "full",
    }
    found = read("llamafactory", LLAMA | keys, 16)
    mesh = found.strategy.mesh
    assert (mesh.pp, mesh.dp_shard, mesh.ep) == (4, 4, 2)
    assert found.strategy.num_microbatches == 8
    assert found.strategy.stages[0].recompute == "full"


def test_llamafactory_refuses_all_optimizers_without_a_price_at_once() -> None:
    with pytest.raises(StrategyError, match=r"use_galore: .*use_badam: "):
        read("llamafactory", LLAMA | {"use_badam": True, "use_galore": True})
    muon = read("llamafactory", LLAMA | {"use_muon": True}).strategy.optimizer
    assert muon.name == "Muon"
    assert read("llamafactory", LLAMA | {"fp8": True}).strategy.precision.compute == (
        "float8"
    )


NANOTRON = {
    "parallelism": {
        "dp": 2,
        "pp": 2,
        "tp": 2,
        "pp_engine": "1f1b",
        "tp_mode": "REDUCE_SCATTER",
        "recompute_layer": True,
    },
    "tokens": {
        "micro_batch_size": 3,
        "batch_accumulation_per_replica": 4,
        "sequence_length": 4096,
    },
    "model": {"dtype": "bfloat16", "model_config": {"hidden_size": 64}},
    "optimizer": {"zero_stage": 1, "accumulate_grad_in_fp32": False, "clip_grad": 1.0},
    "data_stages": [],
}


def test_nanotron_says_everything() -> None:
    found = read("nanotron", NANOTRON, None)
    assert found.strategy.label() == (
        "pp2 dp_shard2 tp2 zero1 1F1B mb3x4 full sp bfloat16_weights bfloat16_reduce "
        "bfloat16_states clip1"
    )
    with pytest.raises(StrategyError, match="world_size=16 is asked for, but the file"):
        read("nanotron", NANOTRON, 16)


def test_nanotrons_experts_are_an_axis_of_their_own() -> None:
    parallel = NANOTRON["parallelism"] | {"expert_parallel_size": 2}
    with pytest.raises(StrategyError, match="expert_parallel_size=2 is an axis of its"):
        read("nanotron", NANOTRON | {"parallelism": parallel}, None)


TOML = """
[model]
name = "llama3"
converters = ["float8"]
[training]
local_batch_size = 4
global_batch_size = 64
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "interleaved1f1b"
pipeline_parallel_microbatch_size = 2
[activation_checkpoint]
mode = "full"
[compile]
enable = true
components = ["model", "loss"]
"""


def titan(text: str, world: int | None = 16, recipe: str = "") -> Imported:
    wanted = Wanted(world_size=world, recipe=recipe)
    return import_text("torchtitan", text, wanted, "llama")


def test_torchtitans_toml() -> None:
    strategy = titan(TOML).strategy
    assert strategy.label() == (
        "pp2 dp_shard4 tp2 zero2 Interleaved1F1B/v2 mb2x8 full sp loss_parallel float8 "
        "lr0.0008 weight_decay0.1 optimizer.betas=(0.9, 0.95) clip1 compiled"
    )
    older = TOML.replace("[parallelism]", "[experimental]")
    assert titan(older).strategy == strategy
    with pytest.raises(StrategyError, match="takes the processes that are left; give"):
        titan(TOML, None)


RECIPES = """
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer

def _length(a, b):
    return a * b + unknown()

def small() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=4 * 8192,
            max_context_length=8192,
        ),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
    )

def quantised() -> Trainer.Config:
    config = small()
    config.compile = CompileConfig(enable=True, components=["model"])
    config.parallelism.expert_parallel_degree = 4
    config.model_spec = model_registry("8B", converters=[MXFP8LinearConverter.Config()])
    return config

def open_one() -> Trainer.Config:
    config = small()
    config.training.max_context_length = _length(2, 3)
    return config

def muon() -> Trainer.Config:
    config = small()
    config.optimizer = OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern="w", optimizer_name="Muon"),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW"),
        ],
    )
    return config
"""


def test_torchtitans_recipes_are_followed_without_running_them() -> None:
    found = titan(RECIPES, 16, "small").strategy
    assert found.label() == (
        "dp_shard8 tp2 zero3 mb4x1 full sp loss_parallel weight_decay0.1 "
        "optimizer.betas=(0.9, 0.95) clip1"
    )
    other = titan(RECIPES, 16, "quantised").strategy
    assert other.mesh.ep == 4
    assert other.precision.compute == "float8"
    assert other.compile
    assert other.mesh.tp == 2


def test_torchtitans_recipes_are_refused() -> None:
    with pytest.raises(PlanFileError, match=r"has 4 recipes \(small, quantised"):
        titan(RECIPES)
    with pytest.raises(UnknownNameError, match="did you mean 'small'"):
        titan(RECIPES, 16, "smal")
    with pytest.raises(StrategyError, match="cannot be told without running the reci"):
        titan(RECIPES, 16, "open_one")
    with pytest.raises(StrategyError, match="the optimizer AdamW, Muon is not one"):
        titan(RECIPES, 16, "muon")
    with pytest.raises(StrategyError, match="so --recipe small has no effect"):
        titan(TOML, 16, "small")
    with pytest.raises(PlanFileError, match="neither TOML nor a recipe"):
        titan("[a\n")
