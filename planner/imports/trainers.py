"""YAML of axolotl (0.13) and LlamaFactory (0.9) as strategies.

Both configure transformers' Trainer: batch, precision and optimizer are its own, and
DeepSpeed's JSON or FSDP's keys divide the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from planner.errors import StrategyError
from planner.imports.accelerate import fsdp_sharding
from planner.imports.base import (
    Imported,
    Keys,
    Wanted,
    assembled,
    checked_recompute,
    divided,
    ignored_keys,
)
from planner.imports.deepspeed import deepspeed_of_keys
from planner.imports.files import read_beside
from planner.imports.megatron import megatron_strategy
from planner.schema import Mesh, Optimizer, Precision
from planner.schema.optimizers import OPTIMIZERS

__all__ = ["axolotl_strategy", "llamafactory_strategy"]

#: transformers' names of optimizers that are torch's, or have as many states.
_PLAIN = {
    "adamw": "AdamW",
    "adamw_hf": "AdamW",
    "adamw_torch": "AdamW",
    "adamw_torch_fused": "AdamW",
    "adamw_apex_fused": "AdamW",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "muon": "Muon",
    "adafactor": "Adafactor",
    **dict.fromkeys(
        (
            *("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "paged_adamw_8bit"),
            "ao_adamw_8bit",
        ),
        "AdamW8bit",
    ),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), "AdamW"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trainer:
    """Settings of transformers' Trainer, from any config that holds them.

    Attributes:
        size: Samples per microbatch.
        many: Microbatches per step.
        compute: Data type of products.
        parameter: Data type of weights.
        recompute: True if layers are recomputed; None if nothing is said.
        optimizer: With its states.
        clip: Largest norm of gradients.
        compiled: True under torch.compile.
    """

    size: int
    many: int
    compute: str
    parameter: str
    recompute: bool | None
    optimizer: Optimizer
    clip: float | None
    compiled: bool


def _flag(keys: Keys, key: str) -> bool | str:
    """A switch as people write it: a bool, a word such as ``auto``, or nothing."""
    value = keys.data.pop(key, None)
    if value is None or value is False or value == "false":
        return False
    return True if value is True or value == "true" else str(value)


def _optimizer(keys: Keys, name: str | None, parameter: str) -> Optimizer:
    word = (name or "adamw_torch").lower().removeprefix("optimizernames.")
    state = "bfloat16" if parameter == "bfloat16" else "float32"
    if word.startswith("paged"):
        keys.skip("optimizer", f"{word}: its states are priced on the device")
    if word not in _PLAIN:
        keys.refuse(
            f"the optimizer {word} is not one that Meshwright prices; use adamw_torch "
            f"to price the rest"
        )
        word = "adamw"
    betas = [keys.take(f"adam_beta{n}", float) for n in (1, 2)]
    given = _PLAIN[word]
    return Optimizer(
        name=given,  # type: ignore[arg-type]
        learning_rate=keys.take("learning_rate", float) or 3e-4,
        weight_decay=keys.take("weight_decay", float),
        betas=(betas[0], betas[1])
        if None not in betas and OPTIMIZERS[given].betas
        else None,
        state_dtype=state,  # type: ignore[arg-type]
    )


def _world(wanted: Wanted, inner: int, rule: str) -> int:
    """Data-parallel ranks.

    Raises:
        StrategyError: If nothing says how many processes there are.
    """
    if wanted.world_size is None:
        raise StrategyError(
            "the file does not say how many processes there are; give --world-size"
        )
    return divided("world_size", wanted.world_size, by=inner, rule=rule)


def _microbatches(trainer: _Trainer, wanted: Wanted, dp: int) -> tuple[int, int]:
    if wanted.microbatch_size not in (None, trainer.size):
        raise StrategyError(
            f"the file has microbatches of {trainer.size}, but microbatch_size="
            f"{wanted.microbatch_size} is asked for; change the file, or leave it out"
        )
    batch = trainer.size * trainer.many * dp
    if wanted.global_batch not in (None, batch):
        raise StrategyError(
            f"the file trains {trainer.size} x {trainer.many} x data parallel {dp} = "
            f"{batch} samples a step, but global_batch={wanted.global_batch} is asked "
            f"for; change the file, or leave it out"
        )
    return trainer.size, trainer.many


def _strategy(
    source: str,
    keys: Keys,
    trainer: _Trainer,
    wanted: Wanted,
    *,
    mesh: Mesh,
    stage: int,
    saved: bool,
) -> Imported:
    """Put a strategy together for FSDP or plain replicas."""
    size, many = _microbatches(trainer, wanted, mesh.data_parallel)
    low = trainer.compute != "float32" and mesh.shards > 1 and stage > 0
    reduce = "bfloat16" if low or trainer.parameter == "bfloat16" else "float32"
    said = True if saved else trainer.recompute
    kept = None if said is None else "full" if said else "none"
    return assembled(
        source,
        {
            "zero_stage": stage,
            "microbatch_size": size,
            "num_microbatches": many,
            "precision": Precision(
                parameter=trainer.parameter,  # type: ignore[arg-type]
                compute=trainer.compute,  # type: ignore[arg-type]
                reduce=reduce,  # type: ignore[arg-type]
            ),
            "optimizer": trainer.optimizer,
            "grad_clip_norm": trainer.clip,
            "compile": trainer.compiled,
            "offload": keys.offload,
            "context_algorithm": "ring" if mesh.cp > 1 else "all_to_all",
        },
        mesh=mesh,
        recompute=checked_recompute(wanted, kept, "gradient checkpointing"),
        ignored=keys.ignored,
    )


def _by_deepspeed(
    source: str,
    keys: Keys,
    trainer: _Trainer,
    wanted: Wanted,
    *,
    where: str,
    given: object,
    inner: Mapping[str, int],
) -> Imported:
    """Read the DeepSpeed config that a Trainer's config names, or has inline."""
    if isinstance(given, dict):
        data = dict(given)
    else:
        data = read_beside(str(given), where, "DeepSpeed config")
    data["train_micro_batch_size_per_gpu"] = trainer.size
    data["gradient_accumulation_steps"] = trainer.many
    data.pop("train_batch_size", None)
    data.pop("optimizer", None)
    data.pop("scheduler", None)
    if data.get("gradient_clipping", "auto") == "auto":
        data["gradient_clipping"] = trainer.clip
    for key, degree in inner.items():
        if degree > 1:
            data[key] = {"autotp_size": degree} if key == "tensor_parallel" else degree
    if wanted.world_size is None:
        _world(wanted, 1, "")
    below = keys.of("deepspeed", data)
    below.where = ""
    kept = {None: None, True: "full", False: "none"}[trainer.recompute]
    recompute = checked_recompute(wanted, kept, "gradient checkpointing")
    found = deepspeed_of_keys(
        below,
        replace(wanted, dtype=_dtype_beside(data, trainer), recompute=recompute),
        source=source,
        compiled=trainer.compiled,
    )
    strategy = found.strategy.model_copy(update={"optimizer": trainer.optimizer})
    return replace(found, strategy=strategy)


