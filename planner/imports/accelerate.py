"""Hugging Face accelerate's YAML (1.15) as a strategy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from planner.errors import StrategyError
from planner.imports.base import (
    DTYPES,
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
from planner.schema import Mesh, Precision

__all__ = ["accelerate_strategy", "fsdp_sharding"]

#: Plain replicas, on devices of every maker.
_PLAIN = (
    "NO",
    *("MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU"),
    *("MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU"),
)

#: ZeRO stage of each sharding strategy of FSDP 1, and number of it; hybrid ones shard
#: over the processes of a machine.
_SHARDING = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0}
_HYBRID = {"HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2, "4": 3, "5": 2}
_MESH = "parallelism_config_"
_DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
_KNOWN = (
    *("distributed_type", "num_processes", "num_machines", "mixed_precision"),
    *("fsdp_config", "parallelism_config", "dynamo_config", "deepspeed_config"),
    *("megatron_lm_config", "gradient_accumulation_steps", "use_fsdp"),
)


def accelerate_strategy(data: dict[str, Any], wanted: Wanted, where: str) -> Imported:
    """Read a config file; microbatches are the training script's.

    Args:
        data: Its YAML.
        wanted: Values that it lacks: batch sizes.
        where: Its path; a DeepSpeed config that it names is looked for beside it.

    Raises:
        StrategyError: If degrees contradict ``num_processes``, or keys that may change
            the strategy are not known.
    """
    keys = Keys(data=dict(data), without_offload=wanted.without_offload)
    kind = _word(keys, "distributed_type", "NO").upper()
    processes = _processes(keys, wanted)
    machines = keys.count("num_machines", 1)
    said = _compute(keys, wanted)
    if kind == "DEEPSPEED":
        return _by_deepspeed(keys, wanted, where, processes, said)
    if said is None:
        keys.skip(
            "mixed_precision",
            "not in the file; float32 is priced, --dtype says another",
        )
    compute = said or "float32"
    if kind == "MEGATRON_LM":
        return _by_megatron(keys, wanted, processes, compute)
    if kind not in (*_PLAIN, "FSDP"):
        raise StrategyError(
            f"distributed_type={kind} is not read; {', '.join(_PLAIN)}, FSDP, "
            f"DEEPSPEED and MEGATRON_LM are"
        )
    mesh, stage, saved = _sharded(keys, kind, processes, machines)
    # FSDP reduces in what it computes in; DDP in what weights are kept in.
    low = compute in ("bfloat16", "float16") and kind == "FSDP"
    size, many = _batch(keys, wanted, mesh)
    fields: dict[str, Any] = {
        "zero_stage": stage,
        "microbatch_size": size,
        "num_microbatches": many,
        "precision": Precision(
            compute=compute,  # type: ignore[arg-type]
            reduce="bfloat16" if low else "float32",
        ),
        "context_algorithm": "ring" if mesh.cp > 1 else "all_to_all",
        "compile": _compiled(keys),
    }
    for other in ("deepspeed_config", "megatron_lm_config", "mpirun_config"):
        _without_effect(keys, other, kind)
    _finish(keys)
    # Without FSDP's own checkpointing the training script may still have some.
    kept = "full" if saved else None
    return assembled(
        "accelerate",
        {**fields, "offload": keys.offload},
        mesh=mesh,
        recompute=checked_recompute(wanted, kept, "fsdp_activation_checkpointing"),
        ignored=keys.ignored,
    )


def _finish(keys: Keys) -> None:
    launch = ignored_keys("accelerate")
    keys.pass_over(launch)
    keys.close(_KNOWN, launch)
    keys.finish("an accelerate config")


def _word(keys: Keys, key: str, default: str) -> str:
    """A word; YAML reads a bare ``no`` as false."""
    value = keys.take(key, object, default)
    return default if value is False else str(value)


def _compute(keys: Keys, wanted: Wanted) -> str | None:
    """Data type of products; None if neither the file nor the user says it."""
    given = keys.data.pop("mixed_precision", None)
    if given is None:
        return wanted.dtype
    # YAML reads a bare no as false.
    word = "no" if given is False else str(given).lower()
    found = DTYPES.get(word)
    if found is None:
        raise StrategyError(f"mixed_precision={word} is not one of no, bf16, fp16, fp8")
    if wanted.dtype not in (None, found):
        raise StrategyError(
            f"--dtype {wanted.dtype}, but the file has mixed_precision={word}; change "
            f"the file, or leave --dtype out"
        )
    return found


def _without_effect(keys: Keys, key: str, kind: str) -> None:
    """Take a section of another distributed_type, and say so if it has anything."""
    if keys.data.pop(key, None):
        keys.skip(key, f"no effect with distributed_type={kind}")


def _processes(keys: Keys, wanted: Wanted) -> int:
    declared: int | None = keys.count("num_processes")
    if declared and wanted.world_size and declared != wanted.world_size:
        raise StrategyError(
            f"num_processes={declared}, but world_size={wanted.world_size} is asked "
            f"for; leave one of them out"
        )
    found = declared or wanted.world_size
    if found is None:
        raise StrategyError("the file has no num_processes; give --world-size")
    return found


def _by_deepspeed(
    keys: Keys, wanted: Wanted, where: str, processes: int, compute: str | None
) -> Imported:
    """Read a config that hands over to DeepSpeed, by a file of its own or inline."""
    inner = keys.inner("deepspeed_config")
    file = inner.take("deepspeed_config_file", str)
    inner.pass_over(ignored_keys("accelerate.deepspeed_config"))
    declared = inner.data
    data: dict[str, Any] = {}
    if file is not None:
        data = read_beside(file, where, "DeepSpeed config")
        if declared:
            keys.refuse(
                f"deepspeed_config.deepspeed_config_file={file} and "
                f"{', '.join(declared)} beside it; accelerate takes one or the other: "
                f"keep the file"
            )
    else:
        data = _inline(inner, compute or "float32")
    _sequence_parallel(keys, data, processes)
    _without_effect(keys, "fsdp_config", "DEEPSPEED")
    _without_effect(keys, "megatron_lm_config", "DEEPSPEED")
    many = keys.take("gradient_accumulation_steps", int)
    if many and data.get("gradient_accumulation_steps", "auto") == "auto":
        data["gradient_accumulation_steps"] = many
    compiled = _compiled(keys)
    _finish(keys)
    asked = replace(wanted, world_size=processes, dtype=wanted.dtype or compute)
    below = Keys(
        data=data,
        ignored=keys.ignored,
        without_offload=wanted.without_offload,
        offloaded=keys.offloaded,
    )
    return deepspeed_of_keys(below, asked, source="accelerate", compiled=compiled)


def _inline(inner: Keys, compute: str) -> dict[str, Any]:
    """The DeepSpeed config that accelerate's plugin makes of its own keys."""
    offload = {
        f"offload_{part}": {"device": inner.take(f"offload_{part}_device", str, "none")}
        for part in ("optimizer", "param")
    }
    for part in ("optimizer", "param"):
        inner.data.pop(f"offload_{part}_nvme_path", None)
    zero: dict[str, Any] = {"stage": inner.take("zero_stage", int, 2), **offload}
    data: dict[str, Any] = {
        "zero_optimization": zero,
        "gradient_accumulation_steps": inner.data.pop(
            "gradient_accumulation_steps", "auto"
        ),
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": compute in ("bfloat16", "float8")},
        "fp16": {"enabled": compute == "float16"},
    }
    for key in ("gradient_clipping", "seq_parallel_communication_data_type"):
        if key in inner.data:
            data[key] = inner.data.pop(key)
    inner.close(
        ("zero_stage", "gradient_accumulation_steps", "offload_optimizer_device"),
        ignored_keys("accelerate.deepspeed_config"),
    )
    return data


