"""Memory and time in which a rank starts: its own shards against the whole model.

python -m benchmarks.materialize

A Llama of 1.35 billion parameters (5.4 GB in float32) under plans for 2 and 4 ranks.
Every rank is started alone, in a process of its own in a fake process group, so that
the machine need not hold them all; building communicates nothing. Memory is the
process's highest resident size (``VmHWM``) above that before building: above imports.
Then Llama-3 405B is recorded, none of it computed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from executors.deferred.model import record
from executors.dryrun.world import fake_group
from executors.mesh import build_mesh
from executors.trainer import Trainer
from planner import Cluster, plan
from planner.capture import capture, load_model
from planner.schema import Plan, Precision
from planner.space import MESH_COLUMNS

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "use_cache": False,
    "tie_word_embeddings": False,
}
_LENGTH = 512
_ONE = dict.fromkeys(MESH_COLUMNS, 1)

_PLANS: Mapping[str, Mapping[str, object]] = {
    "ZeRO 3 over 2": {"dp_shard": 2, "zero_stage": 3},
    "pp 2": {"pp": 2, "schedule": "1F1B"},
    "tp 2": {"tp": 2},
    "tp 2 x ZeRO 3 over 2": {"tp": 2, "dp_shard": 2, "zero_stage": 3},
}
#: Plans whose first rank is also started from the whole model; the others take as much.
_BOTH = {"ZeRO 3 over 2", "pp 2", "tp 2"}


def _memory(key: str) -> int:
    """``VmHWM`` or ``VmRSS`` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}; run on Linux")


def _recording(model_fn: Callable[[], nn.Module]) -> dict[str, float]:
    before, begin = _memory("VmRSS"), time.process_time()
    model, recording = record(model_fn)
    assert recording is not None
    return {
        "cpu_s": time.process_time() - begin,
        "peak_bytes": _memory("VmHWM") - before,
        "resident_bytes": _memory("VmHWM"),
        "parameters": sum(p.numel() for p in model.parameters()),
        "operations": recording.operations,
    }


def _start(path: str, ref: str, rank: int, how: str) -> dict[str, float]:
    """Build one rank's part, and tell what it took and what it holds."""
    made, model_fn = Plan.load(path), load_model(ref, seq_len=_LENGTH).build
    with fake_group(rank, made.strategy.mesh.num_devices):
        place = build_mesh(made.strategy, torch.device("cpu"))
        before, begin = _memory("VmRSS"), time.process_time()
        torch.manual_seed(0)
        model, recording = (model_fn(), None) if how == "whole" else record(model_fn)
        trainer = Trainer(made, model, place, recording)
        cpu_s = time.process_time() - begin
        locals_ = [
            p.to_local() if isinstance(p, DTensor) else p
            for part in trainer.parts.values()
            for p in part.inner.parameters()
        ]
        return {
            "cpu_s": cpu_s,
            "peak_bytes": _memory("VmHWM") - before,
            "held_bytes": sum(tensor.nbytes for tensor in locals_),
        }


def _child(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.materialize", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _plan(ref: str, pins: Mapping[str, object]) -> Plan:
    return plan(
        capture(load_model(ref, seq_len=_LENGTH), dtype="float32"),
        Cluster.parse("dgx-h100"),
        global_batch=8,
        pin=_ONE | dict(pins),
        devices="any",
        precision=Precision(compute="float32"),
    )


def main() -> None:
    """Print a line for every rank of every plan, and one for the recording."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--record", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        path, ref, rank, how = options.rank
        print(json.dumps(_start(path, ref, int(rank), how)))
        return
    if options.record is not None:
        print(json.dumps(_recording(load_model(options.record, seq_len=8192).build)))
        return
    print(f"{'plan':22} rank   holds  peak: shards   whole  ratio  CPU: shards  whole")
    with tempfile.TemporaryDirectory() as name:
        config, file = Path(name) / "config.json", Path(name) / "plan.json"
        config.write_text(json.dumps(_CONFIG))
        for label, pins in _PLANS.items():
            made = _plan(f"hf:{config}", pins)
            made.save(file)
            for rank in range(made.strategy.mesh.num_devices):
                given = ("--rank", str(file), f"hf:{config}", str(rank))
                ours = _child(*given, "shards")
                line = (
                    f"{label:22} {rank:4} {ours['held_bytes'] / 1e9:5.2f} GB"
                    f" {ours['peak_bytes'] / 1e9:9.2f} GB"
                )
                if rank or label not in _BOTH:
                    print(f"{line} {'':20} {ours['cpu_s']:6.1f} s", flush=True)
                    continue
                whole = _child(*given, "whole")
                ratio = whole["peak_bytes"] / ours["peak_bytes"]
                print(
                    f"{line} {whole['peak_bytes'] / 1e9:5.2f} GB {ratio:5.1f}x"
                    f" {ours['cpu_s']:10.1f} s {whole['cpu_s']:5.1f} s",
                    flush=True,
                )
    found = _child("--record", "llama3-405b")
    print(
        f"llama3-405b, {found['parameters'] / 1e9:.1f}e9 parameters, recorded in "
        f"{found['cpu_s']:.1f} s of processor time and {found['peak_bytes'] / 1e9:.2f} "
        f"GB ({found['resident_bytes'] / 1e9:.2f} GB with imports)"
    )


if __name__ == "__main__":
    main()