def _dtype_beside(data: Mapping[str, Any], trainer: _Trainer) -> str:
    """Data type of products: the Trainer's, and a DeepSpeed config's where it is on."""
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        section = data.get(name)
        if isinstance(section, dict) and section.get("enabled") is True:
            return dtype if trainer.compute != "float8" else "float8"
    return trainer.compute


def _adapters(keys: Keys, adapter: str | None, bits: object) -> None:
    """Say what of the model's own training the strategy cannot know."""
    if adapter and adapter not in ("full", "none"):
        keys.skip(
            "adapter",
            f"{adapter}: the model's; price a module:factory that returns the model "
            f"with its adapters and frozen weights",
        )
    if bits:
        keys.skip(
            "quantization", f"frozen weights of {bits} bits are priced as they are kept"
        )


def axolotl_strategy(data: dict[str, Any], wanted: Wanted, where: str) -> Imported:
    """Read axolotl's YAML.

    Args:
        data: The YAML.
        wanted: At least ``world_size``.
        where: Its path; a DeepSpeed config that it names is looked for beside it.

    Raises:
        StrategyError: If it contradicts itself, asks for what Meshwright does not
            price, or keys that may change the strategy are not known.
    """
    keys = Keys(data=dict(data), without_offload=wanted.without_offload)
    trainer = _axolotl_trainer(keys, wanted)
    tp = keys.count("tensor_parallel_size", 1)
    cp = keys.count("context_parallel_size") or keys.count(
        "sequence_parallel_degree", 1
    )
    replicate, shard = keys.count("dp_replicate_size"), keys.count("dp_shard_size")
    ep = keys.count("expert_parallel_size", 1)
    deepspeed = keys.data.pop("deepspeed", None)
    stage, saved, hybrid = _fsdp(keys, where)
    _adapters(keys, keys.take("adapter", str), _bits(keys))
    if ep > 1 and (deepspeed or not stage):
        keys.refuse(
            f"expert_parallel_size={ep} without fsdp_config: Meshwright deals experts "
            f"out over ranks that FSDP shards over; add fsdp_config, or take "
            f"expert_parallel_size out to price the rest"
        )
    for key, size in (("dp_replicate_size", replicate), ("dp_shard_size", shard)):
        if deepspeed and size:
            keys.skip(key, "no effect with deepspeed, whose ZeRO shards over all ranks")
    others = ignored_keys("axolotl")
    keys.pass_over(others)
    keys.close(_AXOLOTL, others)
    keys.finish("an axolotl config")
    if deepspeed:
        found = _by_deepspeed(
            "axolotl",
            keys,
            trainer,
            wanted,
            where=where,
            given=deepspeed,
            inner={"sequence_parallel_size": cp, "tensor_parallel": tp},
        )
        if cp > 1:
            # Its context parallelism is a ring under every launcher.
            strategy = found.strategy.model_copy(update={"context_algorithm": "ring"})
            found = replace(found, strategy=strategy)
        return found
    dp = _world(wanted, tp * cp, f"tensor {tp} x context parallel {cp}")
    sizes = _data_parallel(dp, stage, replicate=replicate, shard=shard, hybrid=hybrid)
    mesh = Mesh(**sizes, cp=cp, tp=tp)
    if ep > 1 and mesh.dp_shard * ep == dp and mesh.dp_replicate == ep:
        # Its experts are an axis of their own, beside the one that shards.
        keys.skip(
            "dp_shard_size",
            f"weights beside the experts are sharded over {mesh.dp_shard} of {dp} "
            f"ranks, and priced as over all of them",
        )
        mesh = mesh.model_copy(update={"dp_replicate": 1, "dp_shard": dp})
    if ep > 1:
        divided("data parallel", mesh.shards * tp, by=ep, rule="expert_parallel_size")
        mesh = mesh.model_copy(update={"ep": ep})
    return _strategy(
        "axolotl",
        keys,
        trainer,
        wanted,
        mesh=mesh,
        stage=stage if mesh.shards > 1 else 0,
        saved=saved,
    )


