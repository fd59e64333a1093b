"""Recipe for torchtitan 0.3.0, written by Meshwright; run.sh starts it."""

# Model: 'qwen3-30b-a3b'
# Cluster: 'h100-80 x 16'
# Strategy: dp_replicate2 dp_shard8 ep4 zero2 mb1x8

import dataclasses
import importlib
import os

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.trainer import Trainer

# Where model, data, tokenizer, learning-rate schedule and checkpoints are from: a
# recipe, module:function.
BASE = os.environ.get(
    "TORCHTITAN_BASE", "torchtitan.models.qwen3.config_registry:qwen3_30b_a3b"
)
# Layers of the model that was planned; None if they have no numbers.
LAYERS = 48


def _base() -> Trainer.Config:
    module, _, function = BASE.partition(":")
    if not function:
        raise ValueError(
            f"TORCHTITAN_BASE={BASE!r} must name a recipe of the planned model, "
            f"module:function"
        )
    base = getattr(importlib.import_module(module), function)()
    model = base.model_spec.model
    if LAYERS is not None and len(model.layers) != LAYERS:
        raise ValueError(
            f"TORCHTITAN_BASE={BASE!r} has {len(model.layers)} layers, the plan is "
            f"for {LAYERS}; choose the recipe of the planned model"
        )
    if has_quantization(model):
        raise ValueError(
            f"TORCHTITAN_BASE={BASE!r} is quantized, the plan is not; choose one "
            f"that is not"
        )
    return base


def meshwright() -> Trainer.Config:
    base = _base()
    return dataclasses.replace(
        base,
        training=dataclasses.replace(
            base.training,
            local_batch_size=1,
            global_batch_size=128,
            seq_len=4096,
            dtype="float32",
            mixed_precision_param="bfloat16",
            mixed_precision_reduce="float32",
            enable_cpu_offload=False,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=1,
            data_parallel_replicate_degree=2,
            data_parallel_shard_degree=8,
            context_parallel_degree=1,
            tensor_parallel_degree=1,
            expert_parallel_degree=4,
            fsdp_reshard_after_forward="never",
            enable_sequence_parallel=False,
        ),
        activation_checkpoint=None,
        compile=CompileConfig(enable=False, components=["model"]),
        optimizer=OptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(
                    pattern=r".*",
                    optimizer_name="AdamW",
                    optimizer_kwargs={
                        # What nobody gave stays the recipe's.
                        **base.optimizer.param_groups[-1].optimizer_kwargs,
                        "lr": 0.0003,
                    },
                )
            ],
            implementation="fused",
        ),
    )
