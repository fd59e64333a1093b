"""Recipe for torchtitan 0.3.0, written by Meshwright; run.sh starts it."""

# Model: 'llama3-8b'
# Cluster: 'h100-80 x 16'
# Strategy: pp4 dp_shard2 tp2 zero2 1F1B mb1x16 sp clip1
# Left to torchtitan: tp splits what its model says, embedding and head too.

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
    "TORCHTITAN_BASE", "torchtitan.models.llama3.config_registry:llama3_8b"
)
# Layers of the model that was planned; None if they have no numbers.
LAYERS = 32


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
            local_batch_size=16,
            global_batch_size=32,
            seq_len=4096,
            max_norm=1.0,
            dtype="float32",
            mixed_precision_param="bfloat16",
            mixed_precision_reduce="float32",
            enable_cpu_offload=False,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=4,
            data_parallel_replicate_degree=1,
            data_parallel_shard_degree=2,
            context_parallel_degree=1,
            tensor_parallel_degree=2,
            expert_parallel_degree=1,
            fsdp_reshard_after_forward="never",
            enable_sequence_parallel=True,
            pipeline_parallel_schedule="1F1B",
            pipeline_parallel_microbatch_size=1,
            module_fqns_per_model_part=[
                ["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "layers.5", "layers.6"],
                ["layers.7", "layers.8", "layers.9", "layers.10", "layers.11", "layers.12", "layers.13", "layers.14", "layers.15"],
                ["layers.16", "layers.17", "layers.18", "layers.19", "layers.20", "layers.21", "layers.22", "layers.23", "layers.24"],
                ["layers.25", "layers.26", "layers.27", "layers.28", "layers.29", "layers.30", "layers.31", "norm", "lm_head"],
            ],
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