_AXOLOTL = (
    *("micro_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "fp8"),
    *("deepspeed", "fsdp", "fsdp_config", "fsdp_version", "gradient_checkpointing"),
    *("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree"),
    *("dp_shard_size", "dp_replicate_size", "expert_parallel_size", "torch_compile"),
    *("optimizer", "weight_decay", "max_grad_norm", "adapter", "batch_size"),
)


def _axolotl_trainer(keys: Keys, wanted: Wanted) -> _Trainer:
    low, half = _flag(keys, "bf16") or _flag(keys, "bfloat16"), _flag(keys, "fp16")
    low = low or _flag(keys, "bfloat16")
    half = half or _flag(keys, "float16")
    compute = "bfloat16" if low else "float16" if half else "float32"
    if low == "auto" and wanted.dtype:
        compute = wanted.dtype
    if _flag(keys, "fp8"):
        compute = "float8"
    if not low and not half and compute == "float32":
        compute = wanted.dtype or "bfloat16"
        keys.skip("bf16", f"not in the file; {compute} is priced, --dtype says another")
    _require_dtype(wanted, compute)
    parameter = "bfloat16" if low == "full" else "float32"
    recompute = _flag(keys, "gradient_checkpointing")
    for key, value in (
        ("gradient_checkpointing", recompute),
        ("activation_offloading", _flag(keys, "activation_offloading")),
    ):
        if "offload" in str(value) or (key.startswith("activation") and value):
            keys.take_offload(key, str(value).lower(), "activations")
    batch = keys.count("batch_size")
    size = keys.count("micro_batch_size") or wanted.microbatch_size or 1
    many = keys.count("gradient_accumulation_steps", 1)
    if batch:
        many = divided("batch_size", batch, by=size, rule="micro_batch_size")
    return _Trainer(
        size=size,
        many=many,
        compute=compute,
        parameter=parameter,
        recompute=bool(recompute),
        optimizer=_optimizer(keys, keys.take("optimizer", str), parameter),
        clip=keys.take("max_grad_norm", float, 1.0) or None,
        compiled=_flag(keys, "torch_compile") is True,
    )


def _require_dtype(wanted: Wanted, compute: str) -> None:
    if wanted.dtype not in (None, compute):
        raise StrategyError(
            f"--dtype {wanted.dtype}, but the file computes in {compute}; change the "
            f"file, or leave --dtype out"
        )


def _bits(keys: Keys) -> int:
    four, eight = _flag(keys, "load_in_4bit"), _flag(keys, "load_in_8bit")
    return 4 if four else 8 if eight else 0


def _fsdp(keys: Keys, where: str) -> tuple[int, bool, bool]:
    """ZeRO stage, checkpointing, and True if only a machine's processes shard."""
    words = keys.data.pop("fsdp", None) or []
    if isinstance(words, str):
        words = words.split()
    config = keys.data.pop("fsdp_config", None)
    version = keys.data.pop("fsdp_version", None)
    if not words and not config and not version:
        return 0, False, False
    if isinstance(config, str):
        # transformers takes its path, too.
        config = read_beside(config, where, "FSDP config")
    inner = keys.of("fsdp_config", config or {})
    bare = [str(word).lower() for word in words]
    prefix = "fsdp_" if any(key.startswith("fsdp_") for key in inner.data) else ""
    inner.data.pop("fsdp_version", None)
    if prefix and not any(key.startswith("fsdp_offload") for key in inner.data):
        prefix = "" if "offload_params" in inner.data else prefix
    strategy = next((word for word in bare if word in _FSDP_WORDS), None)
    if strategy and f"{prefix}sharding_strategy" not in inner.data:
        inner.data[f"{prefix}sharding_strategy"] = strategy.upper()
    if "offload" in bare:
        keys.take_offload("fsdp", "offload", "parameters")
    found = fsdp_sharding(inner, prefix)
    inner.close(("sharding_strategy", "reshard_after_forward", "offload_params"))
    return found


_FSDP_WORDS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard")


def _data_parallel(
    dp: int,
    sharded: object,
    *,
    replicate: int | None = None,
    shard: int | None = None,
    hybrid: bool = False,
) -> dict[str, int]:
    """Degrees of data parallelism.

    Raises:
        StrategyError: If they do not multiply to the processes.
    """
    if hybrid and replicate is None and shard is None:
        raise StrategyError(
            "hybrid sharding does not say over how many processes it shards; write "
            "dp_shard_size and dp_replicate_size"
        )
    if replicate is None and shard is None:
        return {"dp_shard" if sharded else "dp_replicate": dp}
    if shard is None:
        shard = divided(
            "data parallel", dp, by=replicate or 1, rule="dp_replicate_size"
        )
    if replicate is None:
        replicate = divided("data parallel", dp, by=shard, rule="dp_shard_size")
    if math.prod((shard, replicate)) != dp:
        raise StrategyError(
            f"dp_replicate_size={replicate} x dp_shard_size={shard} is not the data "
            f"parallel {dp} that --world-size leaves; correct one of them"
        )
    return {"dp_replicate": replicate, "dp_shard": shard}


_LLAMAFACTORY = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16"),
    *("pure_bf16", "fp8", "deepspeed", "fsdp", "fsdp_config", "optim", "weight_decay"),
    *("disable_gradient_checkpointing", "finetuning_type", "quantization_bit"),
)
#: Switches of optimizers with states of their own, and of training in parts.
_OWN = ("galore", "apollo", "badam", "adam_mini", "lomo")
#: Keys that LlamaFactory hands to Megatron-Core, by Megatron's flags.
_MEGATRON = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "recompute_granularity": "--recompute-granularity",
}
_MEGATRON_SWITCHES = {
    "sequence_parallel": "--sequence-parallel",
    "use_distributed_optimizer": "--use-distributed-optimizer",
}


