"""Steps of real models on one GPU: predicted, and measured.

python -m benchmarks.one_gpu measure FILE     # where the GPU is
python -m benchmarks.one_gpu table [FILE]     # anywhere

Cases are in benchmarks/data/one_gpu.yaml. ``measure`` trains by their plans: real
models of random weights, the own executors, NCCL. A case that fails is recorded with
its error. One step is profiled, for the seconds and the number of its kernels.
``table`` predicts each case on the GPU that FILE names and prints it beside what was
measured there; the file that ships also has what was predicted before anything was
changed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import statistics
import tempfile
import time
import traceback
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml

from executors import StepReport, run
from planner import plan
from planner.capture import load_model
from planner.cluster import Cluster
from planner.cluster.read import named_types
from planner.cost.context import PricingContext
from planner.request import make_context
from planner.schema import Plan, Precision
from planner.schema.cluster import ClusterDocument

_DATA = Path(__file__).parent / "data"
_STEPS, _PROFILED = 12, 9


def read_cases() -> dict[str, dict[str, Any]]:
    """Cases of the data file, by name."""
    with open(_DATA / "one_gpu.yaml", encoding="utf-8") as file:
        found: dict[str, dict[str, Any]] = yaml.safe_load(file)
    return found


def make_plan(case: dict[str, Any], cluster: Cluster) -> Plan:
    """Plan a case by its pins; nothing is left to choose."""
    made: Plan = plan(
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
    return made


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
            for event in self.profiler.events() or ():
                if event.device_type.name == "CUDA":
                    sums[event.name][0] += event.time_range.elapsed_us() / 1e6
                    sums[event.name][1] += 1
            self.kernels = dict(sums)


def measure_case(case: dict[str, Any], cluster: Cluster) -> dict[str, Any]:
    """Train a case by its plan; return what was measured."""
    made = make_plan(case, cluster)
    with tempfile.TemporaryDirectory() as kept:
        reference = _reference(case["model"], Path(kept))
        loaded = load_model(reference, seq_len=case.get("seq_len"))
    profiled = _Profiled() if torch.cuda.is_available() else None
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
    kernels = profiled.kernels.values() if profiled else ()
    return {
        "step_time_s": statistics.median(usable),
        "busy_s": math.fsum(seconds for seconds, _ in kernels),
        "launches": sum(count for _, count in kernels),
        "peak_memory_bytes": max(found.measurement.peak_memory_bytes),
    }


def _reference(model: str | dict[str, Any], folder: Path) -> str:
    """Reference of a model that may be given by the fields of its config."""
    if isinstance(model, str):
        return model
    (folder / "config.json").write_text(json.dumps(model))
    return f"hf:{folder}"


def measure(file: Path, seconds: float) -> None:
    """Train all cases, while time is left."""
    begin = time.perf_counter()
    cluster, runs = one_device(), {}
    for name, case in read_cases().items():
        if time.perf_counter() - begin > seconds:
            print(f"{name:28} not begun: time is over", flush=True)
            continue
        torch.cuda.reset_peak_memory_stats()
        found: dict[str, Any]
        try:
            found = measure_case(case, cluster)
            said = _figures(found["step_time_s"], found["peak_memory_bytes"])
        except Exception as error:
            found = {"error": traceback.format_exc()}
            said = f"{type(error).__name__}: {str(error)[:200]}"
        runs[name] = found | {"reserved_bytes": torch.cuda.max_memory_reserved()}
        print(f"{name:28} {said}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    document = {
        "device": cluster.device_types[0].name,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "runs": runs,
    }
    file.write_text(json.dumps(document, indent=2) + "\n")


def one_device(device: str | None = None) -> Cluster:
    """Return a cluster of one device type, by default of this machine's GPU."""
    if device is None:
        device = Cluster.detect().device_types[0].name
    link = {"name": "none", "bandwidth_bytes_per_s": 1e9, "latency_s": 1e-6}
    host = {"name": "host", "count": 1, "devices_per_host": 1, "device": device}
    data = {"name": device, "device_types": [device], "hosts": [host | {"link": link}]}
    return Cluster.from_document(ClusterDocument.from_data(named_types(data)))


def _figures(seconds: float, size: float) -> str:
    return f"{seconds * 1e3:7.1f} ms {size / 2**30:6.2f} GiB"


def _with_hooks(*request: Any, **options: Any) -> PricingContext:
    """Price the executors that were measured: hooks of ``fully_shard`` cast."""
    context = make_context(*request, **options)
    return replace(context, recipe=replace(context.recipe, own_casts=False))


def predicted(case: dict[str, Any], cluster: Cluster) -> tuple[float, float]:
    """Seconds of a step, and bytes that its tensors take at most."""
    with patch("planner.request.make_context", _with_hooks):
        said = make_plan(case, cluster).prediction
    # What context and allocator keep is no tensor's.
    return said.step_time_s, said.peak_memory_bytes - said.memory[0].reserve_bytes


def errors(document: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Predicted over measured, less 1, of step time and memory, by case."""
    cluster, cases = one_device(document["device"]), read_cases()
    found = {}
    for name, run_of in document["runs"].items():
        if "error" not in run_of:
            seconds, size = predicted(cases[name], cluster)
            found[name] = (
                seconds / run_of["step_time_s"] - 1,
                size / run_of["peak_memory_bytes"] - 1,
            )
    return found


def table(file: Path) -> None:
    """Print predicted beside measured."""
    document = json.loads(file.read_text())
    print(f"{document['device']}, torch {document['torch']}, {document['date']}")
    print(
        f"{'':28} {'measured':>22} {'GPU busy':>10} {'time':>8} {'memory':>8}"
        f" {'at first':>8} {'memory':>8}"
    )
    now, first = errors(document), []
    for name, run_of in document["runs"].items():
        if name not in now:
            print(f"{name:28} {run_of['error'].strip().splitlines()[-1][:80]}")
            continue
        then = [
            run_of[f"first_{figure}"] / run_of[figure] - 1
            for figure in ("step_time_s", "peak_memory_bytes")
            if f"first_{figure}" in run_of
        ]
        first += [then] if then else []
        measured = _figures(run_of["step_time_s"], run_of["peak_memory_bytes"])
        print(
            f"{name:28} {measured} {run_of['busy_s'] * 1e3:7.1f} ms "
            + " ".join(f"{error:+8.1%}" for error in (*now[name], *then))
        )
    for when, found in (("now", list(now.values())), ("at first", first)):
        if found:
            time_s, memory = (
                statistics.mean(map(abs, part)) for part in zip(*found, strict=True)
            )
            print(f"mean error {when}: time {time_s:.1%}, memory {memory:.1%}")


def main() -> None:
    """Measure or print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("file", type=Path, nargs="?", default=_DATA / "one_gpu.json")
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args()
    if options.what == "measure":
        measure(options.file, options.seconds)
    else:
        table(options.file)


if __name__ == "__main__":
    main()
