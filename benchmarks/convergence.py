"""Train small tasks by every method, and tell how far each comes at equal samples.

python -m benchmarks.convergence [--task digits|text] [--methods NAME ...]
                                 [--seeds 3] [--curves FILE] [--out docs]

Four processes on gloo are the four copies of a model: a perceptron on handwritten
digits, and a Llama of 2.0 million parameters on the text of examples/tiny-llama, byte
by byte. Every method and seed sees the same samples in the same order, and the same
learning rate. Measured are the loss and, of digits, the accuracy on samples that are
held out, by the mean of the copies' weights, and what a copy sent. What a step of a
large decoder would take by the method, across data centres (``dtfm-5``) and on four
hosts of H100, is predicted.

Small tasks say that a method trains, and what it sends. They cannot rank methods for
large models: their evidence is called smoke, and nothing is chosen by it. ``--curves``
keeps every run in a file, one JSON a line, and takes those that it has from there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.tables import piped
from executors.checkpoints.snapshot import full_parameters
from executors.measuring.traffic import CollectiveCounter
from executors.mesh import build_mesh
from executors.replicas import SplitReplicas, skipped_parameters
from executors.trainer import Trainer
from planner import plan
from planner.errors import NoFeasiblePlanError
from planner.schema import Mesh, Optimizer, Plan, Precision, Strategy
from planner.schema.methods import limit_violations, methods, read_method
from planner.schema.violations import Case

__all__ = ["TASKS", "Curve", "Task", "method_pins", "plan_task", "train"]

_ROOT = Path(__file__).parents[1]
_COPIES = 4
Batch = dict[str, torch.Tensor]


class Perceptron(nn.Module):
    """64 inputs, two hidden layers of 128, 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()),
            nn.Linear(128, 10),
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss and logits. Shapes [batch, 64] and [batch]."""
        logits = self.layers(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 digits of 8 x 8 and their classes, in an order of their own.

    Source: Alpaydin and Kaynak 1998, "Optical Recognition of Handwritten Digits", UCI
    Machine Learning Repository, test part, CC BY 4.0.
    """
    rows = np.load(_ROOT / "benchmarks" / "data" / "digits.npz")["a"]
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    pixels = torch.tensor(rows[:, :64], dtype=torch.float32) / 16
    return pixels, torch.tensor(rows[:, 64], dtype=torch.int64)


_HELD_OUT = 360


def _digit_batches(seed: int, size: int) -> Iterator[Batch]:
    pixels, classes = (part[_HELD_OUT:] for part in _digits())
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(pixels))
        for start in range(0, len(order) - size + 1, size):
            chosen = torch.tensor(order[start : start + size])
            yield {"x": pixels[chosen], "labels": classes[chosen]}


def _digit_scores(model: nn.Module) -> tuple[float, float | None]:
    pixels, classes = (part[:_HELD_OUT] for part in _digits())
    with torch.no_grad():
        found = model(pixels, classes)
    right = (found["logits"].argmax(dim=1) == classes).float().mean()
    return float(found["loss"]), 100 * float(right)


_LENGTH = 64


def _text() -> torch.Tensor:
    text = np.load(_ROOT / "examples" / "tiny-llama" / "genesis.npy")
    return torch.tensor(text.astype(np.int64))


def _text_batches(seed: int, size: int) -> Iterator[Batch]:
    text = _text()
    text = text[: len(text) * 9 // 10]
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - _LENGTH, size)
        yield {"input_ids": torch.stack([text[s : s + _LENGTH] for s in starts])}


