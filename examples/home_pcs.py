"""Eight unlike PCs train one model together, as a federation.

    python examples/home_pcs.py

One learns how machines of friends are described (home_pcs.yaml), how they are divided
into members that each hold the model, and what the members send each other. GPT-2 large
is planned, which two of the PCs hold together alone; PCs that would make a step longer
stay out. Then the same members train a small Llama on this machine, a process for each
PC. Each waits after a step as long as its member would take by the prediction, a
thousand times faster, and counts the bytes that it sends.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import executors
from planner import Cluster, federate
from planner.schema import Federation, Optimizer, Precision

FOLDER = Path(__file__).parent
LENGTH = 64


def build() -> nn.Module:
    """A small Llama."""
    config = AutoConfig.from_pretrained(FOLDER / "tiny-llama", use_cache=False)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def batches(samples: int) -> Callable[[int], dict[str, torch.Tensor]]:
    """Windows of the text by step; every process sees the same."""
    text = torch.from_numpy(np.load(FOLDER / "tiny-llama" / "genesis.npy").astype("i8"))

    def batch(step: int) -> dict[str, torch.Tensor]:
        rng = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - LENGTH, (samples,), generator=rng)
        return {"input_ids": torch.stack([text[s : s + LENGTH] for s in starts])}

    return batch


def train_pc(options: dict[str, Any], emit: Callable[[Any], None]) -> dict[str, Any]:
    """One PC, in a process of its own."""
    federation = Federation.from_json(options["federation"])
    member, _ = federation.processes[int(os.environ["RANK"])]

    def wait(report: executors.StepReport) -> None:
        time.sleep(options["waits"][member])
        emit({"member": member, "step": report.step, "loss": report.loss})

    result = executors.run_federation(
        federation,
        build,
        batches(federation.global_batch),
        steps=options["steps"],
        on_step=wait,
    )
    return {
        "member": result.member,
        "losses": result.losses,
        "sent_bytes": result.sent_bytes,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--period", type=int, default=5, help="steps of an exchange")
    parser.add_argument("--quick", action="store_true", help="GPT-2 small, not large")
    options = parser.parse_args(argv)

    fleet = Cluster.from_file(FOLDER / "home_pcs.yaml")
    large = federate(
        "gpt2" if options.quick else "gpt2-large",
        fleet,
        global_batch=128,
        seq_len=512,
        exchange="local_steps:period=500",
    )
    print(large.summary())
    small = federate(
        build(),
        fleet,
        example_inputs={"input_ids": torch.zeros(1, LENGTH, dtype=torch.int64)},
        global_batch=32,
        members=[member.devices for member in large.members],
        exchange=f"local_steps:period={options.period}",
        precision=Precision(compute="float32"),
        optimizer=Optimizer(name="AdamW", learning_rate=2e-3),
    )
    losses: dict[int, dict[int, float]] = {}

    def heard(_: int, message: Any) -> None:
        seen = losses.setdefault(message["step"], {})
        seen[message["member"]] = message["loss"]
        if len(seen) == len(small.members) and not (message["step"] + 1) % 5:
            mean = sum(seen.values()) / len(seen)
            print(f"step {message['step'] + 1}: loss {mean:.3f}", flush=True)

    results = executors.launch(
        "home_pcs:train_pc",
        {
            "federation": small.to_json(),
            "waits": [s / 1000 for s in large.prediction.member_step_times_s],
            "steps": options.steps,
        },
        processes=len(small.processes),
        on_message=heard,
    )
    exchanges = options.steps // options.period
    print("bytes that the busiest PC of each member sent to others, in an exchange:")
    for number, predicted in enumerate(small.prediction.exchange_bytes):
        sent = max(r["sent_bytes"] for r in results if r["member"] == number)
        print(f"  member {number}: {sent / exchanges:,.0f}, predicted {predicted:,.0f}")


if __name__ == "__main__":
    main()
