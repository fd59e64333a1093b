"""Predicted against measured step times of different plans on this machine.

python -m benchmarks.predicted_vs_measured

Probes the machine with 4 gloo processes, then plans one model by pins for 2 to 4
processes, one thread each, and trains every plan for real. Nothing is fitted to the
measured steps: the prediction knows the probe and the model. Prints a table and the
rank correlation (Spearman).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from executors import launch
from planner import plan
from planner.capture import capture, load_model
from planner.cluster import Cluster
from planner.schema import Optimizer, Plan, Precision
from planner.schema.measurement import Measurement
from planner.schema.probe import ProbeDocument
from planner.space import MESH_COLUMNS

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "use_cache": False,
}
_BATCH, _LENGTH = 16, 128

#: Every plan differs in kind from the others, not only in size.
_PLANS: tuple[Mapping[str, object], ...] = (
    {"dp_replicate": 4},
    {"dp_replicate": 4, "microbatch_size": 1},
    {"dp_replicate": 4, "recompute": "full"},
    {"dp_shard": 4, "zero_stage": 2, "microbatch_size": 4},
    {"dp_shard": 4, "zero_stage": 3, "microbatch_size": 4},
    {"dp_shard": 4, "zero_stage": 3, "microbatch_size": 1},
    {"tp": 2, "dp_replicate": 2, "microbatch_size": 8},
    {"tp": 4, "microbatch_size": 16},
    {"tp": 4, "microbatch_size": 4},
    {"pp": 4, "schedule": "1F1B", "microbatch_size": 2},
    {"pp": 4, "schedule": "GPipe", "microbatch_size": 8},
    {"pp": 2, "dp_replicate": 2, "schedule": "1F1B", "microbatch_size": 4},
    {"pp": 2, "tp": 2, "schedule": "1F1B", "microbatch_size": 8},
    {"dp_replicate": 2},
    {"pp": 2, "schedule": "1F1B", "microbatch_size": 8},
    {"tp": 2, "microbatch_size": 16},
)


def probe(processes: int, seconds: float) -> Cluster:
    """Measure this machine with that many processes."""
    arguments = {
        "seconds": seconds,
        "seed": 0,
        "device": "cpu",
        "name": "benchmark",
        "date": "",
    }
    results = launch("planner.cli.rank:probe_rank", arguments, processes=processes)
    return Cluster.from_probe(ProbeDocument.from_data(results[0]))


def measure(made: Plan, model: str, steps: int, folder: Path) -> Measurement:
    """Train by a plan and measure it."""
    path = folder / "plan.json"
    made.save(path)
    arguments = {
        "plan": str(path),
        "model": model,
        "allow_remote_code": False,
        "data": None,
        "steps": steps,
        "seed": 0,
        "measure": True,
        "force": True,
    }
    results = launch(
        "planner.cli.rank:train_rank",
        arguments,
        processes=made.strategy.mesh.num_devices,
        timeout_s=600,
    )
    return Measurement.from_data(results[0]["measurement"])


def main() -> None:
    """Print the table and the rank correlation."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(_CONFIG))
        model = f"hf:{folder / 'config.json'}"
        machine = probe(4, options.seconds)
        graph = capture(load_model(model, seq_len=_LENGTH), dtype="float32")
        print(
            f"{'plan':44} {'predicted':>10} {'measured':>10} {'ratio':>6}  memory ratio"
        )
        for pins in _PLANS:
            made = plan(
                graph,
                machine,
                global_batch=_BATCH,
                pin=dict.fromkeys(MESH_COLUMNS, 1) | dict(pins),
                precision=Precision(compute="float32"),
                optimizer=Optimizer(name="AdamW"),
            )
            found = measure(made, model, options.steps, folder)
            predicted, measured = made.prediction.step_time_s, found.median_step_time_s
            peak = max(found.peak_memory_bytes)
            memory = made.prediction.peak_memory_bytes / peak
            label = (
                f"{made.strategy.mesh.num_devices} processes: {made.strategy.label()}"
            )
            rows.append(
                {"plan": label, "predicted_s": predicted, "measured_s": measured}
                | {"memory_ratio": memory}
            )
            print(
                f"{label:44} {predicted:8.3f} s {measured:8.3f} s "
                f"{predicted / measured:6.2f}  {memory:.2f}",
                flush=True,
            )
    predicted = np.array([row["predicted_s"] for row in rows])
    measured = np.array([row["measured_s"] for row in rows])
    rank = spearmanr(predicted, measured).statistic
    print(
        f"{len(rows)} plans, predicted times span "
        f"{predicted.max() / predicted.min():.1f}x, "
        f"measured {measured.max() / measured.min():.1f}x; rank correlation {rank:.3f}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
