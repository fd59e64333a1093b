"""Recipes for torchtitan 0.3.0, read by torchtitan 0.3.0.

Its ConfigManager parses each, its ParallelDims makes the mesh (on a fake process
group), its pipeline splits the model on the meta device: no parameter may be lost or
be on two stages.
"""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

from checking import check_in_environment, judge, same

PACKAGES = ("torch==2.13.0", "torchtitan==0.3.0", "triton==3.9.0")
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def _parsed(folder: Path) -> Any:
    from torchtitan.config.manager import ConfigManager

    sys.path.insert(0, str(folder))
    try:
        sys.modules.pop("meshwright_recipe", None)
        importlib.invalidate_caches()
        manager = ConfigManager()
        return manager.parse_args(
            ["--module", "meshwright_recipe", "--config", "meshwright"]
        )
    finally:
        sys.path.remove(str(folder))


def _numbers(config: Any, strategy: dict[str, Any]) -> None:
    """Batches, dtypes, optimizer, recomputation."""
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    training, parallelism = config.training, config.parallelism
    mesh, count = strategy["mesh"], strategy["num_microbatches"]
    replicas = mesh["dp_replicate"] * mesh["dp_shard"]
    passes = training.global_batch_size // (training.local_batch_size * replicas)
    if mesh["pp"] > 1:
        size = parallelism.pipeline_parallel_microbatch_size
        same("microbatches", training.local_batch_size // size * passes, count)
        same("microbatch", size, strategy["microbatch_size"])
        schedule = parallelism.pipeline_parallel_schedule
        same("schedule", schedule, strategy["schedule"])
    else:
        same("accumulation", passes, count)
        same("microbatch", training.local_batch_size, strategy["microbatch_size"])
    precision, clip = strategy["precision"], strategy["grad_clip_norm"]
    # What nobody gave is torchtitan's own.
    if clip is not None:
        same("clipping", training.max_norm, clip)
    same("weights", training.dtype, precision["parameter"])
    same("products", training.mixed_precision_param, precision["compute"])
    same("reductions", training.mixed_precision_reduce, precision["reduce"])
    policy = config.activation_checkpoint
    kinds = {None: "none", SelectiveAC.Config: "selective", FullAC.Config: "full"}
    kind = kinds[None if policy is None else type(policy)]
    same("recomputation", {kind}, {s["recompute"] for s in strategy["stages"]})
    group = config.optimizer.param_groups[0]
    optimizer = strategy["optimizer"]
    same("optimizer", group.optimizer_name, optimizer["name"])
    same("lr", group.optimizer_kwargs["lr"], optimizer["learning_rate"])
    if optimizer["weight_decay"] is not None:
        same("decay", group.optimizer_kwargs["weight_decay"], optimizer["weight_decay"])
    same("compile", config.compile.enable, strategy["compile"])


def _mesh(config: Any, mesh: dict[str, int]) -> None:
    """Degrees and ranks, on a fake process group."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.distributed import ParallelDims

    world = math.prod(mesh[axis] for axis in AXES)
    dims = ParallelDims.from_config(config.parallelism, world)
    have = {axis: getattr(dims, axis) for axis in (*AXES, "ep")}
    same("mesh", have, {axis: mesh[axis] for axis in (*AXES, "ep")})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        dims.build_mesh()
        ranks = dims._global_meshes["dense"].mesh
        want = torch.arange(world).reshape([mesh[axis] for axis in AXES])
        same("ranks", ranks.tolist(), want.tolist())
        experts = dims._global_meshes["sparse"].mesh.reshape(-1, mesh["ep"])
        want = torch.arange(world).reshape(-1, mesh["ep"])
        same("ranks of experts", experts.tolist(), want.tolist())
    finally:
        dist.destroy_process_group()


def _stages(config: Any, strategy: dict[str, Any]) -> None:
    """Check that stages hold their layers, and together every parameter."""
    import torch
    from torchtitan.distributed.pipeline_parallel import _split_module

    parts = config.parallelism.module_fqns_per_model_part
    layers = [
        [m.rpartition(".")[2] for m in s["modules"] if ".layers." in m]
        for s in strategy["stages"]
    ]
    named = [[n.partition(".")[2] for n in p if n.startswith("layers.")] for p in parts]
    same("layers of stages", named, layers)
    with torch.device("meta"):
        config.model_spec.model.update_from_config(config=config)
        model = config.model_spec.model.build()
    whole = sorted(name for name, _ in model.named_parameters())
    held = [
        name
        for part in parts
        for name, _ in _split_module(model, part).named_parameters()
    ]
    same("lost parameters", sorted(set(whole) - set(held)), [])
    same("parameters of all stages", sorted(held), whole)


def _check(folder: Path, plan: dict[str, Any]) -> None:
    strategy = plan["strategy"]
    config = _parsed(folder)
    _numbers(config, strategy)
    same("seq_len", config.training.seq_len, plan["workload"]["seq_len"])
    parallelism, mesh = config.parallelism, strategy["mesh"]
    if mesh["dp_shard"] * mesh["cp"] > 1:
        word = "always" if strategy["zero_stage"] == 3 else "never"
        same("resharding", parallelism.fsdp_reshard_after_forward, word)
    if mesh["tp"] > 1:
        streams = strategy["sharding"]["sequence_parallel"]
        same("sequence", parallelism.enable_sequence_parallel, streams)
    _mesh(config, mesh)
    if mesh["pp"] > 1:
        _stages(config, strategy)


def _main() -> int:
    if len(sys.argv) > 1:
        return judge(sys.argv[1], _check)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.export.framework_plans import framework_plans

    return check_in_environment(__file__, "torchtitan", framework_plans(2), PACKAGES)


if __name__ == "__main__":
    sys.exit(_main())
