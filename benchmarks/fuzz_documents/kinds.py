"""Kinds of documents that come from outside: real ones, and how each is read."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "Kind"]

_ROOT = Path(__file__).parents[2]
_EXAMPLES = _ROOT / "tests" / "export" / "golden"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of document.

    Attributes:
        suffix: Ending of its files.
        seeds: Real documents.
        read: Reads a file as commands do, and goes on with what it holds.
    """

    suffix: str
    seeds: Callable[[], Sequence[str]]
    read: Callable[[Path], Any]


def _golden(launcher: str, name: str) -> list[str]:
    found = sorted((_EXAMPLES / launcher).glob(f"*/{name}"))
    return [path.read_text() for path in found]


def _plans() -> list[str]:
    from planner.schema import Plan

    text = (_ROOT / "benchmarks" / "data" / "fuzz_plan.json").read_text()
    plan = Plan.from_json(text)
    return [text, json.dumps(plan.to_data())]


def _strategies() -> list[str]:
    data = [json.loads(text)["strategy"] for text in _plans()]
    pipeline = {
        "mesh": {"pp": 4, "dp_shard": 2, "tp": 2},
        "schedule": "Interleaved1F1B",
        "virtual_stages": 2,
        "num_microbatches": 8,
        "zero_stage": 1,
        "sharding": {"patterns": {"layers.*.mlp.up": "colwise"}},
        "device_ranges": [[0, 8], [8, 16]],
    }
    return [json.dumps(data[0]), json.dumps(pipeline)]


def _clusters() -> list[str]:
    from planner.cluster import Cluster, device_type

    made = [Cluster.parse(name).document for name in ("dgx-h100:4", "dgx-a100")]
    square = [[1e9] * 4 for _ in range(4)]
    matrix = Cluster.from_matrices(square, [[1e-6] * 4] * 4, device_type("h100-80"))
    return [document.to_json() for document in (*made, matrix.document)]


def _cluster_yaml() -> list[str]:
    import yaml

    own = (_ROOT / "examples" / "cluster.yaml").read_text()
    return [own, yaml.safe_dump(json.loads(_clusters()[0]))]


def _measurements() -> list[str]:
    traffic = {"all_reduce": {"count": 4, "bytes": 4096.0}}
    return [
        json.dumps(
            {
                "schema_version": 1,
                "plan_label": "dp_replicate2 mb1x1",
                "model_name": "tiny",
                "model_fingerprint": "0123456789abcdef",
                "step_times_s": [0.5, 0.25, 0.25],
                "warm_up_steps": 1,
                "median_step_time_s": 0.25,
                "peak_memory_bytes": [1000, 1000],
                "collectives": [traffic, traffic],
                "losses": [2.5, "NaN", 2.0],
                "environment": {"backend": "gloo"},
            }
        )
    ]


def _points() -> list[str]:
    lines = (_ROOT / "benchmarks" / "data" / "collected.csv").read_text().splitlines()
    return ["\n".join(lines[:6]) + "\n", "\n".join([lines[0], *lines[20:24]]) + "\n"]


def _megatron() -> list[str]:
    return [
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--micro-batch-size 1 --global-batch-size 32 --num-layers 32 --bf16 "
        "--use-distributed-optimizer --lr 3e-4 --recompute-granularity full\n",
        "--pipeline-model-parallel-size 2 --micro-batch-size 2 --num-layers 6 "
        '--pipeline-model-parallel-layout "Et|(tt|)*2,tL" --context-parallel-size 2\n',
        "--pipeline-model-parallel-size 4 --micro-batch-size 1 --num-layers 32 "
        "--num-layers-per-virtual-pipeline-stage 4 --global-batch-size 64\n",
    ]


def _configs() -> list[str]:
    llama = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
    }
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32}
    vit = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2}
    vit |= {"num_attention_heads": 2, "intermediate_size": 64, "image_size": 32}
    return [json.dumps(data) for data in (llama, gpt2, vit)]


def _profiles() -> list[str]:
    names = ("Embedding(32, 8)", "LSTM(8, 8)", "Linear(8, 32)")
    nodes = [
        f"node{i} -- {op} -- forward_compute_time=0.{i}, backward_compute_time=1.{i}, "
        f"activation_size={size}, parameter_size=1024.000"
        for i, (op, size) in enumerate(
            zip(names, ("64.0", "[64.0; 32.0]", "128.0"), strict=True), start=1
        )
    ]
    return ["\n".join([*nodes, "\tnode1 -- node2", "\tnode2 -- node3"]) + "\n"]


