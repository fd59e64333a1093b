"""Recipes (0.3 and main) and TOML files (0.1 and 0.2) of torchtitan as strategies."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass
from typing import Any

from planner.errors import PlanFileError, StrategyError
from planner.imports.base import (
    Imported,
    Keys,
    Wanted,
    assembled,
    checked_recompute,
    divided,
    ignored_keys,
)
from planner.imports.recipes import Call, Open, read_recipe
from planner.schema import Mesh, Optimizer, Precision
from planner.schema.schedules import schedule_names, schedule_spec

__all__ = ["is_recipe", "torchtitan_text"]

_RECIPE = re.compile(
    r"^def \w+\(.*\)( -> [\w.\"']*Config[\"']?)?:|^from torchtitan", re.M
)
_AXES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
_POLICIES = {
    "none": "none",
    "full": "full",
    "selective": "selective",
    "op": "selective",
}


def is_recipe(text: str) -> bool:
    """True if a text is Python that makes a config of torchtitan."""
    return bool(_RECIPE.search(text)) and "torchtitan" in text


def torchtitan_text(text: str, wanted: Wanted, where: str) -> Imported:
    """Read a recipe, or a TOML file.

    Args:
        text: The file.
        wanted: At least ``world_size``, unless every degree is given; ``recipe`` for a
            file with several.
        where: Its path, for messages.

    Raises:
        PlanFileError: If it is neither Python nor TOML.
        StrategyError: If it contradicts itself, or asks for what Meshwright does not
            price.
    """
    if is_recipe(text):
        return _read(_sections(read_recipe(text, wanted.recipe, where)), wanted, True)
    if wanted.recipe:
        raise StrategyError(
            f"{where} is no Python file, so --recipe {wanted.recipe} has no effect; "
            f"leave it out"
        )
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PlanFileError(f"{where}: neither TOML nor a recipe: {error}") from error
    return _read(_older(data), wanted, False)


def _plain(value: Any) -> Any:
    """A call's fields as a mapping."""
    if isinstance(value, Call):
        if not value.name.endswith(("Config", "replace")) and not value.fields:
            return Open(f"{value.name}(…)")
        return {key: _plain(item) for key, item in value.fields.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _sections(config: Call) -> dict[str, Any]:
    """A recipe's config in the sections of a TOML file."""
    fields = config.fields
    data: dict[str, Any] = {
        name: _plain(fields[name])
        for name in ("training", "parallelism", "compile")
        if name in fields
    }
    policy = fields.get("activation_checkpoint", Call("SelectiveAC.Config"))
    word = policy.name if isinstance(policy, Call) else str(policy)
    mode = word.partition("AC")[0].rpartition(".")[2].lower()
    data["activation_checkpoint"] = {"mode": mode if policy is not None else "none"}
    data["optimizer"] = _optimizer_fields(fields.get("optimizer"))
    spec = fields.get("model_spec")
    converters = spec.fields.get("converters", []) if isinstance(spec, Call) else []
    found = converters if isinstance(converters, list) else []
    data["model"] = {"converters": [c.name for c in found if isinstance(c, Call)]}
    return data


def _optimizer_fields(given: Any) -> dict[str, Any]:
    if not isinstance(given, Call):
        return {}
    if given.name == "default_adamw":
        rate = given.fields.get("lr", given.arguments[0] if given.arguments else 8e-4)
        plain = {"lr": rate, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}
        return (
            {"name": "AdamW"}
            | plain
            | {key: value for key, value in given.fields.items() if key in plain}
        )
    groups = given.fields.get("param_groups")
    if groups is None and {"name", "lr"} & set(given.fields):
        return dict(given.fields)
    if not isinstance(groups, list) or not all(isinstance(g, Call) for g in groups):
        return {"name": given.name} if groups is not None or given.arguments else {}
    names = {str(group.fields.get("optimizer_name", "AdamW")) for group in groups}
    if not groups or names - {"AdamW", "Adam"}:
        return {"name": ", ".join(sorted(names)) or given.name}
    last = groups[-1].fields
    kwargs = last.get("optimizer_kwargs", {})
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    betas = kwargs.get("betas")
    both = betas if isinstance(betas, list) and len(betas) == 2 else [None, None]
    return {
        "name": last.get("optimizer_name", "AdamW"),
        "lr": kwargs.get("lr"),
        "weight_decay": kwargs.get("weight_decay"),
        "beta1": both[0],
        "beta2": both[1],
        "implementation": given.fields.get("implementation"),
    }


def _older(data: dict[str, Any]) -> dict[str, Any]:
    """Sections of a TOML file, with degrees where 0.2 has them."""
    parallel: dict[str, Any] = {}
    for section in ("experimental", "training"):
        found = data.get(section)
        inner: dict[str, Any] = found if isinstance(found, dict) else {}
        for key in list(inner):
            if "_degree" in key or key.startswith("pipeline_parallel"):
                parallel[key] = inner.pop(key)
    parallel |= data.get("parallelism", {})
    return {**data, "parallelism": parallel}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipeline:
    """The pipeline of a config.

    Attributes:
        schedule: Name as in a strategy.
        virtual: Stages a rank.
        cut: Layers of every stage, if they are named.
        size: Samples per microbatch; None for what a rank takes at once.
        many: Microbatches that a rank's samples are cut into; None by ``size``.
    """

    schedule: str
    virtual: int
    cut: tuple[int, ...]
    size: int | None
    many: int | None


def _read(data: dict[str, Any], wanted: Wanted, recipe: bool) -> Imported:
    keys = Keys(data=data, without_offload=wanted.without_offload)
    parallel, training = keys.inner("parallelism"), keys.inner("training")
    _require_values(parallel, training)
    pp = parallel.count(_AXES["pp"], 1)
    pipeline = _pipeline(parallel, pp)
    mesh, stage, loss = _mesh(parallel, wanted, pp)
    streams = parallel.take("enable_sequence_parallel", bool, True)
    parallel.pass_over(ignored_keys("torchtitan.parallelism"))
    parallel.close((*_AXES.values(), "data_parallel_shard_degree"))
    precision = _precision(keys, training, wanted)
    size, many = _batch(training, wanted, mesh, pipeline, recipe)
    clip = training.data.pop("max_norm", 1.0)
    if training.take("enable_cpu_offload", bool, False):
        training.take_offload("enable_cpu_offload", "true", "parameters")
    training.pass_over(ignored_keys("torchtitan.training"))
    training.close(("local_batch_size", "global_batch_size", "dtype"))
    optimizer = _optimizer(keys, precision)
    compiled, recompute = _compiled(keys), _recompute(keys)
    keys.pass_over(ignored_keys("torchtitan"))
    keys.close(("parallelism", "training", "activation_checkpoint", "compile"))
    keys.finish("a torchtitan config")
    return assembled(
        "torchtitan",
        {
            "zero_stage": stage,
            "schedule": pipeline.schedule if pp > 1 else "GPipe",
            "virtual_stages": pipeline.virtual,
            "microbatch_size": size,
            "num_microbatches": many,
            "precision": precision,
            "optimizer": optimizer,
            "grad_clip_norm": clip if clip and math.isfinite(clip) else None,
            "compile": compiled,
            "offload": keys.offload,
            "context_algorithm": "ring" if mesh.cp > 1 else "all_to_all",
            "sharding": {
                "sequence_parallel": bool(streams) and mesh.tp > 1,
                "loss_parallel": loss and mesh.tp > 1,
            },
        },
        mesh=mesh,
        recompute=checked_recompute(wanted, recompute, "activation_checkpoint"),
        ignored=keys.ignored,
        cut=pipeline.cut,
    )


def _require_values(*sections: Keys) -> None:
    """Refuse values that only running a recipe would tell.

    Raises:
        StrategyError: Naming each of them.
    """
    found = [
        f"{section.where}{key}={value.text}"
        for section in sections
        for key, value in section.data.items()
        if isinstance(value, Open)
    ]
    if found:
        raise StrategyError(
            f"{', '.join(found)}: cannot be told without running the recipe; write "
            f"numbers"
        )


def _pipeline(parallel: Keys, pp: int) -> _Pipeline:
    name = parallel.take("pipeline_parallel_schedule", str, "1F1B")
    file = parallel.data.pop("pipeline_parallel_schedule_csv", None)
    parts = parallel.data.pop("module_fqns_per_model_part", None)
    points = parallel.data.pop("pipeline_parallel_split_points", None)
    layers = parallel.data.pop("pipeline_parallel_layers_per_stage", None)
    size = parallel.data.pop("pipeline_parallel_microbatch_size", None)
    many = parallel.data.pop("num_pp_microbatches", None)
    if pp == 1:
        return _Pipeline(schedule="GPipe", virtual=1, cut=(), size=None, many=None)
    bare = {key.lower(): key for key in schedule_names()}
    schedule = bare.get(name.lower().removeprefix("schedule"))
    if schedule is None or file:
        parallel.refuse(
            f"parallelism.pipeline_parallel_schedule={file or name} is not one that "
            f"Meshwright prices; use one of {', '.join(schedule_names())}"
        )
        schedule = "1F1B"
    if layers is not None:
        parallel.skip(
            "pipeline_parallel_layers_per_stage",
            f"{layers} layers a stage; --pin and the model's cut say how many stages",
        )
    stages = len(parts) if parts else len(points) + 1 if points else None
    several = schedule_spec(schedule).virtual_stages != (1, 1)
    virtual = 2 if several else 1
    if stages is not None:
        rule = f"stages, pipeline_parallel_degree={pp}"
        virtual = divided("module_fqns_per_model_part", stages, by=pp, rule=rule)
    cut = tuple(
        sum(bool(re.fullmatch(r"layers\.\d+", str(name))) for name in part)
        for part in parts or ()
    )
    return _Pipeline(schedule=schedule, virtual=virtual, cut=cut, size=size, many=many)


def _mesh(parallel: Keys, wanted: Wanted, pp: int) -> tuple[Mesh, int, bool]:
    """Mesh, ZeRO stage, and True if the loss is taken of sharded logits."""
    degrees = {axis: parallel.count(key, 1) for axis, key in _AXES.items()}
    degrees["pp"] = pp
    shard = parallel.take("data_parallel_shard_degree", int, -1)
    known = math.prod(degrees.values())
    if shard == -1:
        if wanted.world_size is None:
            raise StrategyError(
                "data_parallel_shard_degree=-1 takes the processes that are left; give "
                "--world-size"
            )
        shown = " x ".join(f"{axis}={size}" for axis, size in degrees.items())
        shard = divided("world_size", wanted.world_size, by=known, rule=shown)
    elif wanted.world_size not in (None, known * shard):
        raise StrategyError(
            f"world_size={wanted.world_size} is asked for, but the degrees of the file "
            f"multiply to {known * shard}; change the file, or leave --world-size out"
        )
    etp = parallel.count("expert_tensor_parallel_degree", 1)
    ep = parallel.count("expert_parallel_degree", 1) * etp
    if etp > 1:
        parallel.skip(
            "expert_tensor_parallel_degree",
            f"experts are split over {etp} ranks, and priced as dealt out whole over "
            f"as many: the same bytes on a rank, other traffic of tokens",
        )
    ranks = shard * degrees["cp"] * degrees["tp"]
    if ranks % ep:
        raise StrategyError(
            f"expert_parallel_degree={ep} does not divide dp_shard x cp x tp = "
            f"{ranks}; use a divisor, or another --world-size"
        )
    policy = str(parallel.take("fsdp_reshard_after_forward", str, "default"))
    stages = {"always": 3, "never": 2, "default": 2 if pp > 1 else 3}
    if policy not in stages:
        raise StrategyError(
            f"fsdp_reshard_after_forward={policy} is not one of {', '.join(stages)}"
        )
    mesh = Mesh(**degrees, dp_shard=shard, ep=ep)
    loss = not parallel.take("disable_loss_parallel", bool, False)
    return mesh, stages[policy] if mesh.shards > 1 else 0, loss


def _batch(
    training: Keys, wanted: Wanted, mesh: Mesh, pipeline: _Pipeline, recipe: bool
) -> tuple[int, int]:
    """Microbatch size and number."""
    length = training.count("max_context_length") or training.count("seq_len", 2048)
    tokens = training.count("num_tokens_per_microbatch_per_dp_rank")
    step = training.take("num_tokens_per_train_step", int, -1)
    local = training.take("local_batch_size", int)
    local = local or training.take("batch_size", int)
    batch = training.take("global_batch_size", int, -1)
    dp = mesh.data_parallel
    if tokens or (recipe and local is None):
        # Of torchtitan's main branch: a microbatch is a number of tokens.
        size = max(1, (tokens or 16384) // length)
        many = (pipeline.many or 1) if mesh.pp > 1 else 1
        batch = step // length if step > 0 else size * many * dp
    else:
        local = local or 8
        size = (pipeline.size or 1) if mesh.pp > 1 else local
        divided("local_batch_size", local, by=size, rule="microbatch size")
        batch = batch if batch > 0 else local * dp
    if wanted.microbatch_size not in (None, size):
        raise StrategyError(
            f"the file has microbatches of {size}, but microbatch_size="
            f"{wanted.microbatch_size} is asked for; change the file, or leave it out"
        )
    if wanted.global_batch not in (None, batch):
        raise StrategyError(
            f"the file trains {batch} samples a step, but global_batch="
            f"{wanted.global_batch} is asked for; change the file, or leave it out"
        )
    rule = f"microbatch {size} x data parallel {dp}"
    return size, divided("global batch", batch, by=size * dp, rule=rule)


def _precision(keys: Keys, training: Keys, wanted: Wanted) -> Precision:
    kept = training.take("dtype", str, "float32")
    compute = training.take("mixed_precision_param", str, "bfloat16")
    reduce = training.take("mixed_precision_reduce", str, "float32")
    converters = keys.inner("model").data.get("converters", [])
    names = " ".join(map(str, converters)).lower()
    if "nvfp4" in names:
        keys.refuse(
            "converters: products in 4 bits are not priced; take NVFP4 out to price "
            "the rest"
        )
    if "lora" in names:
        keys.skip(
            "model.converters",
            "LoRA: the model's; price a module:factory that returns the model with its "
            "adapters",
        )
    if "fp8" in names or "float8" in names or "mx" in names:
        compute = "float8"
    compute = "bfloat16" if kept == "bfloat16" and compute == "float32" else compute
    if wanted.dtype not in (None, compute):
        raise StrategyError(
            f"--dtype {wanted.dtype}, but the file computes in {compute}; change the "
            f"file, or leave --dtype out"
        )
    return Precision(
        parameter=kept,
        compute=compute,  # type: ignore[arg-type]
        reduce=reduce,
    )


def _optimizer(keys: Keys, precision: Precision) -> Optimizer:
    given = keys.inner("optimizer")
    values = {key: v for key, v in given.data.items() if not isinstance(v, Open)}
    name = str(values.get("name", "AdamW"))
    if name not in ("AdamW", "Adam"):
        keys.refuse(
            f"the optimizer {name} is not one that Meshwright prices; use AdamW to "
            f"price the rest"
        )
        name = "AdamW"
    betas = (values.get("beta1") or 0.9, values.get("beta2") or 0.95)
    low = "bf16" in str(values.get("implementation"))
    return Optimizer(
        name="Adam" if name == "Adam" else "AdamW",
        learning_rate=values.get("lr") or 8e-4,
        weight_decay=values.get("weight_decay", 0.1),
        betas=betas,
        state_dtype="bfloat16" if low else precision.parameter,
    )


def _compiled(keys: Keys) -> bool:
    section = keys.inner("compile").data
    parts = section.get("components", ["model", "loss"])
    on = section.get("enable", False) is True
    training = "model" in parts if isinstance(parts, list) else True
    return on and training


def _recompute(keys: Keys) -> str:
    section = keys.inner("activation_checkpoint")
    mode = str(section.take("mode", str, "selective")).lower()
    option = str(section.data.get("selective_ac_option", "op"))
    if mode == "selective" and option.isdigit():
        section.skip(
            "selective_ac_option",
            f"every {option}. layer is recomputed; selective recomputation of all is "
            f"priced",
        )
    if mode in ("memorybudget", "memory_budget"):
        section.skip("mode", "a memory budget; selective recomputation is priced")
        return "selective"
    if mode not in _POLICIES:
        raise StrategyError(
            f"activation_checkpoint.mode={mode} is not one of none, selective, full"
        )
    return _POLICIES[mode]
