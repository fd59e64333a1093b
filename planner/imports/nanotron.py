"""nanotron's YAML (0.4 and its repository) as a strategy."""

from __future__ import annotations

import math
from typing import Any

from planner.errors import StrategyError
from planner.imports.base import (
    DTYPES,
    Imported,
    Keys,
    Wanted,
    assembled,
    checked_recompute,
    ignored_keys,
)
from planner.schema import Mesh, Optimizer, Precision

__all__ = ["nanotron_strategy"]

_SECTIONS = ("parallelism", "tokens", "model", "optimizer")
_ENGINES = {"1f1b": "1F1B", "afab": "GPipe"}
_DEGREES = {
    "dp": "dp",
    "pp": "pp",
    "tp": "tp",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
}


def nanotron_strategy(data: dict[str, Any], wanted: Wanted) -> Imported:
    """Read a config file, which says everything but the model's cut.

    Args:
        data: Its YAML.
        wanted: Checked against it.

    Raises:
        StrategyError: If it contradicts itself or ``wanted``, has experts along an axis
            of their own, or keys that may change the strategy are not known.
    """
    keys = Keys(data=dict(data))
    parallel, tokens = keys.inner("parallelism"), keys.inner("tokens")
    degrees = {axis: parallel.count(key, 1) for axis, key in _DEGREES.items()}
    world = math.prod(degrees.values())
    if wanted.world_size not in (None, world):
        shown = " x ".join(f"{axis}={size}" for axis, size in degrees.items())
        raise StrategyError(
            f"world_size={wanted.world_size} is asked for, but the file has {shown} = "
            f"{world}; change the file, or leave --world-size out"
        )
    if degrees["ep"] > 1:
        parallel.refuse(
            f"parallelism.expert_parallel_size={degrees['ep']} is an axis of its own "
            f"in nanotron, and not dealt out of dp x tp; set it to 1 to price the rest"
        )
    engine = str(parallel.take("pp_engine", str, "1f1b")).lower()
    if engine not in _ENGINES:
        raise StrategyError(
            f"parallelism.pp_engine={engine} is not one of {', '.join(_ENGINES)}"
        )
    scattered = str(parallel.take("tp_mode", str, "ALL_REDUCE")).upper()
    layers = parallel.take("recompute_layer", bool)
    experts = parallel.take("moe_layer_recompute", bool, False)
    if experts and not layers:
        parallel.skip("moe_layer_recompute", "selective recomputation is priced")
    parallel.pass_over(ignored_keys("nanotron.parallelism"))
    parallel.close(_DEGREES.values())
    precision, optimizer, stage, clip = _trained(keys)
    size, many = _batch(tokens, wanted, degrees["dp"])
    mesh, stage = _mesh(degrees, stage)
    others = ignored_keys("nanotron")
    keys.pass_over(others)
    keys.close(_SECTIONS, others)
    keys.finish("a nanotron config")
    said = "full" if layers else "selective" if experts else "none"
    return assembled(
        "nanotron",
        {
            "zero_stage": stage,
            "schedule": _ENGINES[engine] if degrees["pp"] > 1 else "GPipe",
            "microbatch_size": size,
            "num_microbatches": many,
            "precision": precision,
            "optimizer": optimizer,
            "grad_clip_norm": clip,
            "context_algorithm": "ring" if degrees["cp"] > 1 else "all_to_all",
            "sharding": {
                "sequence_parallel": scattered == "REDUCE_SCATTER" and mesh.tp > 1
            },
        },
        mesh=mesh,
        recompute=checked_recompute(
            wanted, None if layers is None else said, "parallelism.recompute_layer"
        ),
        ignored=keys.ignored,
    )


def _mesh(degrees: dict[str, int], stage: int) -> tuple[Mesh, int]:
    """Mesh, and ZeRO stage: 1 shards over all data-parallel ranks."""
    inner = {axis: degrees[axis] for axis in ("pp", "tp", "cp")}
    dp = degrees["dp"]
    if stage and dp * degrees["cp"] > 1:
        return Mesh(**inner, dp_shard=dp), stage
    return Mesh(**inner, dp_replicate=dp), 0


def _batch(tokens: Keys, wanted: Wanted, dp: int) -> tuple[int, int]:
    size = tokens.count("micro_batch_size") or wanted.microbatch_size or 1
    many = tokens.count("batch_accumulation_per_replica", 1)
    tokens.pass_over(ignored_keys("nanotron.tokens"))
    tokens.close(("micro_batch_size", "batch_accumulation_per_replica"))
    if wanted.microbatch_size not in (None, size):
        raise StrategyError(
            f"tokens.micro_batch_size={size}, but microbatch_size="
            f"{wanted.microbatch_size} is asked for; give what the file says"
        )
    if wanted.global_batch not in (None, size * many * dp):
        raise StrategyError(
            f"the file trains {size} x {many} x dp={dp} = {size * many * dp} samples a "
            f"step, but global_batch={wanted.global_batch} is asked for; change the "
            f"file, or leave it out"
        )
    return size, many


def _trained(keys: Keys) -> tuple[Precision, Optimizer, int, float | None]:
    """Precision, optimizer, ZeRO stage and clipping."""
    model, given = keys.inner("model"), keys.inner("optimizer")
    word = str(model.take("dtype", str, "bfloat16"))
    dtype = DTYPES.get(word)
    if dtype is None or dtype == "float8":
        raise StrategyError(
            f"model.dtype={word} is not one that Meshwright prices; use bfloat16, "
            f"float16 or float32"
        )
    model.pass_over(dict.fromkeys(list(model.data), "the model's own"))
    stage = given.take("zero_stage", int, 0)
    if stage not in (0, 1):
        raise StrategyError(f"optimizer.zero_stage={stage} is not 0 or 1")
    in_float32 = given.take("accumulate_grad_in_fp32", bool, True)
    # What is updated is what gradients are accumulated in.
    low = dtype == "bfloat16" and not in_float32
    schedule = given.inner("learning_rate_scheduler")
    factory = given.inner("optimizer_factory")
    rate = schedule.take("learning_rate", float, 3e-4)
    decay = given.take("weight_decay", float)
    clip = given.take("clip_grad", float)
    name = str(factory.take("name", str, "adamW")).lower()
    if name not in ("adamw", "sgd"):
        given.refuse(
            f"optimizer.optimizer_factory.name={name} is not one that Meshwright "
            f"prices; use adamW or sgd to price the rest"
        )
    betas = [
        factory.take(f"adam_beta{n}", float) or given.take(f"adam_beta{n}", float)
        for n in (1, 2)
    ]
    given.pass_over(ignored_keys("nanotron.optimizer"))
    given.close(("zero_stage", "accumulate_grad_in_fp32", "weight_decay", "clip_grad"))
    both = (betas[0], betas[1]) if None not in betas and name != "sgd" else None
    kept = "bfloat16" if low else "float32"
    return (
        Precision(
            parameter=kept,  # type: ignore[arg-type]
            compute=dtype,  # type: ignore[arg-type]
            reduce=kept,  # type: ignore[arg-type]
        ),
        Optimizer(
            name="SGD" if name == "sgd" else "AdamW",
            betas=both,
            learning_rate=rate or 3e-4,
            weight_decay=decay,
            state_dtype=kept,  # type: ignore[arg-type]
        ),
        stage,
        clip or None,
    )
