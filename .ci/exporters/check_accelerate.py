"""Configs for accelerate 1.15.0, read by accelerate 1.15.0.

Its launcher reads each file and makes an environment of it, from which its
ParallelismConfig and its FSDP plugin are made as in a training process; its mesh, on a
fake process group, must give every rank the plan's place.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from checking import check_in_environment, judge, same

VERSION = "1.15.0"
PACKAGES = ("torch==2.13.0", "numpy", f"accelerate=={VERSION}", "transformers==5.23.0")
AXES = ("dp_replicate", "dp_shard", "cp", "tp")
_WORDS = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


def _launched(file: str) -> tuple[Any, dict[str, str]]:
    """Arguments and environment that accelerate launch makes of a config."""
    from accelerate.commands.launch import (
        _validate_launch_command,
        launch_command_parser,
    )
    from accelerate.utils.launch import (
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    words = ["--config_file", file, "--machine_rank", "0"]
    words += ["--main_process_ip", "127.0.0.1", "--main_process_port", "0", "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if args.use_fsdp or args.multi_gpu:
        return args, prepare_multi_gpu_env(args)
    return args, prepare_simple_launcher_cmd_env(args)[1]


def _cluster(file: str, plan: dict[str, Any]) -> Any:
    from accelerate.commands.config.config_args import (
        ClusterConfig,
        load_config_from_file,
    )

    config = load_config_from_file(file)
    assert isinstance(config, ClusterConfig)
    strategy = plan["strategy"]
    mesh, precision = strategy["mesh"], strategy["precision"]
    processes = 1
    for axis in AXES:
        processes *= mesh[axis]
    same("num_processes", config.num_processes, processes)
    word = _WORDS[precision["compute"]]
    same(
        "mixed_precision",
        config.mixed_precision,
        word if precision["parameter"] == "float32" else "no",
    )
    devices = strategy["device_ranges"]
    if devices:
        first = [str(d) for start, stop in devices[:1] for d in range(start, stop)]
        same("gpu_ids", config.gpu_ids.split(","), first)
    compiled = config.dynamo_config.get("dynamo_backend") == "INDUCTOR"
    same("compile", compiled, strategy["compile"])
    return config


def _sharding(plan: dict[str, Any]) -> None:
    """The plugin and the mesh of a process in whose environment this is."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

    strategy = plan["strategy"]
    mesh = strategy["mesh"]
    plugin = FullyShardedDataParallelPlugin()
    same("version", plugin.fsdp_version, 2)
    same("reshard", plugin.reshard_after_forward, strategy["zero_stage"] == 3)
    kinds = {stage["recompute"] for stage in strategy["stages"]}
    same("recompute", plugin.activation_checkpointing, kinds == {"full"})
    asked = ParallelismConfig()
    for axis in AXES:
        same(axis, getattr(asked, f"{axis}_size"), mesh[axis])
    if mesh["cp"] > 1:
        same("ring", asked.cp_handler.cp_comm_strategy, "alltoall")
    asked._validate_accelerator(
        SimpleNamespace(
            multi_device=True,
            num_processes=asked.total_size,
            is_fsdp2=True,
            is_main_process=True,
        )
    )
    _places(asked, mesh)


def _places(asked: Any, mesh: dict[str, int]) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(asked.total_size):
        dist.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=asked.total_size
        )
        try:
            made = asked.build_device_mesh("cpu")
            rest, place = rank, {}
            for axis in reversed(AXES):
                rest, place[axis] = divmod(rest, mesh[axis])
            for axis in made.mesh_dim_names:
                same(f"{axis} of {rank}", made.get_local_rank(axis), place[axis])
        finally:
            dist.destroy_process_group()


def _check(folder: Path, plan: dict[str, Any]) -> None:
    import accelerate

    same("accelerate", accelerate.__version__, VERSION)
    file = str(folder / "accelerate.yaml")
    config = _cluster(file, plan)
    args, environment = _launched(file)
    same("processes launched", args.num_processes, config.num_processes)
    hosts = config.num_machines
    if args.use_fsdp or args.multi_gpu:
        same("a host", int(args.nproc_per_node) * hosts, config.num_processes)
    cpu = set(plan["cluster"]["device_types"]) == {"cpu"}
    same("on CPUs", environment.get("ACCELERATE_USE_CPU", "False"), str(cpu))
    mesh = plan["strategy"]["mesh"]
    sharded = any(mesh[axis] > 1 for axis in ("dp_shard", "cp", "tp"))
    same("FSDP", environment.get("ACCELERATE_USE_FSDP") == "true", sharded)
    if sharded:
        with mock.patch.dict(os.environ, environment):
            _sharding(plan)


def _main() -> int:
    if len(sys.argv) > 1:
        return judge(sys.argv[1], _check)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.export.config_plans import ACCELERATE

    return check_in_environment(__file__, "accelerate", ACCELERATE, PACKAGES)


if __name__ == "__main__":
    sys.exit(_main())
