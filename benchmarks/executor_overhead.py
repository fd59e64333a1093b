"""The executors against scripts written by hand for the same strategy.

python -m benchmarks.executor_overhead

Both train one Llama of transformers on the same ranks of the same process group, a
step of the one after a step of the other, and their losses must agree. Told are the
median of the paired ratios of step times with a bootstrap interval of 95 %, and the
ratio of peak memory, which each side is measured for in processes of its own. The
targets are 1.03 and 1.02. What a machine that is busy with other things adds hits both
sides alike, but makes the interval wide.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.hand_written import HandWritten, Recipe
from executors import launch
from executors.data import synthetic_batch
from executors.launching.process_group import process_group
from executors.measuring.memory import LiveMemory
from executors.mesh import build_mesh, choose_device
from executors.trainer import Trainer
from planner import plan
from planner.capture import load_model
from planner.schema import Optimizer, Plan, Precision
from planner.space import MESH_COLUMNS

__all__ = ["measure_rank"]

_CPU_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "use_cache": False,
    "tie_word_embeddings": False,
}
_GPU_CONFIG = _CPU_CONFIG | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
_TARGET_TIME, _TARGET_MEMORY = 1.03, 1.02
_WARM_UP = 3
#: Largest relative difference of losses, by dtype.
_AGREE = {"float32": 1e-4, "bfloat16": 2e-2}

#: Pins of each strategy.
_CASES: Mapping[str, Mapping[str, Any]] = {
    "one device": {},
    "FSDP2": {"dp_shard": 2, "zero_stage": 3},
    "TP": {"tp": 2, "sequence_parallel": False},
    "1F1B": {"pp": 2, "schedule": "1F1B", "num_microbatches": 4},
    "2x2x2": {
        "pp": 2,
        "dp_shard": 2,
        "tp": 2,
        "zero_stage": 2,
        "schedule": "1F1B",
        "num_microbatches": 4,
        "sequence_parallel": False,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        case: Key of the strategy.
        step_s: Median step time of the executors and of the script.
        ratio: Median of the paired ratios, executors over script.
        interval: Of the ratio, 95 %.
        work_ratio: The same of processor time, summed over ranks; other programs on
            the machine disturb it less.
        memory_ratio: Of peaks on the fullest rank.
    """

    case: str
    step_s: tuple[float, float]
    ratio: float
    interval: tuple[float, float]
    work_ratio: float
    memory_ratio: float


def make_plan(case: str, options: argparse.Namespace, model: str) -> Plan:
    """The plan of a case, as anyone would ask for it; the planner cuts the stages."""
    pins = dict.fromkeys(MESH_COLUMNS, 1) | dict(_CASES[case])
    pins |= {"recompute": "none"}
    pins.setdefault("num_microbatches", 1)
    devices = int(np.prod([pins[axis] for axis in MESH_COLUMNS]))
    return plan(
        model,
        f"local:{devices}",
        global_batch=options.batch,
        seq_len=options.length,
        pin=pins,
        precision=Precision(
            parameter=options.dtype, compute=options.dtype, reduce=options.dtype
        ),
        optimizer=Optimizer(name="AdamW", state_dtype=options.dtype),
    )


def recipe(made: Plan, compiled: bool) -> Recipe:
    """The same strategy for the script."""
    strategy = made.strategy
    bounds, done = [], 0
    for stage in strategy.stages:
        layers = sum(".layers." in name for name in stage.modules)
        bounds.append((done, done + layers))
        done += layers
    mesh = strategy.mesh
    return Recipe(
        degrees={"pp": mesh.pp, "dp": mesh.dp_shard, "tp": mesh.tp},
        microbatches=strategy.num_microbatches,
        zero_stage=strategy.zero_stage,
        bounds=bounds,
        dtype=getattr(torch, strategy.precision.compute),
        compiled=compiled,
        learning_rate=strategy.optimizer.learning_rate,
    )


def measure_rank(arguments: dict[str, Any], _: Any) -> dict[str, Any]:
    """Build the sides that are asked for and train them in turn, on one rank.

    Returns:
        Losses and step times of each side, its peak memory if it is alone.
    """
    made = Plan.load(arguments["plan"])
    device = choose_device(arguments["device"])
    with process_group(device, timeout_s=300):
        sides = {
            name: _build(name, made, arguments, device) for name in arguments["sides"]
        }
        batches = [synthetic_batch(made.workload, index) for index in range(4)]
        losses: dict[str, list[float]] = {name: [] for name in sides}
        times: dict[str, list[float]] = {name: [] for name in sides}
        works: dict[str, list[float]] = {name: [] for name in sides}
        for index in range(_WARM_UP + arguments["rounds"]):
            # Who goes first takes turns, too.
            for name in sorted(sides, reverse=index % 2 == 0):
                dist.barrier()
                begin, work = time.perf_counter(), time.process_time()
                losses[name].append(sides[name](batches[index % len(batches)]))
                times[name].append(time.perf_counter() - begin)
                works[name].append(time.process_time() - work)
        peak = None
        if len(sides) == 1:
            (only,) = sides.values()
            peak = _peak_bytes(lambda: only(batches[0]), device)
    return {"losses": losses, "times": times, "works": works, "peak": peak}


