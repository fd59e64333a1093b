"""TOML files for torchtitan 0.2.2, read by torchtitan 0.2.2.

Its ConfigManager parses each, its ParallelDims makes the mesh (on a fake process
group), its pipeline splits the model on the meta device for every rank.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from checking import check_in_environment, judge, same

PACKAGES = ("torch==2.13.0", "torchtitan==0.2.2", "triton==3.9.0")
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def _numbers(config: Any, plan: dict[str, Any]) -> None:
    """Batches, dtypes, optimizer, recomputation."""
    strategy = plan["strategy"]
    training, parallelism = config.training, config.parallelism
    mesh, count = strategy["mesh"], strategy["num_microbatches"]
    same("seq_len", training.seq_len, plan["workload"]["seq_len"])
    replicas = mesh["dp_replicate"] * mesh["dp_shard"]
    passes = training.global_batch_size // (training.local_batch_size * replicas)
    if mesh["pp"] > 1:
        size = parallelism.pipeline_parallel_microbatch_size
        same("microbatches", training.local_batch_size // size * passes, count)
        schedule = parallelism.pipeline_parallel_schedule
        same("schedule", schedule, strategy["schedule"])
    else:
        size = training.local_batch_size
        same("accumulation", passes, count)
    same("microbatch", size, strategy["microbatch_size"])
    precision, clip = strategy["precision"], strategy["grad_clip_norm"]
    # What nobody gave is torchtitan's own.
    if clip is not None:
        same("clipping", training.max_norm, clip)
    same("weights", training.dtype, precision["parameter"])
    same("products", training.mixed_precision_param, precision["compute"])
    same("reductions", training.mixed_precision_reduce, precision["reduce"])
    kind = config.activation_checkpoint.mode
    same("recomputation", {kind}, {s["recompute"] for s in strategy["stages"]})
    optimizer = strategy["optimizer"]
    same("optimizer", config.optimizer.name, optimizer["name"])
    same("lr", config.optimizer.lr, optimizer["learning_rate"])
    if optimizer["weight_decay"] is not None:
        same("decay", config.optimizer.weight_decay, optimizer["weight_decay"])
    same("compile", config.compile.enable, strategy["compile"])
    if mesh["dp_shard"] * mesh["cp"] > 1:
        word = "always" if strategy["zero_stage"] == 3 else "never"
        same("resharding", parallelism.fsdp_reshard_after_forward, word)
    loss = strategy["sharding"]["loss_parallel"]
    same("loss", not parallelism.disable_loss_parallel, loss)


def _mesh(config: Any, mesh: dict[str, int]) -> None:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.distributed import ParallelDims

    said = config.parallelism
    world = math.prod(mesh[axis] for axis in AXES)
    dims = ParallelDims(
        dp_replicate=said.data_parallel_replicate_degree,
        dp_shard=said.data_parallel_shard_degree,
        cp=said.context_parallel_degree,
        tp=said.tensor_parallel_degree,
        pp=said.pipeline_parallel_degree,
        ep=said.expert_parallel_degree,
        etp=said.expert_tensor_parallel_degree,
        world_size=world,
    )
    have = {axis: getattr(dims, axis) for axis in (*AXES, "ep")}
    same("mesh", have, {axis: mesh[axis] for axis in (*AXES, "ep")})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        dims.build_mesh()
        shape = [mesh["pp"], mesh["dp_replicate"], -1, mesh["tp"]]
        want = torch.arange(world).reshape(shape)
        same("ranks", dims._global_meshes["dense"].mesh.tolist(), want.tolist())
        experts = dims._global_meshes["sparse"].mesh.reshape(-1, mesh["ep"])
        want = torch.arange(world).reshape(-1, mesh["ep"])
        same("ranks of experts", experts.tolist(), want.tolist())
    finally:
        dist.destroy_process_group()


def _stages(config: Any, strategy: dict[str, Any]) -> None:
    """Check that ranks hold their layers, and together every parameter."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.distributed.pipeline_parallel import pipeline_module_split
    from torchtitan.protocols.train_spec import get_train_spec

    spec = get_train_spec(config.model.name)
    arguments = spec.model_args[config.model.flavor]
    with torch.device("meta"):
        model = spec.model_cls(arguments)
    whole = sorted(name for name, _ in model.named_parameters())
    said, pp = config.parallelism, strategy["mesh"]["pp"]
    held = []
    for rank in range(pp):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=pp)
        try:
            mesh = dist.init_device_mesh("cpu", (pp,), mesh_dim_names=("pp",))
            stages, parts = pipeline_module_split(
                model,
                mesh,
                said.pipeline_parallel_schedule,
                torch.device("meta"),
                said.module_fqns_per_model_part,
            )
        finally:
            dist.destroy_process_group()
        for stage, part in zip(stages, parts, strict=True):
            planned = strategy["stages"][stage.stage_index]
            same("rank of a stage", rank, planned["rank"])
            layers = [m for m in planned["modules"] if ".layers." in m]
            same("layers", [f"model.layers.{i}" for i in part.layers], layers)
            held += [name for name, _ in part.named_parameters()]
    same("lost parameters", sorted(set(whole) - set(held)), [])
    same("parameters of all stages", sorted(held), whole)


def _check(folder: Path, plan: dict[str, Any]) -> None:
    from torchtitan.config import ConfigManager

    file = str(folder / "torchtitan.toml")
    config = ConfigManager().parse_args(["--job.config_file", file])
    _numbers(config, plan)
    _mesh(config, plan["strategy"]["mesh"])
    if plan["strategy"]["mesh"]["pp"] > 1:
        _stages(config, plan["strategy"])


def _main() -> int:
    if len(sys.argv) > 1:
        return judge(sys.argv[1], _check)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.export.framework_plans import framework_plans

    return check_in_environment(
        __file__, "torchtitan-0.2", framework_plans(2), PACKAGES
    )


if __name__ == "__main__":
    sys.exit(_main())
