"""Arguments for Megatron-LM, read by Megatron core 0.19.2; and the flags we read back.

Its parser takes each file beside a model's sizes, its validate_args judges them, its
TransformerConfig takes the layout, its rank generator makes the groups: those and the
layers of every stage must be the plan's. Every flag that ``meshwright import megatron``
knows must be one of its parser, with as many values and the same default.

The wheel is for Python 3.12 and newer, of which its Python files use one name that 3.11
lacks (typing.override); its compiled file is not needed. So it is unpacked, not
installed, and runs on the project's Python.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

from checking import check_in_environment, judge, same

VERSION = "0.19.2"
PACKAGES = (
    "torch==2.13.0",
    "numpy",
    "packaging",
    "omegaconf",
    "triton==3.9.0",
    "typing_extensions",
)
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

#: What the plan does not say: sizes of the models that were planned.
_COMMON = "--tokenizer-type NullTokenizer --vocab-size 1000 --mock-data --train-iters 9"
_LLAMA = (
    "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--max-position-embeddings 8192 --swiglu --normalization RMSNorm"
)
_QWEN = (
    "--hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 "
    "--max-position-embeddings 32768 --num-experts 128 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 768 --swiglu --normalization RMSNorm"
)
_SIZES = {"llama3-8b": _LLAMA, "qwen3-30b-a3b": _QWEN}


def _unpack(python: Path, folder: Path) -> None:
    """Megatron core's Python files, from the wheel on the package index."""
    target = folder / "megatron-core"
    _write_flags(folder / "flags.json")
    if target.exists():
        return
    download = [str(python), "-m", "pip", "download", "--quiet", "--no-deps"]
    download += ["--only-binary=:all:", "--python-version=3.12", "--dest", str(folder)]
    subprocess.run([*download, f"megatron-core=={VERSION}"], check=True)
    (wheel,) = folder.glob("megatron_core-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)


def _write_flags(path: Path) -> None:
    """Write what the importer knows: how many values each flag takes, its default."""
    from planner.imports.megatron import megatron_flags

    path.write_text(json.dumps(megatron_flags()))


def _check_flags(path: Path) -> None:
    import argparse

    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    known = {word: a for a in parser._actions for word in a.option_strings}
    for flag, (values, default) in json.loads(path.read_text()).items():
        if flag not in known:
            raise AssertionError(f"{flag} is no flag of Megatron core {VERSION}")
        if values != "*":
            same(f"values of {flag}", known[flag].nargs, values)
        # What Megatron leaves open, the importer may have to settle; a switch is off.
        if values not in {"*", 0} and known[flag].default is not None:
            same(f"default of {flag}", known[flag].default, default)
    print(f"{len(known)} flags of the parser, those of the importer among them")


def _parsed(folder: Path, plan: dict[str, Any]) -> Any:
    from megatron.training import arguments

    mesh = plan["strategy"]["mesh"]
    world = math.prod(mesh[axis] for axis in AXES)
    words = shlex.split((folder / "megatron.args").read_text())
    sizes = shlex.split(f"{_COMMON} {_SIZES[plan['model']['ref']]}")
    environment = {
        "WORLD_SIZE": str(world),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    with (
        mock.patch.object(sys, "argv", ["pretrain_gpt.py", *words, *sizes]),
        mock.patch.dict(os.environ, environment),
        # It asks the GPU which checks it needs; 9 is Hopper, which needs them all.
        mock.patch(f"{arguments.__name__}.get_device_arch_version", return_value=9),
    ):
        said = arguments.parse_args()
        arguments.validate_args(said)
    return said


def _numbers(said: Any, plan: dict[str, Any]) -> None:
    import torch

    strategy = plan["strategy"]
    mesh = strategy["mesh"]
    replicas = mesh["dp_replicate"] * mesh["dp_shard"]
    same("data parallel", said.data_parallel_size, replicas)
    same("microbatch", said.micro_batch_size, strategy["microbatch_size"])
    count = said.global_batch_size // (said.micro_batch_size * replicas)
    same("microbatches", count, strategy["num_microbatches"])
    same("seq_len", said.seq_length, plan["workload"]["seq_len"])
    if mesh["tp"] > 1:
        streams = strategy["sharding"]["sequence_parallel"]
        same("sequence", said.sequence_parallel, streams)
    sharded = strategy["zero_stage"] == 1
    same("optimizer states", bool(said.use_distributed_optimizer), sharded)
    if sharded:
        instances = said.num_distributed_optimizer_instances
        same("instances", instances, mesh["dp_replicate"])
    precision = strategy["precision"]
    same("products", said.params_dtype, getattr(torch, precision["compute"]))
    if precision["compute"] == "bfloat16":
        whole = precision["reduce"] == "float32"
        same("reductions", said.accumulate_allreduce_grads_in_fp32, whole)
    kind = said.recompute_granularity or "none"
    same("recomputation", {kind}, {s["recompute"] for s in strategy["stages"]})
    optimizer, clip = strategy["optimizer"], strategy["grad_clip_norm"]
    name = "sgd" if optimizer["name"] == "SGD" else "adam"
    same("optimizer", said.optimizer, name)
    same("lr", said.lr, optimizer["learning_rate"])
    # What nobody gave is Megatron's own.
    if optimizer["weight_decay"] is not None:
        same("decay", said.weight_decay, optimizer["weight_decay"])
    if clip is not None:
        same("clipping", said.clip_grad, clip)


def _ranks(said: Any, mesh: dict[str, int]) -> None:
    """Megatron's groups are those of the plan's mesh, row-major, tp fastest."""
    import torch
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-dp-pp"
    same("order", said.use_tp_pp_dp_mapping, False)
    sizes = {
        "tp": said.tensor_model_parallel_size,
        "cp": said.context_parallel_size,
        "pp": said.pipeline_model_parallel_size,
        "dp": said.data_parallel_size,
    }
    made = RankGenerator(**sizes, ep=1, order=order)
    degrees = [mesh[axis] for axis in AXES]
    grid = torch.arange(math.prod(degrees)).reshape(degrees).flatten(1, 2)
    for axis, name in enumerate(("pp", "dp", "cp", "tp")):
        want = grid.movedim(axis, -1).reshape(-1, grid.shape[axis]).tolist()
        same(f"{name} groups", sorted(made.get_ranks(name)), sorted(want))
    if mesh["ep"] > 1:
        etp, ep = said.expert_tensor_parallel_size, said.expert_model_parallel_size
        world = math.prod(degrees)
        experts = RankGenerator(
            tp=etp,
            ep=ep,
            dp=world // (etp * ep * sizes["pp"]),
            pp=sizes["pp"],
            cp=1,
            order=order,
        )
        want = torch.arange(world).reshape(-1, mesh["ep"]).tolist()
        same("ep groups", sorted(experts.get_ranks("ep")), want)


def _layers(said: Any, strategy: dict[str, Any]) -> None:
    """Layers of every virtual stage, by Megatron's own counting."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    pp, virtual = strategy["mesh"]["pp"], strategy["virtual_stages"]
    same("virtual", said.virtual_pipeline_model_parallel_size or 1, virtual)
    want = [
        [int(m.rpartition(".")[2]) for m in s["modules"] if ".layers." in m]
        for s in strategy["stages"]
    ]
    same("layers", said.num_layers, sum(map(len, want)))
    text = said.pipeline_model_parallel_layout
    if text is None:
        each = said.num_layers // (pp * virtual)
        same("layers of stages", [len(layers) for layers in want], [each] * len(want))
        return
    layout = PipelineParallelLayerLayout(str(text), pp)
    layout.validate_layer_layout(said.num_layers, None)
    counts = [
        layout.layout[index % pp][index // pp].count(LayerType.decoder)
        for index in range(len(want))
    ]
    same("layers of stages", counts, [len(layers) for layers in want])


def _check(folder: Path, plan: dict[str, Any]) -> None:
    from megatron.training.argument_utils import core_transformer_config_from_args

    said = _parsed(folder, plan)
    _numbers(said, plan)
    _ranks(said, plan["strategy"]["mesh"])
    if plan["strategy"]["mesh"]["pp"] > 1:
        _layers(said, plan["strategy"])
    core_transformer_config_from_args(said)


def _main() -> int:
    if len(sys.argv) > 1:
        import typing

        import typing_extensions

        if sys.version_info < (3, 12):
            typing.override = typing_extensions.override
        sys.path.insert(0, str(Path(sys.prefix) / "megatron-core"))
        _check_flags(Path(sys.prefix) / "flags.json")
        return judge(sys.argv[1], _check)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.export.framework_plans import framework_plans

    return check_in_environment(
        __file__, "megatron", framework_plans(1), PACKAGES, _unpack
    )


if __name__ == "__main__":
    sys.exit(_main())