def llamafactory_strategy(data: dict[str, Any], wanted: Wanted, where: str) -> Imported:
    """Read LlamaFactory's YAML, or one for transformers' Trainer.

    Args:
        data: The YAML.
        wanted: At least ``world_size``.
        where: Its path; a DeepSpeed config that it names is looked for beside it.

    Raises:
        StrategyError: As :func:`axolotl_strategy`.
    """
    keys = Keys(data=dict(data), without_offload=wanted.without_offload)
    for name in _OWN:
        if _flag(keys, f"use_{name}"):
            keys.refuse(
                f"use_{name}: Meshwright does not price that optimizer; take it out to "
                f"price the rest"
            )
    muon = _flag(keys, "use_muon")
    trainer = _llamafactory_trainer(keys, wanted)
    if muon:
        optimizer = trainer.optimizer.model_copy(update={"name": "Muon"})
        trainer = replace(trainer, optimizer=optimizer)
    deepspeed = keys.data.pop("deepspeed", None)
    words = keys.data.pop("fsdp", None)
    adapter = keys.take("finetuning_type", str, "lora")
    bits = keys.data.pop("quantization_bit", None) or keys.data.pop("load_in_4bit", 0)
    _adapters(keys, adapter if adapter != "full" else None, bits)
    megatron = _megatron_words(keys)
    stage, saved, hybrid = 0, False, False
    if words:
        bare = words if isinstance(words, list) else str(words).split()
        if any(word in _FSDP_WORDS for word in bare):
            keys.data["fsdp"] = bare
            stage, saved, hybrid = _fsdp(keys, where)
    keys.data.pop("fsdp_config", None)
    others = ignored_keys("llamafactory")
    keys.pass_over(others)
    keys.close(_LLAMAFACTORY, others)
    keys.finish("a LlamaFactory config")
    if megatron:
        return _by_megatron(keys, trainer, wanted, megatron)
    if deepspeed:
        return _by_deepspeed(
            "llamafactory",
            keys,
            trainer,
            wanted,
            where=where,
            given=deepspeed,
            inner={},
        )
    dp = _world(wanted, 1, "")
    if dp > 1 and not stage:
        keys.skip(
            "deepspeed",
            "neither deepspeed nor fsdp is in the file, and plain replicas are priced; "
            "if accelerate starts it, import accelerate's YAML",
        )
    mesh = Mesh(**_data_parallel(dp, stage, hybrid=hybrid))
    return _strategy(
        "llamafactory",
        keys,
        trainer,
        wanted,
        mesh=mesh,
        stage=stage if mesh.shards > 1 else 0,
        saved=saved,
    )


