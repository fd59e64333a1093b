"""Predicted against measured peak memory of pipelines of every schedule.

python -m benchmarks.memory_of_pipelines

Plans one Llama by pins for pipelines of 2 and 4 gloo processes and trains every plan
for real. Activations outweigh all else, so that what the schedule keeps decides.
Nothing is fitted to what was measured. Prints the fullest rank of each plan, and the
rank that the prediction is furthest off.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from executors import launch, run
from executors.launching.process_group import process_group
from executors.mesh import choose_device
from planner import plan
from planner.capture import capture, load_model
from planner.cluster import Cluster
from planner.schema import Optimizer, Plan, Precision
from planner.space import MESH_COLUMNS

__all__ = ["main", "measure_rank"]

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "use_cache": False,
}
_BATCH, _MICROBATCH, _LENGTH = 128, 16, 16

#: (pp, schedule, virtual stages, further pins).
_PLANS: tuple[tuple[int, str, int, Mapping[str, object]], ...] = (
    (2, "GPipe", 1, {}),
    (2, "1F1B", 1, {}),
    (2, "1F1B", 1, {"recompute": "full"}),
    (2, "LoopedBFS", 2, {}),
    (2, "Interleaved1F1B", 2, {}),
    (2, "InterleavedZeroBubble", 2, {}),
    (2, "ZBVZeroBubble", 2, {}),
    (2, "DualPipeV", 2, {}),
    (4, "GPipe", 1, {}),
    (4, "1F1B", 1, {}),
    (4, "LoopedBFS", 2, {}),
    (4, "Interleaved1F1B", 2, {}),
    (4, "InterleavedZeroBubble", 2, {}),
    (4, "ZBVZeroBubble", 2, {}),
    (4, "DualPipeV", 2, {}),
)


def measure_rank(
    arguments: dict[str, Any], emit: Callable[[Any], None]
) -> list[list[int]]:
    """Train by one plan after the other as one rank.

    Args:
        arguments: ``plans`` as JSON, ``model`` and ``steps``.
        emit: Takes the label of each plan that is done.
    Returns:
        Peak bytes of every rank, by plan.
    """
    peaks = []
    with process_group(choose_device("cpu")):
        for text in arguments["plans"]:
            made = Plan.from_json(text)
            loaded = load_model(arguments["model"], seq_len=made.workload.seq_len)
            # Graphs of the plan before hold tensors in cycles.
            gc.collect()
            found = run(
                made,
                loaded.build,
                steps=arguments["steps"],
                device="cpu",
                measure=True,
                force=True,
            ).measurement
            assert found is not None
            peaks.append(list(found.peak_memory_bytes))
            emit(made.strategy.label())
    return peaks


def make_plans(model: str) -> list[Plan]:
    """Plan the model by each of the pins."""
    graph = capture(load_model(model, seq_len=_LENGTH), dtype="float32")
    made = []
    for pp, schedule, virtual, more in _PLANS:
        pins = dict.fromkeys(MESH_COLUMNS, 1) | {
            "pp": pp,
            "microbatch_size": _MICROBATCH,
            "schedule": schedule,
            "virtual_stages": virtual,
        }
        made.append(
            plan(
                graph,
                Cluster.parse(f"local:{pp}"),
                global_batch=_BATCH,
                pin=pins | dict(more),
                precision=Precision(compute="float32"),
                optimizer=Optimizer(name="AdamW"),
            )
        )
    return made


def _report(rank: int, label: str) -> None:
    if rank == 0:
        print(f"measured {label}", file=sys.stderr, flush=True)


def measure(plans: list[Plan], model: str, steps: int) -> list[list[int]]:
    """Peak bytes of every rank of each plan; one launch for each number of ranks."""
    found: dict[int, list[int]] = {}
    for pp in sorted({each.strategy.mesh.pp for each in plans}):
        chosen = [i for i, each in enumerate(plans) if each.strategy.mesh.pp == pp]
        arguments = {
            "plans": [plans[i].to_json() for i in chosen],
            "model": model,
            "steps": steps,
        }
        results = launch(
            "benchmarks.memory_of_pipelines:measure_rank",
            arguments,
            processes=pp,
            on_message=_report,
            timeout_s=1200,
        )
        found |= dict(zip(chosen, results[0], strict=True))
    return [found[i] for i in range(len(plans))]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(_CONFIG))
        model = f"hf:{Path(name) / 'config.json'}"
        plans = make_plans(model)
        peaks = measure(plans, model, options.steps)
    print(f"{'plan':40} {'predicted':>12} {'measured':>12}  ratio  worst rank")
    for made, peak in zip(plans, peaks, strict=True):
        memory = made.prediction.memory
        predicted = np.array([m.total_bytes - m.reserve_bytes for m in memory])
        measured = np.array(peak, dtype=float)
        ratio = predicted / measured
        worst = int(np.abs(np.log(ratio)).argmax())
        of_fullest = float(predicted.max() / measured.max())
        rows.append(
            {"plan": made.strategy.label(), "ratio": of_fullest}
            | {"predicted_bytes": predicted.tolist(), "measured_bytes": peak}
        )
        print(
            f"{made.strategy.label():40} {predicted.max() / 1e6:9.2f} MB "
            f"{measured.max() / 1e6:9.2f} MB  {of_fullest:5.2f}  "
            f"{worst}: {ratio[worst]:.2f}",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
