"""Train digits by stages that learn by themselves, and by back-propagation.

python -m benchmarks.local_learning [--seeds 3] [--out docs/results]

A perceptron of six linear layers is a pipeline of two or four processes on gloo. It is
trained by synthetic labels, with and without recovery, by recursive local alignment,
and by back-propagation, at equal samples and one learning rate; what ranks sent is
counted. Layers have ReLU between them, under local alignment tanh: its targets need a
function that is bounded.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.convergence import TASKS
from benchmarks.tables import piped
from executors.measuring.traffic import CollectiveCounter
from executors.mesh import build_mesh
from executors.trainer import Trainer
from planner import plan
from planner.capture import capture
from planner.schema import Plan, Precision

__all__ = ["WAYS", "Scores", "SixLayers", "accuracy_of", "train"]

_TASK, _STEPS = TASKS["digits"], 640
#: Rule, activation and stages, by way of training.
WAYS: dict[str, tuple[str, str, int]] = {
    "back-propagation": ("backpropagation", "ReLU", 2),
    "`sil`": (f"sil:steps={_STEPS}", "ReLU", 2),
    "`sil`, the last 128 steps recovery": (
        *("sil:steps=512,recovery_steps=128", "ReLU"),
        2,
    ),
    "`sil:inputs=outputs`": (f"sil:steps={_STEPS},inputs=outputs", "ReLU", 2),
    "`sil` in 4 parts, the last 128 steps recovery": (
        *("sil:steps=512,recovery_steps=128", "ReLU"),
        4,
    ),
    "back-propagation, tanh": ("backpropagation", "Tanh", 2),
    "`rec-lra`, tanh": ("rec-lra", "Tanh", 2),
}


class SixLayers(nn.Module):
    """64 inputs, five hidden layers of 128, scores of 10 classes.

    Args:
        activation: Name of the function between them, in :mod:`torch.nn`.
    """

    def __init__(self, activation: str) -> None:
        super().__init__()
        between = getattr(nn, activation)
        layers: list[nn.Module] = []
        for given in (64, 128, 128, 128, 128):
            layers += [nn.Linear(given, 128), between()]
        self.layers = nn.Sequential(*layers, nn.Linear(128, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores. Shapes [batch, 64] to [batch, 10]."""
        scores: torch.Tensor = self.layers(x)
        return scores


class _Scored(nn.Module):
    """A model that is given labels, and tells its loss, as the task's are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def accuracy_of(model: nn.Module) -> float:
    """Accuracy of a model of scores on held-out digits, percent."""
    _, accuracy = _TASK.scores(_Scored(model).eval())
    assert accuracy is not None
    return accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """One run.

    Attributes:
        way: Name of a way of training.
        seed: Of weights and samples.
        accuracy: On held-out digits, percent.
        sent_bytes: By all ranks together in a mean step.
    """

    way: str
    seed: int
    accuracy: float
    sent_bytes: float


def _work(rank: int, folder: str, text: str, activation: str, seeds: int) -> None:
    """One stage's process; the first scores the network of each seed."""
    torch.set_num_threads(1)
    made = Plan.from_json(text)
    world = made.strategy.mesh.num_devices
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world,
    )
    found = [_run(made, activation, seed) for seed in range(seeds)]
    if rank == 0:
        Path(folder, "scores.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _run(made: Plan, activation: str, seed: int) -> tuple[float, float]:
    """Train one network; accuracy in percent, and bytes sent in a mean step."""
    torch.manual_seed(seed)
    model, scored = SixLayers(activation), SixLayers(activation)
    trainer = Trainer(made, model, build_mesh(made.strategy, torch.device("cpu")))
    batches = _TASK.batches(seed, _TASK.batch)
    with CollectiveCounter() as counter:
        for _ in range(_STEPS):
            trainer.step(next(batches))
    sent = sum(t.bytes for kind, t in counter.traffic().items() if kind != "recv")
    own = {name: p.detach() for name, p in trainer.named_parameters()}
    every: list[tuple[dict[str, torch.Tensor], float]]
    every = [({}, 0.0)] * dist.get_world_size()
    dist.all_gather_object(every, (own, sent))
    scored.load_state_dict({n: w for part, _ in every for n, w in part.items()})
    return accuracy_of(scored), sum(one for _, one in every) / _STEPS


def train(way: str, seeds: int) -> list[Scores]:
    """Train and score.

    Args:
        way: One of :data:`WAYS`.
        seeds: Number of runs.
    """
    pin, activation, stages = WAYS[way]
    example = {"x": ((_TASK.batch, 64), "float32")}
    model = SixLayers(activation)
    pins = {"pp": stages, "num_microbatches": 1, "schedule": "GPipe"}
    made: Plan = plan(
        capture(model, example, loss="cross_entropy", dtype="float32"),
        f"local:{stages}",
        global_batch=_TASK.batch,
        pin={**pins, "recompute": "none", "learning": pin},
        precision=Precision(compute="float32"),
        optimizer=_TASK.optimizer,
        certify=False,
    )
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = (folder, made.to_json(), activation, seeds)
        ranks = [
            context.Process(target=_work, args=(rank, *given)) for rank in range(stages)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        if any(one.exitcode for one in ranks):
            raise RuntimeError(f"{way}: a process failed")
        text = Path(folder, "scores.json").read_text(encoding="utf-8")
    return [
        Scores(way=way, seed=seed, accuracy=accuracy, sent_bytes=sent)
        for seed, (accuracy, sent) in enumerate(json.loads(text))
    ]


def table(runs: Sequence[Scores]) -> str:
    """Return the mean and standard deviation of each way's accuracies."""
    lines = [("training", "stages", "accuracy", "sent a step, all ranks")]
    for way in dict.fromkeys(one.way for one in runs):
        own = [one for one in runs if one.way == way]
        found = [one.accuracy for one in own]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        sent = statistics.mean(one.sent_bytes for one in own)
        shown = f"{statistics.mean(found):.1f} ± {spread:.1f} %"
        lines.append((way, str(WAYS[way][2]), shown, f"{sent:,.0f} B"))
    return piped(lines)


def _page(text: str, seeds: int) -> str:
    """Page of the documentation."""
    return f"""# Stages that learn by themselves

`python -m benchmarks.local_learning --seeds {seeds} --out docs/results`,
{date.today()}: a perceptron of six layers on digits, a pipeline on gloo, {_STEPS} steps
of {_TASK.batch} samples, {_TASK.optimizer.name} at {_TASK.optimizer.learning_rate} with
momentum {_TASK.optimizer.momentum}, mean and standard deviation of {seeds} seeds.
Accuracies are of 360 samples that are held out, of which one is 0.3 points.

{text}

Digits are an easy task: they show that a rule trains, and what it sends. They say
nothing of other networks.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print the table, write a page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder of the page")
    args = parser.parse_args(argv)
    runs: list[Scores] = []
    for way in WAYS:
        for one in train(way, args.seeds):
            runs.append(one)
            print(json.dumps(asdict(one)), file=sys.stderr)
    text = table(runs)
    print(text)
    if args.out is not None:
        page = args.out / f"local_learning_{date.today()}.md"
        page.write_text(_page(text, args.seeds), encoding="utf-8")
        print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