def _llamafactory_trainer(keys: Keys, wanted: Wanted) -> _Trainer:
    pure = _flag(keys, "pure_bf16")
    low, half = _flag(keys, "bf16") or pure, _flag(keys, "fp16")
    compute = "bfloat16" if low else "float16" if half else wanted.dtype or "float32"
    if _flag(keys, "fp8"):
        compute = "float8"
    _require_dtype(wanted, compute)
    parameter = "bfloat16" if pure else "float32"
    off = _flag(keys, "disable_gradient_checkpointing")
    on = keys.data.pop("gradient_checkpointing", None)
    return _Trainer(
        size=keys.count("per_device_train_batch_size") or wanted.microbatch_size or 8,
        many=keys.count("gradient_accumulation_steps", 1),
        compute=compute,
        parameter=parameter,
        recompute=bool(on) if on is not None else not off,
        optimizer=_optimizer(keys, keys.take("optim", str), parameter),
        clip=keys.take("max_grad_norm", float, 1.0) or None,
        compiled=_flag(keys, "torch_compile") is True,
    )


def _megatron_words(keys: Keys) -> list[str]:
    """Arguments of Megatron-Core that a config has, if it trains by it."""
    words: list[str] = []
    for key, flag in _MEGATRON.items():
        value = keys.data.pop(key, None)
        if value is not None:
            words += [flag, str(value)]
    for key, flag in _MEGATRON_SWITCHES.items():
        if _flag(keys, key):
            words.append(flag)
    return words


def _by_megatron(
    keys: Keys, trainer: _Trainer, wanted: Wanted, words: list[str]
) -> Imported:
    words = [*words, "--micro-batch-size", str(trainer.size)]
    if "full" in words:
        words += ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
    sizes = dict(pairwise(words))
    inner = math.prod(
        int(sizes.get(f"--{axis}-parallel-size", 1))
        for axis in ("tensor-model", "pipeline-model", "context")
    )
    dp = _world(wanted, inner, "tp x pp x cp of the file")
    words += ["--global-batch-size", str(trainer.size * trainer.many * dp)]
    words += ["--bf16"] if trainer.compute != "float32" else []
    words += ["--clip-grad", str(trainer.clip or 0.0)]
    words += ["--lr", str(trainer.optimizer.learning_rate)]
    words += ["--weight-decay", str(trainer.optimizer.used_weight_decay)]
    found = megatron_strategy(words, wanted)
    return replace(
        found, source="llamafactory", ignored=(*keys.ignored, *found.ignored)
    )
