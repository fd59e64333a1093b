"""Steps of real models on one GPU: predicted before they were measured.

python -m benchmarks.one_gpu predict FOLDER   # anywhere; writes a plan a case
python -m benchmarks.one_gpu measure FOLDER   # where the GPU is
python -m benchmarks.one_gpu table FOLDER     # anywhere

Cases are in benchmarks/data/one_gpu.yaml, GPUs in benchmarks/data/one_h200.yaml.
``predict`` writes a plan with its prediction, ``measure`` trains by it: real models of
random weights, the own executors, NCCL. A case that fails is recorded with its
error. One more step is profiled: seconds and launches of each kernel.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import tempfile
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import yaml

from executors import run
from executors.runner import StepReport
from planner import plan
from planner.capture import load_model
from planner.cluster import Cluster
from planner.schema import Plan, Precision

_DATA = Path(__file__).parent / "data"
_STEPS, _PROFILED = 12, 9


def read_cases() -> dict[str, dict[str, Any]]:
    """Cases of the data file, by name."""
    with open(_DATA / "one_gpu.yaml", encoding="utf-8") as file:
        found: dict[str, dict[str, Any]] = yaml.safe_load(file)
    return found


def _path(folder: Path, name: str, suffix: str) -> Path:
    return folder / f"{name.replace(' ', '_').replace(',', '')}.{suffix}.json"


def make_plan(case: dict[str, Any], cluster: Cluster) -> Plan:
    """Plan a case by its pins; nothing is left to choose."""
    return plan(
        case["model"],
        cluster,
        global_batch=case["batch"],
        seq_len=case.get("seq_len"),
        partitioner="expert",
        pin={
            "microbatch_size": case.get("microbatch", case["batch"]),
            "recompute": case.get("recompute", "none"),
            "compile": case.get("compile", False),
        },
        precision=Precision(compute=case.get("compute", "bfloat16")),
        memory_fraction=1.0,
        certify=False,
    )


def predict(folder: Path, device: str) -> None:
    """Write a plan a case."""
    cluster = Cluster.from_file(_DATA / f"one_{device}.yaml")
    for name, case in read_cases().items():
        try:
            made = make_plan(case, cluster)
        except Exception as error:
            print(f"{name:28} {type(error).__name__}: {error}")
            continue
        made.save(_path(folder, name, "plan"))
        found = made.prediction
        print(
            f"{name:28} {found.step_time_s * 1e3:8.1f} ms "
            f"{found.peak_memory_bytes / 2**30:6.2f} GiB"
        )


class _Profiled:
    """Profiles one step of a run, and keeps what the allocator held at most."""

    def __init__(self) -> None:
        self.profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA]
        )
        self.kernels: dict[str, list[float]] = {}

    def __call__(self, report: StepReport) -> None:
        if report.step == _PROFILED:
            self.profiler.start()
        if report.step == _PROFILED + 1:
            torch.cuda.synchronize()
            self.profiler.stop()
            sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
            for event in self.profiler.events():
                if event.device_type == torch.autograd.DeviceType.CUDA:
                    sums[event.name][0] += event.time_range.elapsed_us() / 1e6
                    sums[event.name][1] += 1
            self.kernels = dict(sums)


def measure_case(name: str, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train a case by its plan; what was measured, with the kernels of one step."""
    made = Plan.load(_path(folder, name, "plan"))
    with tempfile.TemporaryDirectory() as kept:
        reference = _reference(case["model"], Path(kept))
        loaded = load_model(reference, seq_len=case.get("seq_len"))
    profiled = _Profiled() if torch.cuda.is_available() else None
    begin = time.perf_counter()
    found = run(
        made,
        loaded.build,
        steps=_STEPS,
        measure=True,
        force=True,
        on_step=profiled,
    )
    assert found.measurement is not None
    times = found.step_times_s
    usable = [*times[2:_PROFILED], *times[_PROFILED + 2 :]]
    return {
        "step_times_s": times,
        "step_time_s": statistics.median(usable),
        "losses": found.losses,
        "peak_memory_bytes": max(found.measurement.peak_memory_bytes),
        "environment": dict(found.measurement.environment),
        "wall_s": time.perf_counter() - begin,
        "kernels": profiled.kernels if profiled else {},
    }


def _reference(model: str | dict[str, Any], folder: Path) -> str:
    """Reference of a model that may be given by the fields of its config."""
    if isinstance(model, str):
        return model
    (folder / "config.json").write_text(json.dumps(model))
    return f"hf:{folder}"


def measure(folder: Path, out: Path, seconds: float) -> None:
    """Train all cases whose plans are there, while time is left."""
    begin = time.perf_counter()
    for name, case in read_cases().items():
        if not _path(folder, name, "plan").exists():
            continue
        if time.perf_counter() - begin > seconds:
            print(f"{name:28} not begun: time is over", flush=True)
            continue
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        found: dict[str, Any]
        try:
            found = measure_case(name, case, folder)
            said = (
                f"{found['step_time_s'] * 1e3:8.1f} ms "
                f"{found['peak_memory_bytes'] / 2**30:6.2f} GiB "
                f"{found['wall_s']:5.1f} s"
            )
        except Exception as error:
            found = {"error": traceback.format_exc()}
            said = f"{type(error).__name__}: {str(error)[:200]}"
        if torch.cuda.is_available():
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        _path(out, name, "measured").write_text(json.dumps(found))
        print(f"{name:28} {said}", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if hasattr(torch, "_dynamo"):
            torch._dynamo.reset()


def table(folder: Path) -> None:
    """Print predicted beside measured."""
    times, memories = [], []
    print(
        f"{'case':28} {'predicted':>10} {'measured':>10} {'error':>7} {'allocated':>22}"
    )
    for name in read_cases():
        made = _path(folder, name, "plan")
        measured = _path(folder, name, "measured")
        if not made.exists() or not measured.exists():
            continue
        said = Plan.load(made).prediction
        found = json.loads(measured.read_text())
        if "error" in found:
            print(f"{name:28} {found['error'].strip().splitlines()[-1][:80]}")
            continue
        own = said.peak_memory_bytes - said.memory[0].reserve_bytes
        times.append(said.step_time_s / found["step_time_s"] - 1)
        memories.append(own / found["peak_memory_bytes"] - 1)
        print(
            f"{name:28} {said.step_time_s * 1e3:7.1f} ms"
            f" {found['step_time_s'] * 1e3:7.1f} ms {times[-1]:+7.1%}"
            f" {own / 2**30:6.2f} {found['peak_memory_bytes'] / 2**30:6.2f} GiB"
            f" {memories[-1]:+7.1%}"
        )
    for kind, errors in (("time", times), ("memory", memories)):
        mean = math.fsum(map(abs, errors)) / len(errors)
        median = statistics.median(map(abs, errors))
        print(f"{kind}: mean {mean:.1%}, median {median:.1%}")


def main() -> None:
    """Predict, measure or print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=("predict", "measure", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("h100", "h200"), default="h200")
    parser.add_argument("--out", type=Path, help="for what was measured; else FOLDER")
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args()
    if options.what == "predict":
        options.folder.mkdir(parents=True, exist_ok=True)
        predict(options.folder, options.device)
    elif options.what == "measure":
        measure(options.folder, options.out or options.folder, options.seconds)
    else:
        table(options.folder)


if __name__ == "__main__":
    main()
