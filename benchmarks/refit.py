"""Hold the plans of twenty requests against those in ``benchmarks/data/refit``.

python -m benchmarks.refit [--only NAME ...] [--write]

A refactoring changes no plan: every request is planned again and laid beside the plan
that is kept for it. Floats are compared to nine significant digits, because sums of
equal parts in another order differ in their last bits; the version is left out. Exits
with 1 if any plan differs. ``--write`` keeps what was planned, after a change that is
meant to change plans.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner import Cluster, Plan, Strategy, plan, predict
from planner.schema import Mesh, Optimizer, Precision
from planner.schema.cluster import ClusterDocument, Link

__all__ = ["REQUESTS", "differences", "main"]

FOLDER = Path(__file__).parent / "data" / "refit"

_DIGITS = 9

Request = Callable[[], Plan]


def _sequential() -> Plan:
    from torch import nn

    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    return plan(
        model,
        Cluster.from_document(ClusterDocument.load(FOLDER.parent / "refit_local.json")),
        global_batch=64,
        example_inputs={"input": ((64, 512), "float32")},
        precision=Precision(compute="float32"),
        evaluation_budget=64,
    )


def _occupied() -> Plan:
    cluster = Cluster.parse("dgx-a100:2").with_occupied(range(5))
    return plan("gpt2-xl", cluster, global_batch=64, seq_len=1024)


def _mixed() -> Plan:
    link = Link(
        name="100 GbE", bandwidth_bytes_per_s=12.5e9, latency_s=5e-6, source="assumed"
    )
    parts = (Cluster.parse("dgx-a100:1"), Cluster.parse("dgx-v100:1"))
    return plan(
        "llama2-7b",
        Cluster.mixed(*parts, level=link),
        global_batch=128,
        seq_len=2048,
        evaluation_budget=200,
    )


def _given(**fields: Any) -> Plan:
    return predict("llama3-8b", "dgx-h100:4", Strategy(**fields), seq_len=8192)


def _planned(model: str, cluster: str, **options: Any) -> Request:
    return lambda: plan(model, cluster, **options)


#: Requests by name: one of each kind that a plan may be made for.
REQUESTS: dict[str, Request] = {
    "dense": _planned("llama3-8b", "dgx-h100:8", global_batch=128, seq_len=8192),
    "large": _planned("llama3-405b", "dgx-h100:2048", global_batch=2048, seq_len=8192),
    "experts": _planned("mixtral-8x7b", "dgx-h100:8", global_batch=256, seq_len=4096),
    "long": _planned("llama3-8b", "dgx-h100:8", global_batch=8, seq_len=131072),
    "encoder_decoder": _planned("t5-3b", "dgx-a100:2", global_batch=64, seq_len=512),
    "vision": _planned("vit-l", "dgx-a100:1", global_batch=256),
    "module": _sequential,
    "occupied": _occupied,
    "mixed": _mixed,
    "consumer": _planned(
        "gpt2-xl", "rtx4090-pc:4", global_batch=32, seq_len=1024, evaluation_budget=200
    ),
    "few_devices": _planned(
        "gpt2-xl",
        "dgx-a100:1",
        global_batch=32,
        seq_len=1024,
        devices="any",
        objective="throughput_per_device",
    ),
    "least_memory": _planned(
        "llama3-8b", "dgx-h100:1", global_batch=32, seq_len=4096, objective="memory"
    ),
    "torchtitan": _planned(
        "llama3-70b", "dgx-h100:8", global_batch=128, seq_len=8192, target="torchtitan"
    ),
    "megatron": _planned(
        "llama3-8b", "dgx-h100:4", global_batch=256, seq_len=4096, target="megatron"
    ),
    "deepspeed": _planned(
        "llama2-13b", "dgx-a100:4", global_batch=64, seq_len=4096, target="deepspeed"
    ),
    "pinned": _planned(
        "llama3-8b",
        "dgx-h100:4",
        global_batch=256,
        seq_len=4096,
        pin={"pp": 4, "tp": 2, "schedule": "ZBVZeroBubble"},
    ),
    "compiled": _planned(
        "llama3-8b",
        "dgx-h100:2",
        global_batch=64,
        seq_len=8192,
        pin={"compile": True},
        grad_clip_norm=1.0,
        optimizer=Optimizer(name="SGD", momentum=0.9),
    ),
    "evolutionary": _planned(
        "llama3-8b",
        "dgx-h100:2",
        global_batch=64,
        seq_len=8192,
        partitioner="evolutionary",
        evaluation_budget=300,
        seed=3,
    ),
    "given_dualpipe": lambda: _given(
        mesh=Mesh(pp=4, dp_shard=8),
        zero_stage=1,
        schedule="DualPipeV",
        virtual_stages=2,
        num_microbatches=16,
    ),
    "given_uneven": lambda: _given(
        mesh=Mesh(pp=2, dp_replicate=2, dp_shard=4, cp=2),
        zero_stage=3,
        schedule="Interleaved1F1B",
        virtual_stages=4,
        num_microbatches=8,
        context_algorithm="ring",
    ),
}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return value


def _comparable(made: Plan) -> Plan:
    """The plan with rounded floats, without clock times and version."""
    data = {k: v for k, v in made.to_data().items() if k not in made.CLOCK_FIELDS}
    data["provenance"]["meshwright_version"] = ""
    return Plan.from_data(_rounded(data))


def differences(name: str) -> tuple[str, ...]:
    """Plan a request anew and tell where the plan differs from the one kept for it."""
    kept = Plan.load(FOLDER / f"{name}.json")
    return _comparable(kept).diff(_comparable(REQUESTS[name]()))


def main() -> None:
    """Print a line a request, and every difference under it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", choices=REQUESTS, default=list(REQUESTS))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    differing = 0
    for name in options.only:
        started = time.perf_counter()
        if options.write:
            FOLDER.mkdir(parents=True, exist_ok=True)
            _comparable(REQUESTS[name]()).save(FOLDER / f"{name}.json")
            found: tuple[str, ...] = ()
        else:
            found = differences(name)
        word = "written" if options.write else "differs" if found else "equal"
        print(f"{name:16} {word:8} {time.perf_counter() - started:6.1f} s", flush=True)
        for line in found:
            print(f"    {line}")
        differing += bool(found)
    print(f"{differing} of {len(options.only)} plans differ")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