def _text_scores(model: nn.Module) -> tuple[float, float | None]:
    text = _text()
    held = text[len(text) * 9 // 10 :]
    rows = held[: len(held) // _LENGTH * _LENGTH].view(-1, _LENGTH)
    with torch.no_grad():
        logits = model(input_ids=rows).logits[:, :-1]
    loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    return float(loss), None


def _llama() -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(_ROOT / "examples" / "tiny-llama")
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A small real task.

    Attributes:
        model: Builds the model.
        batches: Global batches for a seed, of so many samples.
        scores: Loss, and accuracy in percent or None, of what is held out.
        optimizer: Inner optimizer; the same for all methods.
        batch: Samples of a step over all copies.
        steps: In a run.
        short: Settings of presets whose periods are longer than a run.
    """

    model: Callable[[], nn.Module]
    batches: Callable[[int, int], Iterator[Batch]]
    scores: Callable[[nn.Module], tuple[float, float | None]]
    optimizer: Optimizer
    batch: int
    steps: int
    short: dict[str, str]


_SHORT = {
    "post-local-sgd": "post-local-sgd:period=16,warm_up_steps=96",
    "diloco": "diloco:period=32",
    "streaming-diloco": "streaming-diloco:period=32,delay=2",
    "ist": "ist:local_steps=32",
}

TASKS = {
    "digits": Task(
        model=Perceptron,
        batches=_digit_batches,
        scores=_digit_scores,
        optimizer=Optimizer(name="SGD", learning_rate=0.05, momentum=0.9),
        batch=64,
        steps=512,
        short=_SHORT,
    ),
    "text": Task(
        model=_llama,
        batches=_text_batches,
        scores=_text_scores,
        optimizer=Optimizer(name="AdamW", learning_rate=1e-3),
        batch=16,
        steps=384,
        short=_SHORT,
    ),
}
#: Step on each of the clusters, by method.
_Predicted = dict[str, tuple[str, ...]]
#: Clusters on which a step of each method is predicted.
_CLUSTERS = ("dtfm-5", "dgx-h100:4")
#: Steps between looks at what is held out: a multiple of every interval above.
_LOOKS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run.

    Attributes:
        task: Name of the task.
        method: Pin of its method; ``exact`` for all-reduce.
        seed: Of weights and samples.
        steps: At which it was looked at.
        losses: Held-out loss there.
        accuracy: Held-out accuracy at the end, percent; None of text.
        sent_bytes: Payload that one copy handed to collectives, a step.
    """

    task: str
    method: str
    seed: int
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    accuracy: float | None
    sent_bytes: float


def method_pins(task: Task) -> dict[str, dict[str, str]]:
    """Pins of every method and preset that copies on one host can run, by name.

    Those that the task's optimizer does not go with are left out.
    """
    found: dict[str, dict[str, str]] = {"exact": {}}
    for one in methods():
        if one.inexact is None or one.runs is None:
            continue
        if one.slot == "learning":
            # Its parts are stages, not copies: benchmarks.local_learning.
            continue
        for name in [*one.presets] or [one.kind]:
            pins = {one.slot: task.short.get(name, name)}
            asked = Strategy(
                mesh=Mesh(dp_replicate=_COPIES),
                optimizer=task.optimizer,
                semantics="approximate",
                **{one.slot: read_method(one.slot, pins[one.slot])},  # type: ignore[arg-type]
            )
            if not limit_violations(Case(strategy=asked)):
                found[name] = pins
    return found


def plan_task(task: Task, pins: dict[str, str]) -> Plan:
    """Plan a task for four copies on this machine, under some pins."""
    batch = next(task.batches(0, task.batch))
    made: Plan = plan(
        task.model(),
        f"local:{_COPIES}",
        global_batch=task.batch,
        example_inputs={name: value[:1] for name, value in batch.items()},
        pin={
            "dp_replicate": _COPIES,
            "num_microbatches": 1,
            "recompute": "none",
            **pins,
        },
        partitioner="exhaustive",
        precision=Precision(compute="float32"),
        optimizer=task.optimizer,
        certify=False,
    )
    return made


def _work(rank: int, store: str, text: str, name: str, seed: int, out: str) -> None:
    """One copy's process; the first writes the curve."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, _COPIES),  # type: ignore[attr-defined]
        rank=rank,
        world_size=_COPIES,
    )
    task, made = TASKS[name], Plan.from_json(text)
    torch.manual_seed(seed)
    model, looked_at = task.model(), task.model()
    trainer = Trainer(made, model, build_mesh(made.strategy, torch.device("cpu")))
    batches, steps, losses, sent = task.batches(seed, task.batch), [], [], 0
    accuracy = None
    for step in range(task.steps):
        with CollectiveCounter() as counter:
            trainer.step(next(batches))
        traffic = counter.traffic()
        sent += sum(one.bytes for kind, one in traffic.items() if kind != "recv")
        if (step + 1) % _LOOKS == 0:
            _take_mean(trainer, looked_at)
            if rank == 0:
                loss, accuracy = task.scores(looked_at.eval())
                steps.append(step + 1)
                losses.append(loss)
    if rank == 0:
        found = {"steps": steps, "losses": losses, "accuracy": accuracy}
        Path(out).write_text(json.dumps(found | {"sent": sent / task.steps}))
    trainer.replicas.settle()
    dist.barrier()
    dist.destroy_process_group()


def _take_mean(trainer: Trainer, model: nn.Module) -> None:
    """Fill a model with the mean of the copies' weights; collective.

    Weights that copies divide are put together; of those that some copies do not have
    now, it is the mean of the others'.
    """
    trainer.replicas.settle()
    own = dict(trainer.named_parameters())
    replicas = trainer.replicas
    divided = replicas.split if isinstance(replicas, SplitReplicas) else {}
    whole = full_parameters(trainer) if divided else {}
    absent = skipped_parameters(replicas)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mine = own.get(name)
            if mine in divided:
                parameter.copy_(whole[name])
                continue
            # What is absent has no memory to read.
            if mine is None or mine in absent:
                total, copies = torch.zeros_like(parameter), torch.zeros(())
            else:
                total, copies = mine.detach().clone(), torch.ones(())
            dist.all_reduce(total)
            dist.all_reduce(copies)
            parameter.copy_(total / copies)


def train(name: str, method: str, pins: dict[str, str], seed: int) -> Curve:
    """Train a task by a method.

    Args:
        name: Of the task.
        method: Name of the method.
        pins: What chooses it.
        seed: Of weights and samples.
    """
    text = plan_task(TASKS[name], pins).to_json()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/curve.json"
        ranks = [
            context.Process(
                target=_work, args=(rank, f"{folder}/store", text, name, seed, out)
            )
            for rank in range(_COPIES)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        if any(one.exitcode for one in ranks):
            raise RuntimeError(f"{method} on {name}, seed {seed}: a process failed")
        found = json.loads(Path(out).read_text())
    return Curve(
        task=name,
        method=method,
        seed=seed,
        steps=tuple(found["steps"]),
        losses=tuple(found["losses"]),
        accuracy=found["accuracy"],
        sent_bytes=found["sent"],
    )


# -- Tables and curves -----------------------------------------------------------------


def efficiency(curve: Curve, exact: Curve) -> float:
    """Samples that exact training needs over those that a method needs, at most 1.

    To the lowest loss that both have reached.
    """
    loss = max(min(curve.losses), min(exact.losses))
    return min(1.0, _reached(exact, loss) / _reached(curve, loss))


def _reached(curve: Curve, loss: float) -> float:
    """Steps to a loss, straight between looks."""
    for index, found in enumerate(curve.losses):
        if found <= loss:
            if index == 0:
                return float(curve.steps[0])
            high, before = curve.losses[index - 1], curve.steps[index - 1]
            part = (high - loss) / (high - found)
            return before + part * (curve.steps[index] - before)
    raise ValueError(f"{curve.method} never reaches a loss of {loss}")


def _predicted(pins: dict[str, str], cluster: str) -> str:
    """Predicted step of a decoder of 1.56 B parameters by a method, with 8 copies.

    Exact training is planned freely. Empty if nothing fits.
    """
    try:
        return f"{_step_s(pins, cluster):.2f} s"
    except NoFeasiblePlanError:
        return ""


def _step_s(pins: dict[str, str], cluster: str) -> float:
    made = plan(
        "gpt2-xl",
        cluster,
        global_batch=1024,
        seq_len=1024,
        pin={"dp_replicate": 8, **pins} if pins else None,
        certify=False,
    )
    return float(made.prediction.step_time_s)


def _mean(values: Sequence[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {spread:.3f}"


def table(name: str, curves: Sequence[Curve], slow: _Predicted) -> str:
    """Return the table of a task, its best method first among equals of the registry.

    Args:
        name: Of the task.
        curves: Of all methods and seeds.
        slow: Predicted steps on the two clusters, by method.
    """
    own = [one for one in curves if one.task == name]
    exact = {one.seed: one for one in own if one.method == "exact"}
    head = ("method", "held-out loss", "accuracy", "progress a sample", "sent a step")
    lines: list[tuple[str, ...]] = [(*head, *_CLUSTERS)]
    for method in dict.fromkeys(one.method for one in own):
        runs = [one for one in own if one.method == method]
        right = [one.accuracy for one in runs if one.accuracy is not None]
        eta = [efficiency(one, exact[one.seed]) for one in runs]
        lines.append(
            (
                method,
                _mean([one.losses[-1] for one in runs]),
                f"{statistics.mean(right):.1f} %" if right else "",
                f"{statistics.mean(eta):.2f}",
                f"{statistics.mean(one.sent_bytes for one in runs) / 1e6:.2f} MB",
                *slow[method],
            )
        )
    return piped(lines)


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw held-out losses over samples, a picture a task, the mean of all seeds."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(one.task for one in curves))
    methods = dict.fromkeys(one.method for one in curves)
    # Ten colours, solid for the first ten methods, dashed and dotted for the next.
    styles = {
        method: {"color": f"C{at % 10}", "linestyle": ("-", "--", ":")[at // 10 % 3]}
        for at, method in enumerate(methods)
    }
    figure, axes = pyplot.subplots(
        1, len(names), figsize=(4.6 * len(names) + 1.6, 4.2), layout="constrained"
    )
    lines = {}
    for name, axis in zip(names, np.atleast_1d(axes), strict=True):
        for method, style in styles.items():
            runs = [c for c in curves if (c.task, c.method) == (name, method)]
            if not runs:
                continue
            losses = np.mean([one.losses for one in runs], axis=0)
            samples = np.array(runs[0].steps) * TASKS[name].batch
            (lines[method],) = axis.plot(samples, losses, linewidth=1.4, **style)
        axis.set(title=name, xlabel="samples", ylabel="held-out loss", yscale="log")
        for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            which(mpl.ticker.LogFormatter(minor_thresholds=(2, 0.5)))
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(
        list(lines.values()),
        list(lines),
        loc="outside right upper",
        frameon=False,
        fontsize=8,
    )
    figure.savefig(path, metadata={"Date": None})


def _page(tables: dict[str, str], seeds: int) -> str:
    """Page of the documentation."""
    parts = [
        f"""# Training methods at equal samples

`python -m benchmarks.convergence --seeds {seeds} --out docs`, {date.today()}:
{_COPIES} copies on gloo, mean and standard deviation of {seeds} seeds. Small tasks show
that a method trains, and what it sends; they cannot rank methods for large models, so
that their basis is *smoke*, by which nothing is chosen. *Progress a sample* is the
number of samples that exact training needs over that of the method, to the lowest loss
that both reach. The last columns are predicted steps of GPT-2 XL with 8 copies under
the preset itself; here periods are shorter, since runs are:
{", ".join(f"`{pin}`" for pin in _SHORT.values())}. With 8 copies `ist` uses 8
devices; others use all, of which a copy has several. Methods that refuse a task's
model or optimizer are left out of it.

![Held-out loss over samples](../figures/convergence.svg)"""
    ]
    for name, text in tables.items():
        task = TASKS[name]
        parts.append(
            f"## {name}\n\n{task.steps} steps of {task.batch} samples, "
            f"{task.optimizer.name} at {task.optimizer.learning_rate}.\n\n{text}"
        )
    return "\n\n".join(parts) + "\n"


def _read_curves(path: Path | None) -> dict[tuple[str, str, int], Curve]:
    """Runs of a file, by task, method and seed."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    curves = [Curve(**json.loads(line)) for line in lines]
    return {(one.task, one.method, one.seed): one for one in curves}


def _keep_curve(curve: Curve, path: Path | None) -> None:
    """Print a run, and add it to a file."""
    line = json.dumps(asdict(curve))
    print(line, file=sys.stderr)
    if path is not None:
        with path.open("a") as file:
            file.write(line + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print the tables, write curves and a page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=[*TASKS], action="append")
    parser.add_argument("--methods", nargs="+", help="names; all if left out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--curves", type=Path, help="file that keeps the runs")
    parser.add_argument("--out", type=Path, help="folder of the documentation")
    args = parser.parse_args(argv)
    kept = _read_curves(args.curves)
    curves: list[Curve] = []
    slow: _Predicted = {}
    for name in args.task or TASKS:
        pins = method_pins(TASKS[name])
        for method in ["exact", *(m for m in pins if m != "exact")]:
            if args.methods and method not in {"exact", *args.methods}:
                continue
            try:
                for seed in range(args.seeds):
                    found = kept.get((name, method, seed))
                    if found is None:
                        found = train(name, method, pins[method], seed)
                        _keep_curve(found, args.curves)
                    curves.append(found)
            except NoFeasiblePlanError as error:
                # It may have too few units for a method, or too few heads.
                print(f"{method} on {name}: {error}", file=sys.stderr)
                continue
            if method not in slow:
                whole = dict.fromkeys(pins[method], method)
                slow[method] = tuple(_predicted(whole, one) for one in _CLUSTERS)
    tables = {
        name: table(name, curves, slow)
        for name in dict.fromkeys(c.task for c in curves)
    }
    print(*(f"{name}\n\n{text}" for name, text in tables.items()), sep="\n\n")
    if args.out is not None:
        draw(curves, args.out / "figures" / "convergence.svg")
        page = args.out / "results" / f"convergence_{date.today()}.md"
        page.write_text(_page(tables, args.seeds), encoding="utf-8")
        print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