def _sequence_parallel(keys: Keys, data: dict[str, Any], processes: int) -> None:
    """Put degrees of ``parallelism_config`` into a DeepSpeed config."""
    sizes = keys.inner("parallelism_config")
    degrees = _degrees(sizes)
    product = math.prod(degrees.values())
    if degrees["cp"] > 1:
        keys.refuse(
            f"{sizes.where}{_MESH}cp_size={degrees['cp']} goes with FSDP; DeepSpeed "
            f"has {_MESH}sp_size"
        )
    if degrees["sp"] > 1:
        data["sequence_parallel_size"] = degrees["sp"]
    if degrees["tp"] > 1:
        data["tensor_parallel"] = {"autotp_size": degrees["tp"]}
    outer = degrees["dp_replicate"] * degrees["dp_shard"]
    if outer > 1 and product != processes:
        keys.refuse(_contradiction(degrees, processes))


def _contradiction(degrees: dict[str, int], processes: int) -> str:
    shown = " x ".join(f"{axis}={size}" for axis, size in degrees.items())
    return (
        f"num_processes={processes}, but parallelism_config has {shown} = "
        f"{math.prod(degrees.values())}; correct one of them"
    )


def _degrees(sizes: Keys) -> dict[str, int]:
    """Degrees of ``parallelism_config``; other keys of it are passed over."""
    degrees = {axis: sizes.count(f"{_MESH}{axis}_size", 1) for axis in _DEGREES}
    sizes.pass_over(ignored_keys("accelerate.parallelism_config"))
    sizes.close([f"{_MESH}{axis}_size" for axis in degrees])
    return degrees


