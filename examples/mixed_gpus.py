"""Plan for GPUs of three generations at once, and see what each of them gets.

    python examples/mixed_gpus.py --model gpt2-xl

One learns how a cluster is described in Python, and what a plan does where devices
differ: which of them form which part of a pipeline, how many layers and bytes each part
has, and what is gained over leaving the slow ones out.
"""

from __future__ import annotations

import argparse

from planner import Cluster, Plan, plan
from planner.cluster import device_type
from planner.schema import Precision
from planner.schema.cluster import ClusterDocument, HostGroup, Level, Link

#: Name, device type, hosts, GPUs in each, bytes/s between them.
HOSTS = (
    ("new", "h100-80", 1, 4, 450e9),
    ("middle", "a100-40", 1, 4, 300e9),
    ("old", "v100-16", 1, 4, 150e9),
)


def laboratory(network_bytes_per_s: float) -> Cluster:
    """Three servers on one switch. Numbers may be anything that was measured."""
    return Cluster.from_document(
        ClusterDocument(
            name="laboratory",
            device_types=[device_type(kind) for _, kind, *_ in HOSTS],
            hosts=[
                HostGroup(
                    name=name,
                    device=kind,
                    count=count,
                    devices_per_host=gpus,
                    link=Link(
                        name="NVLink", bandwidth_bytes_per_s=speed, latency_s=2e-6
                    ),
                )
                for name, kind, count, gpus, speed in HOSTS
            ],
            levels=[
                Level(
                    name="switch",
                    link=Link(
                        name="Ethernet",
                        bandwidth_bytes_per_s=network_bytes_per_s,
                        latency_s=2e-5,
                    ),
                )
            ],
        )
    )


def shares(found: Plan) -> list[str]:
    """A line for each pp rank: whose GPUs, how many layers, how full."""
    strategy = found.strategy
    devices = strategy.device_ids()
    in_a_stage = len(devices) // strategy.mesh.pp
    kinds = [kind for _, kind, count, gpus, _ in HOSTS for _ in range(count * gpus)]
    lines = []
    for memory in found.prediction.memory:
        held = devices[memory.rank * in_a_stage : (memory.rank + 1) * in_a_stage]
        modules = [
            name
            for stage in strategy.stages_of_rank(memory.rank)
            for name in (strategy.stages[stage].modules if strategy.stages else ("",))
        ]
        lines.append(
            f"pp rank {memory.rank}: GPUs {held[0]} to {held[-1]} "
            f"({', '.join(sorted({kinds[one] for one in held}))}), "
            f"{len(modules)} units ({modules[0]} … {modules[-1]}), "
            f"{memory.total_bytes / 1e9:.1f} of {memory.limit_bytes / 1e9:.1f} GB"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2-xl")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--global-batch", type=int, default=192)
    parser.add_argument("--network", type=float, default=3e9, help="bytes/s a GPU")
    parser.add_argument("--quick", action="store_true", help="gpt2-medium, less search")
    options = parser.parse_args()
    cluster = laboratory(options.network)
    wanted = {
        "global_batch": options.global_batch,
        "seq_len": options.seq_len,
        "evaluation_budget": 6 if options.quick else None,
        # The data type that all three generations are fast in: a V100 has no bfloat16.
        # Without it the planner chooses, and leaves out those that are too slow.
        "precision": Precision(compute="float16"),
        # Nobody has measured pipelines over unlike GPUs: by default they must win by
        # more than their uncertainty.
        "risk": "none",
    }
    model = "gpt2-medium" if options.quick else options.model

    everyone = plan(model, cluster, **wanted)
    print(everyone.summary(), end="\n\n")
    print("\n".join(shares(everyone)), end="\n\n")

    # The same without the old ones: their devices are marked as taken.
    last = cluster.num_devices
    without = cluster.with_occupied(range(last - 4, last))
    fewer = plan(model, without, **wanted)
    gained = fewer.prediction.step_time_s / everyone.prediction.step_time_s
    print(f"without the {HOSTS[-1][1]}: {fewer.strategy.label()}")
    print(f"a step takes {gained:.2f} times as long as with them")


if __name__ == "__main__":
    main()