def _traces() -> list[str]:
    rows = [f"{10.5 * i},gnmt,{0.1 * i + 0.2:.1f}" for i in range(6)]
    return ["\n".join(["arrival_s,model,beta", *rows]) + "\n"]


def _read_plan(path: Path) -> Any:
    from planner.errors import ExportError
    from planner.export import export_files, exporter_names
    from planner.schema import Plan

    plan = Plan.load(path)
    told = plan.explain(), plan.summary(), plan.diff(plan), plan.strategy.label()
    for target in exporter_names():
        with contextlib.suppress(ExportError):
            export_files(plan, target)
    return told


def _read_strategy(path: Path) -> Any:
    from planner import predict
    from planner.strategy_input import read_strategy

    strategy = read_strategy(path)
    told = strategy.label(), strategy.device_ids(), strategy.to_json()
    return told, predict(*_world(), strategy).explain()


@functools.cache
def _world() -> tuple[Any, Any]:
    from planner import Cluster
    from planner.capture import capture, load_model

    return capture(load_model("gpt2", seq_len=128)), Cluster.parse("dgx-h100:2")


def _read_cluster(path: Path) -> Any:
    from planner.cluster import Cluster

    cluster = Cluster.parse(str(path))
    return cluster.describe(), cluster.document.to_json(), cluster.reference()


def _read_measurement(path: Path) -> Any:
    from planner.schema.measurement import Measurement

    found = Measurement.load(path)
    return found.total_traffic(), found.to_json()


def _read_points(path: Path) -> Any:
    from planner.measurements.points import read_points

    return read_points(path)


def _read_calibration(path: Path) -> Any:
    from planner.measurements.store import load_calibration

    return load_calibration(path)


def _read_config(source: str, processes: int | None = 8) -> Callable[[Path], Any]:
    def read_one(path: Path) -> Any:
        from planner.cli.strategies import read_config
        from planner.imports import Wanted, detect_source, import_text

        text = read_config(str(path))
        found = import_text(source, text, Wanted(world_size=processes), path.name)
        return found.strategy.to_json(), detect_source(text, path.name)

    return read_one


def _read_model(path: Path) -> Any:
    from planner.capture.fakes import build_on_meta
    from planner.capture.models import load_model

    return build_on_meta(load_model(f"hf:{path}").build, None)


def _read_profile(path: Path) -> Any:
    from planner.capture.pipedream import read_profile

    return read_profile(path).to_dict()


def _read_trace(path: Path) -> Any:
    from envs.ramp.arrivals import read_arrivals

    return read_arrivals(path)


def _constants() -> list[str]:
    text = (_ROOT / "planner" / "measurements" / "data" / "published.json").read_text()
    return [text]


KINDS: dict[str, Kind] = {
    "plan": Kind(suffix=".json", seeds=_plans, read=_read_plan),
    "strategy": Kind(suffix=".json", seeds=_strategies, read=_read_strategy),
    "cluster": Kind(suffix=".json", seeds=_clusters, read=_read_cluster),
    "cluster YAML": Kind(suffix=".yaml", seeds=_cluster_yaml, read=_read_cluster),
    "measurement": Kind(suffix=".json", seeds=_measurements, read=_read_measurement),
    "measured points": Kind(suffix=".csv", seeds=_points, read=_read_points),
    "calibration": Kind(suffix=".json", seeds=_constants, read=_read_calibration),
    "accelerate": Kind(
        suffix=".yaml",
        seeds=lambda: _golden("accelerate", "accelerate.yaml"),
        read=_read_config("accelerate", None),
    ),
    "DeepSpeed": Kind(
        suffix=".json",
        seeds=lambda: _golden("deepspeed", "ds_config.json"),
        read=_read_config("deepspeed"),
    ),
    "Megatron": Kind(suffix=".txt", seeds=_megatron, read=_read_config("megatron")),
    "transformers": Kind(suffix=".json", seeds=_configs, read=_read_model),
    "PipeDream": Kind(suffix=".txt", seeds=_profiles, read=_read_profile),
    "job trace": Kind(suffix=".csv", seeds=_traces, read=_read_trace),
}
