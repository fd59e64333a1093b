"""Time of reading a large model, with equal blocks run once and run each.

    python benchmarks/capture.py [--model llama3-405b] [--seq-len 8192] [--json]

Each reading runs in a fresh process on one thread; imports are left out of the time.
Peak memory is that of the whole process, imports included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

TARGETS = {"full": 6.0, "repeat": 1.0}
MEMORY_TARGET_BYTES = 1.5e9


def measure(model: str, seq_len: int, *, repeat: bool) -> dict[str, float]:
    """Read the model once in this process."""
    import torch
    import transformers

    from planner.capture import capture, load_model

    torch.set_num_threads(1)
    for name in ("AutoConfig", "LlamaForCausalLM"):
        getattr(transformers, name)
    loaded = load_model(model, seq_len=seq_len)
    started, cpu = time.perf_counter(), time.process_time()
    graph = capture(loaded, repeat=repeat)
    return {
        "wall_s": time.perf_counter() - started,
        "cpu_s": time.process_time() - cpu,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "blocks": len(graph.blocks),
        "parameters": graph.num_parameters,
        "forward_flops": graph.forward_flops,
        "backward_flops": graph.backward_flops,
        "saved_bytes": graph.saved_bytes,
        "cut_bytes": float(graph.cut_bytes.sum()),
    }


def fresh(model: str, seq_len: int, mode: str) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--model", model, "--seq-len", str(seq_len)]
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [*command, "--mode", mode],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root},
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3-405b")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--mode", choices=sorted(TARGETS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.mode:
        result = measure(
            options.model, options.seq_len, repeat=options.mode == "repeat"
        )
        print(json.dumps(result))
        return
    runs = {mode: fresh(options.model, options.seq_len, mode) for mode in TARGETS}
    full, repeat = runs["full"], runs["repeat"]
    differences = {
        key: repeat[key] / full[key] - 1
        for key in ("forward_flops", "backward_flops", "saved_bytes", "cut_bytes")
    }
    if options.json:
        print(json.dumps({**runs, "difference": differences}))
        return
    print(f"{options.model} at {options.seq_len:,} tokens")
    for mode, target in TARGETS.items():
        run = runs[mode]
        print(
            f"  {mode:7s} {run['wall_s']:6.2f} s wall, {run['cpu_s']:6.2f} s CPU "
            f"(target {target:g} s), peak {run['peak_rss_bytes'] / 1e9:.2f} GB "
            f"(target {MEMORY_TARGET_BYTES / 1e9:g} GB), {run['blocks']:.0f} blocks"
        )
    for key, value in differences.items():
        print(f"  repeat against full, {key}: {value:+.2e}")


if __name__ == "__main__":
    main()
