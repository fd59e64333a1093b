"""JSON for DeepSpeed 0.19.6, read by DeepSpeed 0.19.6.

Its DeepSpeedConfig reads each on a process group of the plan's size (a fake one), its
groups must give ranks the plan's places, its AutoTP rules must mean the modules that
the plan's patterns mean. Its launcher starts the ranks of hosts that are not whole.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}

from checking import check_in_environment, judge, same

VERSION = "0.19.6"
PACKAGES = ("torch==2.13.0", "numpy", "setuptools", "wheel", "ninja")
AXES = ("dp_replicate", "dp_shard", "cp", "tp")

#: Modules of the model that was planned.
_LAYER = "model.layers.3."
_MODULES = (
    "model.embed_tokens",
    *(f"{_LAYER}self_attn.{name}_proj" for name in "qkvo"),
    *(f"{_LAYER}mlp.{name}_proj" for name in ("gate", "up", "down")),
    "model.norm",
    "lm_head",
)

_TELL = """import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "MASTER_ADDR")
told = {name: os.environ.get(name) for name in names} | {"argv": sys.argv[1:]}
open(os.environ["TOLD"] + told["RANK"], "w").write(json.dumps(told))
"""


def _size(mesh: dict[str, int]) -> int:
    size = 1
    for axis in AXES:
        size *= mesh[axis]
    return size


def _place(rank: int, mesh: dict[str, int]) -> dict[str, int]:
    place = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, mesh[axis])
    return place


def _config(folder: Path, mesh: dict[str, int], rank: int) -> Any:
    """Return the config that deepspeed.initialize makes, in a process of this rank."""
    import torch.distributed
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import groups
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=_size(mesh)
    )
    comm.comm.cdb = None
    # Collectives in shared memory, which would be compiled here; nothing is sent.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    comm.init_distributed(dist_backend="fake", auto_mpi_discovery=False)
    data = json.loads((folder / "ds_config.json").read_text())
    place, mpu, mesh_device = _place(rank, mesh), None, None
    if "sequence_parallel_size" in data:
        shape = (data["data_parallel_size"], data["sequence_parallel_size"])
        names = ("data_parallel", "sequence_parallel")
        mesh_device = comm.initialize_mesh_device(shape, names)
        mine = mesh_device.get_local_rank("sequence_parallel")
        same(f"cp of rank {rank}", mine, place["cp"])
    tp = data.get("tensor_parallel", {}).get("autotp_size", 1)
    if tp > 1:
        for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP"):
            setattr(groups, name, None)
        groups._init_tp_mesh_device(tensor_model_parallel_size=tp)
        same(f"tp of {rank}", groups.get_tensor_model_parallel_rank(), place["tp"])
        mpu = SimpleNamespace(
            get_data_parallel_world_size=groups.get_data_parallel_world_size
        )
    return DeepSpeedConfig(
        str(folder / "ds_config.json"), mpu=mpu, mesh_device=mesh_device
    )


def _numbers(config: Any, plan: dict[str, Any]) -> None:
    import torch

    strategy = plan["strategy"]
    mesh, precision = strategy["mesh"], strategy["precision"]
    batch = plan["workload"]["global_batch"]
    same("train_batch_size", config.train_batch_size, batch)
    micro = config.train_micro_batch_size_per_gpu
    same("microbatch", micro, strategy["microbatch_size"])
    steps = config.gradient_accumulation_steps
    same("accumulation", steps, strategy["num_microbatches"])
    shards = mesh["dp_shard"] * mesh["cp"] > 1
    stage = strategy["zero_stage"] if shards else 0
    same("ZeRO", int(config.zero_optimization_stage), stage)
    groups = stage == 3 and mesh["dp_replicate"] > 1
    same("MiCS", config.mics_shard_size, mesh["dp_shard"] if groups else -1)
    low = precision["compute"] == "bfloat16"
    same("bfloat16", config.bfloat16_config.enabled, low)
    same("float16", config.float16_config.enabled, precision["compute"] == "float16")
    alone = config.bfloat16_config.bf16_master_weights_and_grads
    same("weights in bfloat16", alone, precision["parameter"] == "bfloat16")
    reduced = getattr(torch, precision["reduce"])
    same("reductions", config.communication_data_type, reduced)
    # What nobody gave is DeepSpeed's own.
    if strategy["grad_clip_norm"] is not None:
        same("clipping", config.gradient_clipping, strategy["grad_clip_norm"])
    spec = strategy["optimizer"]
    same("optimizer", config.optimizer_name.lower(), spec["name"].lower())
    same("lr", config.optimizer_params["lr"], spec["learning_rate"])
    decay = config.optimizer_params.get("weight_decay")
    same("decay", decay, spec["weight_decay"])


def _tensors(config: Any, plan: dict[str, Any]) -> None:
    """AutoTP splits what the plan's patterns mean, and nothing else."""
    rules = config.tensor_parallel_config.get_partition_config_object()
    kinds = {"colwise": "column", "rowwise": "row"}
    for module in _MODULES:
        want = None
        for pattern, style in plan["strategy"]["sharding"]["patterns"].items():
            parts = pattern.split(".")
            have = module.split(".")[-len(parts) :]
            if len(have) == len(parts) and all(
                p in ("*", h) for p, h in zip(parts, have, strict=True)
            ):
                want = kinds[style]
                break
        spec = rules.find_matching_spec(f"{module}.weight")
        same(module, spec and spec.partition_type.value, want)
        if spec:
            same(f"{module}, gathered", spec.gather_output, module == "lm_head")


