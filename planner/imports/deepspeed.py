"""DeepSpeed's JSON (0.19) as a strategy."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from planner.errors import StrategyError
from planner.imports.base import (
    Imported,
    Keys,
    OffloadedPart,
    Wanted,
    assembled,
    checked_recompute,
    computed_in,
    divided,
    ignored_keys,
)
from planner.schema import Communication, Mesh, Optimizer, Precision
from planner.schema.strategy_parts import ShardTraffic

__all__ = ["deepspeed_of_keys", "deepspeed_strategy"]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "bfp16": "bfloat16"}

_KNOWN = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "bfloat16", "fp16"),
    *("gradient_accumulation_steps", "zero_optimization", "optimizer", "compile"),
    *("gradient_clipping", "communication_data_type", "tensor_parallel", "pipeline"),
    *("sequence_parallel_size", "data_parallel_size", "compression_training"),
)
_SIZES = (
    *("train_batch_size", "train_micro_batch_size_per_gpu"),
    "gradient_accumulation_steps",
)
#: Optimizers of DeepSpeed, by torch's names; those of LAMB have Adam's states.
_NAMES = {
    "adam": "AdamW",
    "adamw": "AdamW",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "muon": "Muon",
}

_LIKE_ADAM = ("lamb", "fusedlamb", "fusedadam", "cpuadam", "deepspeedcpuadam")
#: Words of a section that changes what is trained or sent, and why it is refused.
_CHANGES = {
    "sparse_gradients": "gradients of embeddings travel as rows",
    "elasticity": "it changes the batch while training",
    "hybrid_engine": "it generates text between steps",
    "autotuning": "it chooses the strategy when it starts",
    "sparse_attention": "the model's attention skips blocks that are priced",
    "amp": "apex chooses the data types; write fp16 or bf16",
}


def deepspeed_strategy(data: dict[str, Any], wanted: Wanted) -> Imported:
    """Read a config file.

    Args:
        data: Its JSON.
        wanted: Values that it lacks.

    Raises:
        StrategyError: If sizes contradict each other, something is asked for that
            Meshwright does not price, or keys that may change the strategy are not
            known.
    """
    keys = Keys(data=dict(data), without_offload=wanted.without_offload)
    return deepspeed_of_keys(keys, wanted)


def deepspeed_of_keys(
    keys: Keys, wanted: Wanted, *, source: str = "deepspeed", compiled: bool = False
) -> Imported:
    """Read a DeepSpeed config, on its own or of a config that hands over to it.

    Args:
        keys: Its keys.
        wanted: Values that it lacks.
        source: Launcher that hands over.
        compiled: True if that launcher compiles.

    Raises:
        StrategyError: As :func:`deepspeed_strategy`.
    """
    axes = _axes(keys)
    zero = _zero(keys)
    precision = _precision(keys, wanted)
    bf16 = keys.data.pop("bf16", None)
    states = isinstance(bf16, dict) and bf16.get("bf16_optimizer_states")
    optimizer = _optimizer(keys, "bfloat16" if states else "float32")
    clip = keys.take("gradient_clipping", float) or None
    compiled = _compiled(keys) or compiled
    _sections(keys)
    size, many, dp = _batch(keys, wanted, inner=axes.tp * axes.cp * axes.pp)
    others = ignored_keys("deepspeed")
    keys.pass_over(others)
    keys.close(_KNOWN, others)
    keys.finish("a DeepSpeed config")
    stage, shard = _shared(keys, zero, dp, axes.cp)
    fields: dict[str, Any] = {
        "zero_stage": stage,
        "schedule": "1F1B" if axes.pp > 1 else "GPipe",
        "microbatch_size": size,
        "num_microbatches": many,
        "precision": precision,
        "optimizer": optimizer,
        "grad_clip_norm": clip,
        "context_algorithm": "all_to_all",
        "compile": compiled,
        "offload": keys.offload,
    }
    if stage == 3 and zero.shards.second_copy > 1:
        divided(
            "the ranks that ZeRO shards over",
            shard * axes.cp,
            by=zero.shards.second_copy,
            rule="zero_optimization.zero_hpz_partition_size",
        )
    if stage == 3 and zero.shards != ShardTraffic():
        fields["communication"] = Communication(shards=zero.shards)
        fields["semantics"] = "approximate" if _inexact(zero.shards) else "exact"
    mesh = Mesh(
        pp=axes.pp, dp_replicate=dp // shard, dp_shard=shard, cp=axes.cp, tp=axes.tp
    )
    return assembled(
        source,
        fields,
        mesh=mesh,
        recompute=checked_recompute(wanted, None, ""),
        ignored=keys.ignored,
    )


class _Axes(NamedTuple):
    tp: int
    cp: int
    pp: int


def _axes(keys: Keys) -> _Axes:
    tensor = keys.inner("tensor_parallel")
    tp = tensor.count("autotp_size", 1)
    tensor.pass_over(
        dict.fromkeys(
            ("partition_config", "preset_model", "tp", "dtype", "tp_grain_size"),
            "which weights are split; Meshwright's own choice is priced",
        )
    )
    tensor.close(("autotp_size", "partition_config"))
    pp = 1
    if isinstance(keys.data.get("pipeline"), dict):
        inner = keys.inner("pipeline")
        stages = inner.data.pop("stages", None)
        pp = stages if isinstance(stages, int) and stages > 0 else 1
        inner.pass_over(
            dict.fromkeys(
                ("partition", "seed_layers", "activation_checkpoint_interval"),
                "PipelineModule's; the model is cut for the strategy",
            )
        )
        inner.close(("stages", "partition"))
    keys.data.pop("pipeline", None)
    return _Axes(tp=tp, cp=keys.count("sequence_parallel_size", 1), pp=pp)


def _batch(keys: Keys, wanted: Wanted, *, inner: int) -> tuple[int, int, int]:
    """Microbatch, their number, data parallel."""
    auto = [key for key in _SIZES if keys.data.get(key) == "auto"]
    for key in auto:
        del keys.data[key]
    batch = keys.count("train_batch_size") or wanted.global_batch
    size = keys.count("train_micro_batch_size_per_gpu")
    if size and wanted.microbatch_size not in (None, size):
        raise StrategyError(
            f"train_micro_batch_size_per_gpu={size}, but microbatch_size="
            f"{wanted.microbatch_size} is asked for; give what the file says"
        )
    size = size or wanted.microbatch_size
    many = keys.count("gradient_accumulation_steps")
    if wanted.global_batch and batch != wanted.global_batch:
        raise StrategyError(
            f"train_batch_size={batch}, but global_batch={wanted.global_batch} is "
            f"asked for; give what the file says"
        )
    dp = _replicas(keys, wanted, inner, batch=batch, per_device=(size, many))
    if size is None and (auto or not batch):
        size = 1
    if size is None:
        size = divided("train_batch_size", batch or dp, by=dp * (many or 1), rule="dp")
    if many is None:
        rule = "train_micro_batch_size_per_gpu x data parallel"
        many = (
            divided("train_batch_size", batch, by=dp * size, rule=rule) if batch else 1
        )
    if batch and batch != size * many * dp:
        raise StrategyError(
            f"train_batch_size={batch} is not train_micro_batch_size_per_gpu={size} x "
            f"gradient_accumulation_steps={many} x data parallel {dp} = "
            f"{size * many * dp}; correct one of them, or --world-size"
        )
    priced = dict(zip(_SIZES, (size * many * dp, size, many), strict=True))
    remedy = {_SIZES[0]: "--global-batch", _SIZES[1]: "--microbatch-size"}
    for key in auto:
        keys.skip(
            key,
            f"auto: the trainer's; {priced[key]} is priced, "
            f"{remedy.get(key, '--global-batch')} says another",
        )
    return size, many, dp


def _replicas(
    keys: Keys,
    wanted: Wanted,
    inner: int,
    *,
    batch: int | None,
    per_device: tuple[int | None, int | None],
) -> int:
    """Data-parallel ranks, by the number of processes or by the batch."""
    dp: int | None = keys.count("data_parallel_size")
    if wanted.world_size:
        found = divided(
            "world_size", wanted.world_size, by=inner, rule="tp x cp x pp of the file"
        )
        if dp and dp != found:
            raise StrategyError(
                f"data_parallel_size={dp} x {inner} is not world_size="
                f"{wanted.world_size}"
            )
        return found
    size, many = per_device
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
    return dp


#: Keys that move states to the host, by the names of all releases.
_OFFLOAD: dict[str, OffloadedPart] = {
    "offload_param": "parameters",
    "offload_optimizer": "optimizer",
    "cpu_offload": "optimizer",
    "cpu_offload_params": "parameters",
}


class _Zero(NamedTuple):
    stage: int
    mics: int
    shards: ShardTraffic


def _zero(keys: Keys) -> _Zero:
    """ZeRO's stage, over how many replicas MiCS shards, and what shards are sent as."""
    if isinstance(keys.data.get("zero_optimization"), bool):
        # The oldest form, when there was one stage.
        on = keys.data.pop("zero_optimization")
        return _Zero(stage=int(on), mics=-1, shards=ShardTraffic())
    zero = keys.inner("zero_optimization")
    if zero.data.get("stage") == "auto":
        raise StrategyError(
            "zero_optimization.stage=auto: no trainer fills it in; write 0 to 3"
        )
    stage = zero.take("stage", int, 0)
    if stage not in (0, 1, 2, 3):
        raise StrategyError(f"zero_optimization.stage={stage} is not 0 to 3")
    for name, part in _OFFLOAD.items():
        _take_offload(zero, name, part, stage)
    if zero.offload.states == "parameters" and "optimizer" not in zero.offloaded:
        zero.skip("offload_param", "the optimizer's states are priced on the host, too")
    shards = _shard_traffic(zero, stage)
    mics = zero.take("mics_shard_size", int, -1)
    buffers = ignored_keys("deepspeed.zero_optimization")
    zero.pass_over(buffers)
    zero.close(("stage", "mics_shard_size", "offload_optimizer"), buffers)
    return _Zero(stage=stage, mics=mics, shards=shards)


