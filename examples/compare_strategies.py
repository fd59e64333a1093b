"""Price strategies written by hand, and lay the planned one beside them.

    python examples/compare_strategies.py --model llama3-8b --cluster dgx-h100:4

One learns how to write a strategy down, what `predict` says of it (time by cause,
memory of the fullest device, or why it cannot be), and how far habits are from plans.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from planner import Cluster, Plan, plan, predict
from planner.api import read_model
from planner.errors import MeshwrightError


def by_hand(
    devices: int, batch: int, units: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Strategies that people tend to begin with; omitted fields have their defaults."""
    each = batch // devices
    return {
        "replicas (DDP)": {
            "mesh": {"dp_replicate": devices},
            "microbatch_size": each,
        },
        "ZeRO-3 (FSDP)": {
            "mesh": {"dp_shard": devices},
            "zero_stage": 3,
            "microbatch_size": each,
        },
        "ZeRO-3, recomputing": {
            "mesh": {"dp_shard": devices},
            "zero_stage": 3,
            "microbatch_size": each,
            # Stages that are left out are cut for you; to say what a stage computes
            # again, it is written down with all that it holds.
            "stages": [{"rank": 0, "modules": list(units), "recompute": "full"}],
        },
        "tensor parallel in a host": {
            "mesh": {"dp_replicate": devices // 8, "tp": 8},
            "microbatch_size": 1,
            "num_microbatches": batch // (devices // 8),
        },
        "two stages, 1F1B": {
            "mesh": {"pp": 2, "dp_shard": devices // 2},
            "zero_stage": 1,
            "schedule": "1F1B",
            "microbatch_size": 1,
            "num_microbatches": 2 * each,
        },
    }


def row(name: str, priced: Plan) -> str:
    """Step time, where it goes, and memory, in one line."""
    prediction = priced.prediction
    parts = sorted(prediction.breakdown_s.items(), key=lambda part: -part[1])
    where = ", ".join(
        f"{part} {seconds / prediction.step_time_s:.0%}" for part, seconds in parts[:2]
    )
    return (
        f"{name:<26}{prediction.step_time_s * 1e3:>10.1f} ms"
        f"{prediction.peak_memory_bytes / 1e9:>8.1f} GB  {where}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--cluster", default="dgx-h100:4")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--global-batch", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="gpt2 on one host")
    options = parser.parse_args()
    model, where, length = options.model, options.cluster, options.seq_len
    if options.quick:
        model, where, length = "gpt2", "dgx-a100:1", 512

    # Read once: the graph takes the model's place wherever a model is wanted.
    graph = read_model(model, None, seq_len=length, dtype="bfloat16")
    cluster = Cluster.parse(where)
    print(f"{graph.name} on {where}, {options.global_batch} samples a step\n")
    strategies = by_hand(cluster.num_devices, options.global_batch, graph.unit_names)
    best = float("inf")
    for name, strategy in strategies.items():
        try:
            priced = predict(graph, cluster, strategy)
        except MeshwrightError as error:
            print(f"{name:<26}{error}")
            continue
        memory = priced.prediction.memory
        if all(one.total_bytes <= one.limit_bytes for one in memory):
            best = min(best, priced.prediction.step_time_s)
        else:
            name += " *"
        print(row(name, priced))

    found = plan(graph, cluster, global_batch=options.global_batch)
    print(row("planned", found))
    print(f"\nplanned: {found.strategy.label()}")
    times = best / found.prediction.step_time_s
    print(f"the best by hand takes {times:.2f} times as long")
    print("* does not fit into memory")


if __name__ == "__main__":
    main()
