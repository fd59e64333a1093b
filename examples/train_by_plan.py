"""Plan for this machine, train by the plan, and hold it against one process.

    python examples/train_by_plan.py --processes 2

One learns how a module of one's own is planned for and trained in the same program:
the plan is made here, `executors.launch` starts a process for each device of it, and
each of them runs `train_rank`. Then one process trains the same model on the same text
by a plan of its own, to the same losses. Under torchrun, where processes are there
already, call `executors.run` as in examples/train.py.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from executors import launch, run
from planner import Plan, plan
from planner.schema import Optimizer, Precision

TEXT = Path(__file__).parent / "tiny-llama" / "genesis.npy"
LENGTH = 64


class Reader(nn.Module):
    """Predicts the next byte of a text by convolutions that look back."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(width, 2**i) for i in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.bytes(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Layer(nn.Module):
    """Mixes each position with the one ``back`` before it."""

    def __init__(self, width: int, back: int) -> None:
        super().__init__()
        self.back = back
        self.norm = nn.LayerNorm(width)
        self.up, self.down = (
            nn.Linear(2 * width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        before = nn.functional.pad(y, (0, 0, self.back, 0))[:, : -self.back]
        return x + self.down(self.up(torch.cat((y, before), dim=-1)).relu())


def batches(samples: int) -> Callable[[int], dict[str, torch.Tensor]]:
    """Global batches by the step's number, the same on every rank."""
    text = np.load(TEXT)

    def batch(step: int) -> dict[str, torch.Tensor]:
        starts = np.random.default_rng(step).integers(0, len(text) - LENGTH, samples)
        rows = np.stack([text[start : start + LENGTH] for start in starts])
        return {"input_ids": torch.from_numpy(rows.astype(np.int64))}

    return batch


def train_rank(given: dict[str, Any], emit: Callable[[Any], None]) -> list[float]:
    """Train as one rank; called by name in a process of its own."""
    found = Plan.load(given["plan"])
    result = run(
        found,
        lambda: Reader(given["width"], given["layers"]),
        batches(found.workload.global_batch),
        steps=given["steps"],
        on_step=lambda report: emit([report.step, report.loss]),
    )
    return list(result.losses)


def train(
    processes: int, pins: dict[str, Any], options: argparse.Namespace
) -> list[float]:
    """Plan for so many processes of this machine, and train by the plan."""
    found = plan(
        Reader(options.width, options.layers),
        f"local:{processes}",
        global_batch=options.global_batch,
        example_inputs={"input_ids": ((1, LENGTH), "int64")},
        precision=Precision(compute="float32"),
        optimizer=Optimizer(learning_rate=2e-3),
        pin=pins,
    )
    print(f"{processes} processes: {found.strategy.label()}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        found.save(path)
        arguments = {
            "plan": str(path),
            "width": options.width,
            "layers": options.layers,
            "steps": options.steps,
        }
        losses: Sequence[list[float]] = launch(
            f"{Path(__file__).stem}:train_rank",
            arguments,
            processes=processes,
            on_message=lambda _, said: print(f"  step {said[0] + 1}: {said[1]:.4f}"),
        )
    return losses[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pin", default="pp", help="an axis that takes all of them")
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="3 steps of 2 layers")
    options = parser.parse_args()
    if options.quick:
        options.width, options.layers, options.steps = 32, 2, 3

    several = train(options.processes, {options.pin: options.processes}, options)
    alone = train(1, {}, options)
    apart = max(abs(a - b) for a, b in zip(several, alone, strict=True))
    print(f"losses fell from {several[0]:.4f} to {several[-1]:.4f}")
    print(f"and were at most {apart:.1e} from those of one process")
    if apart > 1e-4 * max(alone):
        raise SystemExit("they should be the same")


if __name__ == "__main__":
    main()