def _take_offload(zero: Keys, name: str, part: OffloadedPart, stage: int) -> None:
    """Take one of the keys that move states to the host, if ZeRO's stage heeds it."""
    there = zero.data.pop(name, None)
    device = there.get("device", "none") if isinstance(there, dict) else there
    if device in (None, False, "none", "auto"):
        return
    least = 3 if part == "parameters" else 1
    if stage < least:
        zero.skip(name, f"no effect below stage {least}")
        return
    share = there.get("ratio", 1.0) if isinstance(there, dict) and stage == 3 else 1.0
    if share != 1.0 and not zero.without_offload:
        zero.refuse(
            f"{zero.where}{name}.ratio={share}: Meshwright prices all states in the "
            f"host's memory, or none; use 1.0, or give --without-offload, to price the "
            f"rest"
        )
    zero.take_offload(name, "cpu" if device is True else device, part)


def _shard_traffic(zero: Keys, stage: int) -> ShardTraffic:
    """Take ZeRO++'s options (Wang et al. 2023, arXiv:2306.10209)."""
    frozen = "zero_quantized_nontrainable_weights"
    if zero.take(frozen, bool, False):
        zero.skip(
            frozen,
            "not priced: frozen weights are gathered in 8 bits; 16 are priced, so this "
            "is slower than it will be",
        )
    given = {
        "zero_hpz_partition_size": max(1, zero.take("zero_hpz_partition_size", int, 1)),
        "zero_quantized_weights": zero.take("zero_quantized_weights", bool, False),
        "zero_quantized_gradients": zero.take("zero_quantized_gradients", bool, False),
    }
    group, weights, gradients = given.values()
    if stage == 3:
        return ShardTraffic(
            second_copy=group,
            weight_bits=8 if weights else None,
            gradient_bits=4 if gradients else None,
        )
    for key, value in given.items():
        if int(value) > int(key == "zero_hpz_partition_size"):
            zero.skip(key, "no effect below stage 3")
    return ShardTraffic()


