"""Tune saved weights in a training loop of one's own, on several processes.

    python examples/finetune.py --processes 4 --folder tuning

One learns how weights of transformers begin a run, and how they come back: a small
Llama is saved to a folder, as if someone had trained it. A plan is made for it, and
each process runs the loop of ``train_rank``, which evaluates on held-out text, keeps
checkpoints and stops half way. The same loop then goes on from its checkpoint, and the
tuned weights are loaded by transformers. Where the program was killed, ``--resume``
goes on in its folder, and ends with the same weights.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import executors
from planner import Plan, plan
from planner.schema import Optimizer, Precision

CONFIG = Path(__file__).parent / "tiny-llama"
LENGTH, SAMPLES = 64, 16


def build() -> nn.Module:
    """The whole model; its weights come from the folder."""
    config = AutoConfig.from_pretrained(CONFIG, use_cache=False)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def text() -> torch.Tensor:
    """Bytes of the text; the last tenth is held out."""
    return torch.from_numpy(np.load(CONFIG / "genesis.npy").astype(np.int64))


def batches(first: int, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Global batches of the steps that are left, equal on every process."""
    tokens = text()[: len(text()) * 9 // 10]
    for step in range(first, steps):
        rng = torch.Generator().manual_seed(step)
        starts = torch.randint(len(tokens) - LENGTH, (SAMPLES,), generator=rng)
        yield {"input_ids": torch.stack([tokens[s : s + LENGTH] for s in starts])}


def held_out() -> dict[str, torch.Tensor]:
    """One global batch of the text's end."""
    tokens = text()[-SAMPLES * LENGTH :]
    return {"input_ids": tokens.view(SAMPLES, LENGTH)}


def train_rank(options: dict[str, Any], emit: Callable[[Any], None]) -> None:
    """The loop, on each process."""
    rates = executors.learning_rate("cosine", steps=options["steps"], warm_up_steps=2)
    with executors.prepare(
        Plan.load(options["plan"]),
        build,
        scheduler=rates,
        init_from=options["weights"],
    ) as training:
        first = training.load(options["kept"])
        emit({"begins": first, "loss": training.evaluate(held_out())})
        for batch in batches(first, options["until"]):
            training.step(batch)
            if (
                not training.done % options["every"]
                or training.done == options["until"]
            ):
                training.save(options["kept"])
        emit({"ends": training.done, "loss": training.evaluate(held_out())})
        if training.done == options["steps"]:
            training.save_hf(options["tuned"])


def tell(rank: int, message: Any) -> None:
    """Print what the first process says."""
    if rank == 0:
        when = f"after step {message.get('begins', message.get('ends'))}"
        print(f"held-out loss {when}: {message['loss']:.3f}", flush=True)


def loss_of(folder: Path) -> float:
    """Held-out loss of weights by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = held_out()["input_ids"]
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps of a checkpoint")
    parser.add_argument(
        "--folder", type=Path, help="for what is written; must not exist"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on in --folder of a killed run"
    )
    options = parser.parse_args(argv)
    folder = options.folder or Path(tempfile.mkdtemp()) / "tuning"
    if not options.resume:
        prepare_folder(folder, options.processes)
    job = {
        "plan": str(folder / "plan.json"),
        "weights": str(folder / "weights"),
        "kept": str(folder / "kept"),
        "tuned": str(folder / "tuned"),
        "steps": options.steps,
        "every": options.every,
    }
    stops = (options.steps,) if options.resume else (options.steps // 2, options.steps)
    for until in stops:
        executors.launch(
            "finetune:train_rank",
            job | {"until": until},
            processes=options.processes,
            on_message=tell,
        )
    print(f"by transformers: {loss_of(folder / 'tuned'):.3f}")


def prepare_folder(folder: Path, processes: int) -> None:
    """Write the weights to begin with, and the plan."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    build().save_pretrained(folder / "weights")
    made = plan(
        build(),
        f"local:{processes}",
        example_inputs={"input_ids": torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)},
        global_batch=SAMPLES,
        precision=Precision(compute="float32"),
        optimizer=Optimizer(name="AdamW", learning_rate=3e-3),
    )
    made.save(folder / "plan.json")
    print(f"plan: {made.strategy.label()}")


if __name__ == "__main__":
    main()
