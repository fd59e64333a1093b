"""DeepSpeed's JSON (0.19) as a strategy."""

from __future__ import annotations

from typing import Any, Literal

from planner.errors import StrategyError
from planner.imports.base import (
    Imported,
    Keys,
    Wanted,
    assembled,
    divided,
    ignored_keys,
)
from planner.schema import Mesh, Optimizer, Precision

__all__ = ["deepspeed_strategy"]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "bfp16": "bfloat16"}

_KNOWN = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "bfloat16", "fp16"),
    *("gradient_accumulation_steps", "zero_optimization", "optimizer"),
    *("gradient_clipping", "communication_data_type", "tensor_parallel", "pipeline"),
    *("sequence_parallel_size", "data_parallel_size"),
)


def deepspeed_strategy(
    data: dict[str, Any], wanted: Wanted, *, recompute: Any = "none"
) -> Imported:
    """Read a config file.

    Args:
        data: Its JSON.
        wanted: Values that it lacks.
        recompute: Activations that the training script recomputes; the file has no
            key for it.

    Raises:
        StrategyError: If sizes contradict each other, or something is asked for that
            Meshwright does not price.
        UnknownNameError: If a key is not known.
    """
    keys = Keys(data=dict(data))
    tp, cp, pp = _axes(keys)
    size, many, dp = _batch(keys, wanted, inner=tp * cp * pp)
    stage, shard = _zero(keys, dp, cp)
    bf16 = data.get("bf16")
    states = isinstance(bf16, dict) and bf16.get("bf16_optimizer_states")
    fields: dict[str, Any] = {
        "zero_stage": stage,
        "schedule": "1F1B" if pp > 1 else "GPipe",
        "microbatch_size": size,
        "num_microbatches": many,
        "precision": _precision(keys),
        "optimizer": _optimizer(keys, "bfloat16" if states else "float32"),
        "grad_clip_norm": keys.take("gradient_clipping", float) or None,
        "context_algorithm": "all_to_all",
    }
    others = ignored_keys("deepspeed")
    keys.pass_over(others)
    keys.close("a DeepSpeed config", (*_KNOWN, *others))
    mesh = Mesh(pp=pp, dp_replicate=dp // shard, dp_shard=shard, cp=cp, tp=tp)
    return assembled(
        "deepspeed", fields, mesh=mesh, recompute=recompute, ignored=keys.ignored
    )


def _axes(keys: Keys) -> tuple[int, int, int]:
    """tp, cp and pp."""
    tensor = keys.inner("tensor_parallel")
    tp = tensor.count("autotp_size", 1)
    tensor.pass_over(
        dict.fromkeys(
            ("partition_config", "preset_model", "tp", "dtype", "tp_grain_size"),
            "which weights are split; Meshwright's own choice is priced",
        )
    )
    tensor.close("tensor_parallel", ("autotp_size", "partition_config"))
    pipeline = keys.data.get("pipeline")
    pp = 1
    if isinstance(pipeline, dict):
        inner = keys.inner("pipeline")
        stages = inner.data.pop("stages", None)
        pp = stages if isinstance(stages, int) and stages > 0 else 1
        inner.pass_over(
            dict.fromkeys(
                ("partition", "seed_layers", "activation_checkpoint_interval"),
                "PipelineModule's; the model is cut for the strategy",
            )
        )
        inner.close("pipeline", ("stages", "partition"))
    return tp, keys.count("sequence_parallel_size", 1), pp


def _batch(keys: Keys, wanted: Wanted, *, inner: int) -> tuple[int, int, int]:
    """Microbatch, their number, data parallel."""
    batch = keys.count("train_batch_size") or wanted.global_batch
    size = keys.count("train_micro_batch_size_per_gpu") or wanted.microbatch_size
    many = keys.count("gradient_accumulation_steps")
    dp = keys.count("data_parallel_size")
    if wanted.global_batch and batch != wanted.global_batch:
        raise StrategyError(
            f"train_batch_size={batch}, but global_batch={wanted.global_batch} is "
            f"asked for; give what the file says"
        )
    if wanted.world_size:
        found = divided(
            "world_size", wanted.world_size, by=inner, rule="tp x cp x pp of the file"
        )
        if dp and dp != found:
            raise StrategyError(
                f"data_parallel_size={dp} x {inner} is not world_size="
                f"{wanted.world_size}"
            )
        dp = found
    if not dp and batch and size:
        dp = divided(
            "train_batch_size",
            batch,
            by=size * (many or 1),
            rule="train_micro_batch_size_per_gpu x gradient_accumulation_steps",
        )
        if not many:
            raise StrategyError(
                "the file does not say over how many devices its batch is spread; give "
                "--world-size, or gradient_accumulation_steps"
            )
    if not dp:
        raise StrategyError(
            "the file does not say how many devices there are; give --world-size"
        )
    if size is None:
        size = divided("train_batch_size", batch or dp, by=dp * (many or 1), rule="dp")
    if many is None:
        many = (
            divided("train_batch_size", batch, by=dp * size, rule="micro x dp")
            if (batch)
            else 1
        )
    if batch and batch != size * many * dp:
        raise StrategyError(
            f"train_batch_size={batch} is not train_micro_batch_size_per_gpu={size} x "
            f"gradient_accumulation_steps={many} x data parallel {dp} = "
            f"{size * many * dp}; correct one of them, or --world-size"
        )
    return size, many, dp


def _zero(keys: Keys, dp: int, cp: int) -> tuple[int, int]:
    """ZeRO stage, and over how many replicas it shards, beside the cp ranks of each."""
    zero = keys.inner("zero_optimization")
    stage = zero.take("stage", int, 0)
    if stage not in (0, 1, 2, 3):
        raise StrategyError(f"zero_optimization.stage={stage} is not 0 to 3")
    for name in ("offload_param", "offload_optimizer", "cpu_offload"):
        there = zero.data.pop(name, None)
        device = there.get("device", "none") if isinstance(there, dict) else there
        if device not in (None, False, "none"):
            raise StrategyError(
                f"zero_optimization.{name}={device}: Meshwright does not price "
                f"offloading; take it out to price the rest"
            )
    mics = zero.take("mics_shard_size", int, -1)
    buffers = ignored_keys("deepspeed.zero_optimization")
    zero.pass_over(buffers)
    zero.close("zero_optimization", ("stage", "mics_shard_size", *buffers))
    if stage and dp * cp == 1:
        zero.skip("stage", "there is one replica, and nothing to shard over")
    if not stage or dp * cp == 1:
        return 0, 1
    if mics > 0:
        divided("data parallel", dp, by=mics, rule="zero_optimization.mics_shard_size")
        return stage, mics
    return stage, dp


def _precision(keys: Keys) -> Precision:
    bf16, old, fp16 = (keys.inner(name) for name in ("bf16", "bfloat16", "fp16"))
    low = bool(bf16.data.get("bf16_master_weights_and_grads"))
    compute = "float32"
    if bf16.data.get("enabled") or old.data.get("enabled"):
        compute = "bfloat16"
    if fp16.data.get("enabled"):
        if compute == "bfloat16":
            raise StrategyError("fp16.enabled and bf16.enabled are both on; keep one")
        compute = "float16"
    reduce = keys.take("communication_data_type", str)
    if reduce is not None and reduce not in _DTYPES:
        raise StrategyError(
            f"communication_data_type={reduce} is not one of {', '.join(_DTYPES)} that "
            f"Meshwright prices"
        )
    # Without a word gradients travel as they are computed.
    natural = "bfloat16" if compute == "bfloat16" else "float32"
    return Precision(
        parameter="bfloat16" if low else "float32",
        compute=compute,  # type: ignore[arg-type]
        reduce=_DTYPES[reduce] if reduce else natural,  # type: ignore[arg-type]
    )


def _optimizer(keys: Keys, states: Literal["float32", "bfloat16"]) -> Optimizer:
    given = keys.inner("optimizer")
    if not given.data:
        return Optimizer(state_dtype=states)
    kind = given.take("type", str, "AdamW")
    settings = given.inner("params")
    rate = settings.take("lr", float, 3e-4)
    decay = settings.take("weight_decay", float, 0.0)
    momentum = settings.take("momentum", float, 0.0)
    decoupled = settings.take("adam_w_mode", bool, True)
    betas = settings.take("betas", list, [])
    settings.pass_over(
        dict.fromkeys(("eps", "torch_adam", "bias_correction"), "arithmetic")
    )
    settings.close("optimizer.params", ("lr", "weight_decay", "momentum", "betas"))
    given.pass_over({"legacy_fusion": "arithmetic"})
    given.close("optimizer", ("type", "params"))
    names = {"adam": "AdamW" if decoupled else "Adam", "adamw": "AdamW", "sgd": "SGD"}
    if kind.lower() not in names:
        raise StrategyError(
            f"optimizer.type={kind} is not one that Meshwright prices; use Adam, AdamW "
            f"or SGD to price the rest"
        )
    numbers = all(isinstance(one, int | float) and 0 <= one < 1 for one in betas)
    if betas and (len(betas) != 2 or not numbers):
        raise StrategyError(
            f"optimizer.params.betas={betas} are not two numbers from 0 to below 1; "
            f"correct them"
        )
    return Optimizer(
        name=names[kind.lower()],  # type: ignore[arg-type]
        betas=tuple(betas) or None,
        learning_rate=rate,
        weight_decay=decay,
        momentum=momentum,
        state_dtype=states,
    )
