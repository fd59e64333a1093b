"""A training loop of plain torch, for one process.

    python examples/plain_loop.py WEIGHTS

WEIGHTS is a folder that ``save_pretrained`` of transformers wrote. The same loop on
several processes, in five other lines, is in own_loop.py: compare the two.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_model
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

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
    model = build()
    load_model(model, f"{weights}/model.safetensors")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        rows = batch(step)
        optimizer.zero_grad()
        loss = loss_of(model(input_ids=rows["input_ids"]).logits, rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step + 1}: loss {loss:.5f}")
    model.save_pretrained(f"{weights}-tuned")


if __name__ == "__main__":
    main(sys.argv[1])
