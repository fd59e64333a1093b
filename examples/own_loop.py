"""The training loop of plain_loop.py, on as many processes as a plan has.

    meshwright plan --model hf:examples/tiny-llama --cluster local:4 \
        --global-batch 16 --seq-len 64 --dtype float32 --optimizer AdamW \
        --learning-rate 1e-3 --weight-decay 0.01 --grad-clip-norm 1 --out plan.json
    torchrun --nproc-per-node 4 examples/own_loop.py WEIGHTS plan.json

Optimizer and clipping are the plan's; zero_grad, backward and step are in ``step``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from executors import prepare
from planner import Plan

LENGTH, SAMPLES, STEPS = 64, 16, 8
CONFIG = Path(__file__).parent / "tiny-llama"
TEXT = torch.from_numpy(np.load(CONFIG / "genesis.npy").astype(np.int64))


def build() -> nn.Module:
    config = AutoConfig.from_pretrained(CONFIG, use_cache=False)
    return AutoModelForCausalLM.from_config(config)


def batch(step: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(step)
    starts = torch.randint(len(TEXT) - LENGTH - 1, (SAMPLES,), generator=rng)
    rows = torch.stack([TEXT[start : start + LENGTH + 1] for start in starts])
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def loss_of(logits: torch.Tensor, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), rows["labels"])


def main(weights: str) -> None:
    training = prepare(Plan.load(sys.argv[2]), build, loss=loss_of, init_from=weights)
    for step in range(STEPS):
        rows = batch(step)
        loss = training.step(rows).loss
        print(f"step {step + 1}: loss {loss:.5f}")
    training.save_hf(f"{weights}-tuned")


if __name__ == "__main__":
    main(sys.argv[1])