def _launch(folder: Path, plan: dict[str, Any]) -> None:
    """DeepSpeed's launcher starts each host's ranks on the plan's devices."""
    script, told = folder / "tell.py", folder / "told"
    script.write_text(_TELL)
    ranges = plan["strategy"]["device_ranges"]
    each = 8
    for node, (start, stop) in enumerate(ranges):
        subprocess.run(
            ["sh", str(folder / "run.sh"), "--flag"],
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "NODE_RANK": str(node),
                "MASTER_ADDR": "first",
                "TRAIN": str(script),
                "TOLD": str(told),
            },
            check=True,
            timeout=120,
            capture_output=True,
        )
        for local in range(stop - start):
            rank = node * (stop - start) + local
            heard = json.loads(Path(f"{told}{rank}").read_text())
            same("LOCAL_RANK", heard["LOCAL_RANK"], str(local))
            same(
                "WORLD_SIZE", heard["WORLD_SIZE"], str(_size(plan["strategy"]["mesh"]))
            )
            devices = ",".join(str(d % each) for d in range(start, stop))
            same("devices", heard["CUDA_VISIBLE_DEVICES"], devices)
            file = str(folder / "ds_config.json")
            same("config", heard["argv"][-2:], [file, "--flag"])


def _check(folder: Path, plan: dict[str, Any]) -> None:
    import deepspeed
    import torch.distributed

    same("deepspeed", deepspeed.__version__.partition("+")[0], VERSION)
    mesh = plan["strategy"]["mesh"]
    for rank in (0, 1, _size(mesh) - 1):
        try:
            config = _config(folder, mesh, rank)
        finally:
            torch.distributed.destroy_process_group()
    _numbers(config, plan)
    if mesh["tp"] > 1:
        _tensors(config, plan)
    if plan["strategy"]["device_ranges"]:
        _launch(folder, plan)


def _prepare(python: Path, _: Path) -> None:
    """DeepSpeed's own build looks at the torch that is installed."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
    pip += ["--no-build-isolation"]
    subprocess.run([*pip, f"deepspeed=={VERSION}"], check=True)


def _main() -> int:
    if len(sys.argv) > 1:
        return judge(sys.argv[1], _check)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.export.config_plans import DEEPSPEED

    return check_in_environment(
        __file__, "deepspeed", DEEPSPEED, PACKAGES, prepare=_prepare
    )


if __name__ == "__main__":
    sys.exit(_main())