def _by_megatron(keys: Keys, wanted: Wanted, processes: int, compute: str) -> Imported:
    """Read a config that hands over to Megatron-LM, as its arguments."""
    inner = keys.inner("megatron_lm_config")
    values = {
        "--tensor-model-parallel-size": ("tp_degree", "1"),
        "--pipeline-model-parallel-size": ("pp_degree", "1"),
        "--expert-model-parallel-size": ("expert_parallel_size", "1"),
        "--context-parallel-size": ("context_parallel_size", "1"),
        "--clip-grad": ("gradient_clipping", "1.0"),
    }
    words = ["--micro-batch-size", str(wanted.microbatch_size or 1)]
    for flag, (key, default) in values.items():
        words += [flag, str(inner.data.pop(f"megatron_lm_{key}", None) or default)]
    for flag, key in (
        ("--sequence-parallel", "sequence_parallelism"),
        ("--recompute-activations", "recompute_activations"),
        ("--use-distributed-optimizer", "use_distributed_optimizer"),
    ):
        if str(inner.data.pop(f"megatron_lm_{key}", False)).lower() == "true":
            words.append(flag)
    many = inner.data.pop("megatron_lm_num_micro_batches", None)
    inner.close([f"megatron_lm_{key}" for key, _ in values.values()])
    _without_effect(keys, "fsdp_config", "MEGATRON_LM")
    _without_effect(keys, "deepspeed_config", "MEGATRON_LM")
    words += {"bfloat16": ["--bf16"], "float16": ["--fp16"]}.get(compute, [])
    if wanted.global_batch is None and many:
        degrees = (
            int(words[words.index(f"--{axis}-parallel-size") + 1])
            for axis in ("tensor-model", "pipeline-model", "context")
        )
        each = int(many) * (wanted.microbatch_size or 1)
        replicas = processes // max(1, math.prod(degrees))
        words += ["--global-batch-size", str(each * replicas)]
    _finish(keys)
    found = megatron_strategy(words, replace(wanted, world_size=processes))
    return replace(found, source="accelerate", ignored=(*keys.ignored, *found.ignored))


