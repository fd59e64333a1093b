"""Hugging Face accelerate's YAML (1.15) as a strategy."""

from __future__ import annotations

import math
from typing import Any

from planner.errors import StrategyError
from planner.imports.base import (
    Imported,
    Keys,
    Wanted,
    assembled,
    divided,
    ignored_keys,
)
from planner.schema import Mesh, Precision

__all__ = ["accelerate_strategy"]

_COMPUTE = {"no": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}
_PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU")

#: ZeRO stage of each sharding strategy of FSDP 1, and number of it.
_SHARDING = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0}
_MESH = "parallelism_config_"
_KNOWN = (
    *("distributed_type", "num_processes", "mixed_precision", "fsdp_config"),
    *("parallelism_config", "dynamo_config", "gradient_accumulation_steps"),
)


def accelerate_strategy(data: dict[str, Any], wanted: Wanted) -> Imported:
    """Read a config file; microbatches are the training script's.

    Args:
        data: Its YAML.
        wanted: Values that it lacks: batch sizes.

    Raises:
        StrategyError: If degrees contradict ``num_processes``, or it hands over to
            DeepSpeed or Megatron-LM.
        UnknownNameError: If a key is not known.
    """
    keys = Keys(data=dict(data))
    kind = _word(keys, "distributed_type", "NO")
    if kind not in (*_PLAIN, "FSDP"):
        raise StrategyError(
            f"distributed_type={kind} is not read; price what it hands over to: the "
            f"DeepSpeed JSON or Megatron's arguments"
        )
    processes = _processes(keys, wanted)
    mesh, stage, recompute = _sharded(keys, kind, processes)
    compute = _COMPUTE.get(_word(keys, "mixed_precision", "no").lower())
    if compute is None:
        raise StrategyError(
            f"mixed_precision={data['mixed_precision']} is not one of "
            f"{', '.join(_COMPUTE)}"
        )
    # FSDP reduces in what it computes in; DDP in what weights are kept in.
    low = compute == "bfloat16" and kind == "FSDP"
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
    launch = ignored_keys("accelerate")
    keys.pass_over(launch)
    keys.close("an accelerate config", (*_KNOWN, *launch))
    return assembled(
        "accelerate",
        fields,
        mesh=mesh,
        recompute="full" if recompute else "none",
        ignored=keys.ignored,
    )


def _word(keys: Keys, key: str, default: str) -> str:
    """A word; YAML reads a bare ``no`` as false."""
    value = keys.take(key, object, default)
    return default if value is False else str(value)


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


def _sharded(keys: Keys, kind: str, processes: int) -> tuple[Mesh, int, bool]:
    """Mesh, ZeRO stage, and True if layers are checkpointed."""
    fsdp, sizes = keys.inner("fsdp_config"), keys.inner("parallelism_config")
    stage, recompute = _stage(fsdp)
    if kind in _PLAIN:
        if processes > 1 and kind == "NO":
            raise StrategyError(
                f"distributed_type=NO with num_processes={processes}; use MULTI_GPU or "
                f"FSDP, or 1 process"
            )
        if sizes.data:
            raise StrategyError(
                f"parallelism_config with distributed_type={kind}; it goes with FSDP"
            )
        return Mesh(dp_replicate=processes), 0, False
    degrees = {
        axis: sizes.count(f"{_MESH}{axis}_size", 1)
        for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    declared = any(degree > 1 for degree in degrees.values())
    sp = degrees.pop("sp")
    if sp > 1:
        raise StrategyError(
            f"{sizes.where}{_MESH}sp_size={sp} goes with DeepSpeed, whose JSON says "
            f"more; price that"
        )
    sizes.pass_over(
        dict.fromkeys(
            (f"{_MESH}cp_backend", f"{_MESH}cp_comm_strategy"), "priced as a ring"
        )
        | dict.fromkeys(
            (f"{_MESH}sp_backend", f"{_MESH}sp_seq_length", f"{_MESH}sp_handler"),
            "there is no sp",
        )
    )
    sizes.close("parallelism_config", [f"{_MESH}{axis}_size" for axis in degrees])
    if not declared:
        degrees["dp_shard" if stage else "dp_replicate"] = processes
    product = math.prod(degrees.values())
    if product != processes:
        shown = " x ".join(f"{axis}={size}" for axis, size in degrees.items())
        raise StrategyError(
            f"num_processes={processes}, but parallelism_config has {shown} = "
            f"{product}; correct one of them"
        )
    mesh = Mesh(**degrees)
    return mesh, stage if mesh.shards > 1 else 0, recompute


def _stage(fsdp: Keys) -> tuple[int, bool]:
    """ZeRO stage and checkpointing of ``fsdp_config``."""
    recompute = fsdp.take("fsdp_activation_checkpointing", bool, False)
    if fsdp.take("fsdp_offload_params", bool, False):
        raise StrategyError(
            "fsdp_config.fsdp_offload_params: Meshwright does not price offloading; "
            "take it out to price the rest"
        )
    fsdp.take("fsdp_version", int, 1)
    reshard = fsdp.data.pop("fsdp_reshard_after_forward", None)
    older = fsdp.data.pop("fsdp_sharding_strategy", None)
    units = ignored_keys("accelerate.fsdp_config")
    fsdp.pass_over(units)
    known = ("fsdp_version", "fsdp_reshard_after_forward", "fsdp_sharding_strategy")
    fsdp.close("fsdp_config", (*known, "fsdp_activation_checkpointing", *units))
    if isinstance(reshard, bool):
        return (3 if reshard else 2), recompute
    word = str(reshard if reshard is not None else older or "FULL_SHARD").upper()
    if word not in _SHARDING:
        raise StrategyError(
            f"fsdp_config.fsdp_sharding_strategy={word} does not say over how many "
            f"processes it shards; write parallelism_config with dp_replicate_size and "
            f"dp_shard_size"
        )
    return _SHARDING[word], recompute


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
    dynamo.close("dynamo_config", ("dynamo_backend",))
    return backend.upper() != "NO"