def _inexact(shards: ShardTraffic) -> bool:
    return shards.weight_bits is not None or shards.gradient_bits is not None


def _shared(keys: Keys, zero: _Zero, dp: int, cp: int) -> tuple[int, int]:
    """ZeRO stage, and over how many replicas it shards, beside the cp ranks of each."""
    if zero.stage and dp * cp == 1:
        keys.skip(
            "zero_optimization.stage", "there is one replica, and nothing to shard over"
        )
    if not zero.stage or dp * cp == 1:
        return 0, 1
    if zero.mics > 0:
        rule = "zero_optimization.mics_shard_size"
        divided("data parallel", dp, by=zero.mics, rule=rule)
        return zero.stage, zero.mics
    return zero.stage, dp


def _on(keys: Keys, name: str) -> object:
    """Value of ``enabled`` of a section: a bool or ``auto``; bare words are taken."""
    section = keys.data.get(name)
    if isinstance(section, dict):
        found: object = section.get("enabled", False)
        return found
    return section or False


def _compute(keys: Keys, wanted: Wanted) -> str:
    """Data type of products.

    Raises:
        StrategyError: If the file has two, or the user another.
    """
    brain = _on(keys, "bf16") or _on(keys, "bfloat16")
    half = _on(keys, "fp16")
    cast = keys.inner("torch_autocast")
    if cast.data.get("enabled"):
        word = str(cast.data.get("dtype", "bfloat16")).removeprefix("torch.")
        if word not in ("bfloat16", "float16"):
            raise StrategyError(
                f"torch_autocast.dtype={word} is not one of bfloat16, float16"
            )
        brain, half = brain or word == "bfloat16", half or word == "float16"
    if brain is True and half is True:
        raise StrategyError("fp16.enabled and bf16.enabled are both on; keep one")
    if brain is True or half is True:
        compute = "bfloat16" if brain is True else "float16"
        if wanted.dtype not in (None, compute, "float8"):
            raise StrategyError(
                f"--dtype {wanted.dtype}, but the file computes in {compute}; change "
                f"the file, or leave --dtype out"
            )
        return wanted.dtype or compute
    if brain == "auto":
        return computed_in(keys, "bf16.enabled", wanted, "bfloat16")
    if half == "auto":
        return computed_in(keys, "fp16.enabled", wanted, "float16")
    return wanted.dtype or "float32"


