"""YAML for nanotron 0.4, read by nanotron 0.4.

Each is laid over a config with a small Llama by the merge.py that was exported;
nanotron's own get_config_from_file reads the whole (its dataclasses refuse unknown and
missing keys), its ParallelContext makes the groups on a fake process group.

nanotron 0.4 cannot be imported as it is on PyPI: its logging and its config import each
other. So its logging is replaced by Python's here, and nothing else.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import checking
from checking import check_in_environment, judge, same

VERSION = "0.4"
PACKAGES = ("torch==2.13.0", "numpy", "pyyaml", f"nanotron=={VERSION}")
AXES = ("pp", "dp_replicate", "dp_shard", "tp")

_BASE = """
general: {project: meshwright, run: check}
parallelism: {dp: 99, pp: 99, tp: 99}
model:
  dtype: float32
  init_method: {std: 0.025}
  model_config: {hidden_size: 4096, num_hidden_layers: 32, vocab_size: 128256}
tokenizer: {tokenizer_name_or_path: none}
data: {dataset: null, seed: 0}
optimizer:
  {weight_decay: 0.0, clip_grad: null, adam_eps: 1.0e-8, adam_beta1: 0.9,
   adam_beta2: 0.95}
"""


def _import_config() -> Any:
    """nanotron.config, with Python's logging in place of nanotron's."""
    import nanotron

    class _Anything:
        pass

    def stand_in_for(name: str) -> Any:
        """Return an attribute of logging, or a class that does nothing."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(logging, name, _Anything)

    stand_in = types.ModuleType("nanotron.logging")
    stand_in.get_logger = logging.getLogger
    stand_in.log_rank = lambda *_, **__: None
    stand_in.__getattr__ = stand_in_for
    sys.modules["nanotron.logging"] = stand_in
    nanotron.logging = stand_in
    import nanotron.config

    return nanotron.config


def _read(folder: Path) -> Any:
    config = _import_config()
    base, whole = folder / "base.yaml", folder / "whole.yaml"
    base.write_text(_BASE)
    with whole.open("w") as stream:
        subprocess.run(
            [sys.executable, "merge.py", "base.yaml", "plan.nanotron.yaml"],
            cwd=folder,
            stdout=stream,
            check=True,
        )
    return config.get_config_from_file(str(whole))


def _numbers(config: Any, plan: dict[str, Any]) -> None:
    import torch

    strategy = plan["strategy"]
    mesh, precision = strategy["mesh"], strategy["precision"]
    axes, tokens, optimizer = config.parallelism, config.tokens, config.optimizer
    same("dp", axes.dp, mesh["dp_replicate"] * mesh["dp_shard"])
    same("pp", axes.pp, mesh["pp"])
    same("tp", axes.tp, mesh["tp"])
    one = type(axes.pp_engine).__name__ == "OneForwardOneBackwardPipelineEngine"
    same("engine", one, strategy["schedule"] == "1F1B")
    sequence = axes.tp_mode.name == "REDUCE_SCATTER"
    same("sequence", sequence, strategy["sharding"]["sequence_parallel"])
    same("batch", config.global_batch_size, plan["workload"]["global_batch"])
    same("length", tokens.sequence_length, plan["workload"]["seq_len"])
    same("microbatch", tokens.micro_batch_size, strategy["microbatch_size"])
    steps = tokens.batch_accumulation_per_replica
    same("accumulation", steps, strategy["num_microbatches"])
    same("dtype", config.model.dtype, getattr(torch, precision["compute"]))
    same("hidden size", config.model.model_config.hidden_size, 4096)
    beside = precision["parameter"] != precision["compute"]
    same("float32 beside", optimizer.accumulate_grad_in_fp32, beside)
    sharded = mesh["dp_shard"] > 1 and strategy["zero_stage"] == 1
    same("ZeRO", optimizer.zero_stage, int(sharded))
    # What nobody gave is the base config's.
    decay = strategy["optimizer"]["weight_decay"]
    if strategy["grad_clip_norm"] is not None:
        same("clipping", optimizer.clip_grad, strategy["grad_clip_norm"])
    if decay is not None:
        same("decay", optimizer.weight_decay, decay)
    rate = optimizer.learning_rate_scheduler
    want = strategy["optimizer"]["learning_rate"]
    same("rate", (rate.learning_rate, rate.min_decay_lr), (want, want))


def _places(mesh: dict[str, int]) -> None:
    """Its ranks have the plan's places: pp, data, tp."""
    import torch.distributed
    from nanotron.parallel.context import ParallelContext
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = 1
    for axis in AXES:
        size *= mesh[axis]
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=size
    )
    try:
        context = ParallelContext.__new__(ParallelContext)
        context.expert_parallel_size = 1
        context.pipeline_parallel_size = mesh["pp"]
        context.data_parallel_size = mesh["dp_replicate"] * mesh["dp_shard"]
        context.tensor_parallel_size = mesh["tp"]
        with mock.patch.dict(os.environ, {"WORLD_SIZE": str(size), "RANK": "0"}):
            context._init_parallel_groups()
        for rank in range(size):
            rest, tp = divmod(rank, mesh["tp"])
            pp, data = divmod(rest, context.data_parallel_size)
            same(f"place of {rank}", context.get_3d_ranks(rank), (pp, data, tp))
    finally:
        torch.distributed.destroy_process_group()


def _check(folder: Path, plan: dict[str, Any]) -> None:
    _numbers(_read(folder), plan)
    _places(plan["strategy"]["mesh"])


def _main() -> int:
    if len(sys.argv) > 1:
        return judge(sys.argv[1], _check)
    sys.path.insert(0, str(checking.ROOT))
    from tests.export.config_plans import NANOTRON

    return check_in_environment(__file__, "nanotron", NANOTRON, PACKAGES)


if __name__ == "__main__":
    sys.exit(_main())