def _build(
    name: str, made: Plan, arguments: Mapping[str, Any], device: torch.device
) -> Callable[[Mapping[str, torch.Tensor]], float]:
    torch.manual_seed(0)
    model = load_model(arguments["model"], seq_len=made.workload.seq_len).build()
    if name == "ours":
        trainer = Trainer(made, model, build_mesh(made.strategy, device))
        return lambda batch: trainer.step(batch).loss
    return HandWritten(model, recipe(made, arguments["compiled"]), device).step


def _peak_bytes(step: Callable[[], float], device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    with LiveMemory() as memory:
        step()
    return memory.peak_bytes


def bootstrap(
    ratios: np.ndarray[Any, np.dtype[np.float64]],
) -> tuple[float, float, float]:
    """Median, and the interval that holds 95 % of the medians of resamples."""
    rng = np.random.default_rng(0)
    drawn = rng.choice(ratios, size=(4000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)


def compare(case: str, options: argparse.Namespace, folder: Path) -> Row:
    """Launch a case three times: side by side, then each alone for its memory."""
    model = f"hf:{folder / 'config.json'}"
    made = make_plan(case, options, model)
    path = folder / "plan.json"
    made.save(path)
    arguments = {
        "plan": str(path),
        "model": model,
        "device": options.device,
        "compiled": options.compile,
    }

    def start(sides: Sequence[str], rounds: int) -> list[dict[str, Any]]:
        return launch(
            "benchmarks.executor_overhead:measure_rank",
            arguments | {"sides": list(sides), "rounds": rounds},
            processes=made.strategy.mesh.num_devices,
            timeout_s=3600,
        )

    both = start(("ours", "script"), options.rounds)
    losses = [np.array(both[0]["losses"][side]) for side in ("ours", "script")]
    apart = float(np.abs(losses[0] / losses[1] - 1).max())
    if apart > _AGREE[options.dtype]:
        raise SystemExit(f"{case}: losses differ by {apart:.1e}; nothing to compare")
    # A step has ended when its last rank has.
    ours, script = (
        np.array([rank["times"][side] for rank in both]).max(axis=0)[_WARM_UP:]
        for side in ("ours", "script")
    )
    ratio, low, high = bootstrap(ours / script)
    work = [
        np.array([rank["works"][side] for rank in both]).sum(axis=0)[_WARM_UP:]
        for side in ("ours", "script")
    ]
    peaks = [
        max(rank["peak"] for rank in start((side,), 0)) for side in ("ours", "script")
    ]
    return Row(
        case=f"{case} on {made.strategy.mesh.num_devices}",
        step_s=(float(np.median(ours)), float(np.median(script))),
        ratio=ratio,
        interval=(low, high),
        work_ratio=float(np.median(work[0] / work[1])),
        memory_ratio=peaks[0] / peaks[1],
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cases", nargs="+", choices=list(_CASES))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true", help="compile every layer")
    parser.add_argument("--batch", type=int, default=16, help="samples a step")
    parser.add_argument("--length", type=int, default=128, help="tokens a sample")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    gpu = options.device == "cuda"
    options.dtype = "bfloat16" if gpu else "float32"
    cases = options.cases or ("FSDP2", "TP", "1F1B", "2x2x2")
    rows = []
    print(
        f"{'case':16} {'executors':>10} {'script':>10} {'ratio':>6}  "
        f"{'95 % interval':>14}  {'CPU time':>8}  {'memory':>6}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = _GPU_CONFIG if gpu else _CPU_CONFIG
        (folder / "config.json").write_text(json.dumps(config))
        for case in cases:
            row = compare(case, options, folder)
            rows.append(row)
            ours, script = row.step_s
            low, high = row.interval
            print(
                f"{row.case:16} {ours:8.3f} s {script:8.3f} s {row.ratio:6.3f}  "
                f"{low:6.3f} - {high:5.3f}  {row.work_ratio:8.3f}  "
                f"{row.memory_ratio:6.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