def _precision(keys: Keys, wanted: Wanted) -> Precision:
    compute = _compute(keys, wanted)
    section = keys.data.get("bf16")
    low = isinstance(section, dict) and bool(
        section.get("bf16_master_weights_and_grads")
    )
    for name in ("bfloat16", "fp16"):
        keys.data.pop(name, None)
    whole = "fp32" if keys.take("fp32_allreduce", bool, False) else None
    reduce = keys.take("communication_data_type", str, whole)
    if reduce is not None and reduce not in _DTYPES:
        if reduce not in ("fp16", "float16"):
            raise StrategyError(
                f"communication_data_type={reduce} is not one of "
                f"{', '.join((*_DTYPES, 'fp16'))}"
            )
        keys.skip("communication_data_type", "fp16, priced as bf16, which is as long")
        reduce = "bf16"
    # Without a word gradients travel as they are computed.
    natural = "float32" if compute == "float32" else "bfloat16"
    return Precision(
        parameter="bfloat16" if low else "float32",
        compute=compute,  # type: ignore[arg-type]
        reduce=_DTYPES[reduce] if reduce else natural,  # type: ignore[arg-type]
    )


def _compiled(keys: Keys) -> bool:
    section = keys.data.pop("compile", None)
    if not isinstance(section, dict):
        return bool(section)
    return not section.get("disable") and section.get("enabled", True) is not False


def _sections(keys: Keys) -> None:
    """Refuse sections that are on and change what is computed or sent."""
    for name, why in _CHANGES.items():
        section = keys.data.pop(name, None)
        if section and _enabled(section):
            keys.refuse(f"{name}: {why}; take it out to price the rest")
    for name in ("progressive_layer_drop", "data_efficiency", "curriculum_learning"):
        section = keys.data.pop(name, None)
        if section and _enabled(section):
            keys.skip(name, "some steps are shorter; a whole step is priced")
    if keys.data.pop("compression_training", None):
        keys.skip(
            "compression_training",
            "the model's own layers; price the model that they are put into",
        )


def _enabled(section: object) -> bool:
    return not isinstance(section, dict) or section.get("enabled", True) is not False


def _optimizer(keys: Keys, states: Literal["float32", "bfloat16"]) -> Optimizer:
    given = keys.inner("optimizer")
    if not given.data:
        return Optimizer(state_dtype=states)
    kind = given.take("type", str, "AdamW")
    settings = given.inner("params")
    rate = settings.take("lr", float, 3e-4)
    decay = settings.take("weight_decay", float)
    momentum = settings.take("momentum", float, 0.0)
    decoupled = settings.take("adam_w_mode", bool, True)
    betas = settings.take("betas", list, [])
    settings.pass_over(dict.fromkeys(list(settings.data), "arithmetic"))
    given.pass_over({"legacy_fusion": "arithmetic"})
    given.close(("type", "params"))
    word = kind.lower()
    if word in _LIKE_ADAM:
        given.skip("type", f"{kind}, priced as AdamW, which has as many states")
        word = "adamw"
    if word not in _NAMES:
        given.refuse(
            f"optimizer.type={kind} is not one that Meshwright prices; use Adam, "
            f"AdamW, Lamb, Adagrad, Muon or SGD to price the rest"
        )
        word = "adamw"
    numbers = all(isinstance(one, int | float) and 0 <= one < 1 for one in betas)
    if betas and (len(betas) != 2 or not numbers):
        raise StrategyError(
            f"optimizer.params.betas={betas} are not two numbers from 0 to below 1; "
            f"correct them"
        )
    name = _NAMES[word] if decoupled or word != "adam" else "Adam"
    return Optimizer(
        name=name,  # type: ignore[arg-type]
        betas=tuple(betas) or None if name in ("Adam", "AdamW") else None,
        learning_rate=rate or 3e-4,
        weight_decay=decay,
        momentum=momentum if name == "SGD" else 0.0,
        state_dtype=states,
    )