def _sharded(
    keys: Keys, kind: str, processes: int, machines: int
) -> tuple[Mesh, int, bool]:
    """Mesh, ZeRO stage, and True if layers are checkpointed."""
    if kind in _PLAIN:
        if processes > 1 and kind == "NO":
            raise StrategyError(
                f"distributed_type=NO with num_processes={processes}; use MULTI_GPU or "
                f"FSDP, or 1 process"
            )
        if keys.data.get("parallelism_config"):
            raise StrategyError(
                f"parallelism_config with distributed_type={kind}; it goes with FSDP"
            )
        _without_effect(keys, "parallelism_config", kind)
        _without_effect(keys, "fsdp_config", kind)
        return Mesh(dp_replicate=processes), 0, False
    fsdp, sizes = keys.inner("fsdp_config"), keys.inner("parallelism_config")
    stage, recompute, hybrid = fsdp_sharding(fsdp, "fsdp_")
    fsdp.close(_FSDP, ignored_keys("accelerate.fsdp_config"))
    degrees = _degrees(sizes)
    declared = any(degree > 1 for degree in degrees.values())
    sp = degrees.pop("sp")
    if sp > 1:
        keys.refuse(
            f"{sizes.where}{_MESH}sp_size={sp} goes with DeepSpeed "
            f"(distributed_type: DEEPSPEED); FSDP has {_MESH}cp_size"
        )
        return Mesh(dp_replicate=processes), 0, recompute
    if not declared:
        degrees["dp_shard" if stage else "dp_replicate"] = processes
        if hybrid:
            degrees["dp_replicate"] = machines
            degrees["dp_shard"] = divided(
                "num_processes", processes, by=machines, rule="num_machines"
            )
    if math.prod(degrees.values()) != processes:
        raise StrategyError(_contradiction(degrees, processes))
    mesh = Mesh(**degrees)
    return mesh, stage if mesh.shards > 1 else 0, recompute


_FSDP = (
    *("fsdp_version", "fsdp_reshard_after_forward", "fsdp_sharding_strategy"),
    "fsdp_activation_checkpointing",
)


def fsdp_sharding(fsdp: Keys, prefix: str) -> tuple[int, bool, bool]:
    """ZeRO stage, checkpointing, and True if only a machine's processes shard.

    Args:
        fsdp: The keys of ``fsdp_config``; those that are read are taken.
        prefix: Start of their names, ``fsdp_`` or nothing.
    """
    recompute = bool(fsdp.take(f"{prefix}activation_checkpointing", bool, False))
    if fsdp.take(f"{prefix}offload_params", bool, False):
        fsdp.take_offload(f"{prefix}offload_params", "true", "parameters")
    fsdp.data.pop(f"{prefix}version", None)
    reshard = fsdp.data.pop(f"{prefix}reshard_after_forward", None)
    older = fsdp.data.pop(f"{prefix}sharding_strategy", None)
    reasons = ignored_keys("accelerate.fsdp_config")
    if not prefix:
        reasons = {key.removeprefix("fsdp_"): why for key, why in reasons.items()}
    fsdp.pass_over(reasons)
    if isinstance(reshard, bool):
        return (3 if reshard else 2), recompute, False
    word = str(reshard if reshard is not None else older or "FULL_SHARD").upper()
    if word not in _SHARDING and word not in _HYBRID:
        raise StrategyError(
            f"{fsdp.where}{prefix}sharding_strategy={word} is not one of "
            f"{', '.join(name for name in (*_SHARDING, *_HYBRID) if name.isalpha())}"
        )
    return (_SHARDING | _HYBRID)[word], recompute, word in _HYBRID


def _batch(keys: Keys, wanted: Wanted, mesh: Mesh) -> tuple[int, int]:
    """Microbatch size and number: the training script's, so the user's."""
    size = wanted.microbatch_size or 1
    if wanted.microbatch_size is None:
        keys.skip("microbatch_size", "not in the file; 1 is priced, --microbatch-size")
    many = keys.count("gradient_accumulation_steps")
    if wanted.global_batch is None:
        return size, many or 1
    rule = f"data parallel {mesh.data_parallel} x microbatch {size}"
    by = mesh.data_parallel * size
    found = divided("global_batch", wanted.global_batch, by=by, rule=rule)
    if many and many != found:
        raise StrategyError(
            f"gradient_accumulation_steps={many}, but global_batch="
            f"{wanted.global_batch} over {rule} takes {found}; correct one of them"
        )
    return size, found


def _compiled(keys: Keys) -> bool:
    dynamo = keys.inner("dynamo_config")
    backend = str(
        dynamo.data.pop("dynamo_backend", None) or dynamo.data.pop("backend", "NO")
    )
    dynamo.pass_over(
        {
            key: "how torch.compile goes about it"
            for key in list(dynamo.data)
            if key.startswith("dynamo_")
        }
    )
    dynamo.close(("dynamo_backend",))
    return backend.upper() not in ("NO", "EAGER")
