"""Train digits by partially masked training, and score the core and the whole network.

python -m benchmarks.masked_training [--seeds 3] [--out docs/results]

The perceptron, optimizer, samples and steps are those of
:mod:`benchmarks.convergence`: four processes on gloo are the four copies. Training in
turn alternates core steps and full steps. Beside it stand plain training of all
weights, and training of the core alone, which never takes a full step. Of each the
accuracy on held-out samples is told, of the whole network and of the core: the network
without the neurons outside of it.
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
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.convergence import TASKS, plan_task
from benchmarks.tables import piped
from executors.mesh import build_mesh
from executors.strategies.narrow import find_groups
from executors.trainer import Trainer
from planner.schema import Plan, TensorSharding
from planner.schema.methods.masked import Masked

__all__ = ["WAYS", "Scores", "core_of", "train"]

_TASK, _COPIES = TASKS["digits"], 4
#: Shares of neurons that are tried as the core.
_CORES = (0.5, 0.25)
#: Steps from one full step to the next, and copies that take none, by way of training;
#: None for plain training.
WAYS: dict[str, tuple[int, tuple[int, ...]] | None] = {
    "core and full steps in turn": (2, ()),
    "in turn, two of four replicas weak": (2, (2, 3)),
    "full steps alone": None,
    "core steps alone": (10**6, ()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """One run.

    Attributes:
        way: Name of a way of training.
        share: Of the neurons that are the core's.
        seed: Of weights and samples.
        core: Held-out accuracy of the core, percent.
        full: Likewise of the whole network.
    """

    way: str
    share: float
    seed: int
    core: float
    full: float


def core_of(model: nn.Module, sharding: TensorSharding, share: float) -> None:
    """Silence the neurons outside of the core, in place.

    Args:
        model: Whole.
        sharding: Patterns of the layers between which neurons lie.
        share: Of the neurons that are the core's.
    """
    settings = Masked(core=share)
    for group in find_groups(model, sharding):
        weight = model.get_parameter(f"{group.layer}.weight")
        size = weight.shape[1] // group.neurons * settings.core_neurons(group.neurons)
        with torch.no_grad():
            weight[:, size:] = 0


def _accuracy(model: nn.Module) -> float:
    _, accuracy = _TASK.scores(model.eval())
    assert accuracy is not None
    return accuracy


def _work(
    rank: int, store: str, text: str, patterns: str, share: float, seed: int, out: str
) -> None:
    """One copy's process; the first scores the network."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, _COPIES),  # type: ignore[attr-defined]
        rank=rank,
        world_size=_COPIES,
    )
    made = Plan.from_json(text)
    torch.manual_seed(seed)
    model, scored = _TASK.model(), _TASK.model()
    trainer = Trainer(made, model, build_mesh(made.strategy, torch.device("cpu")))
    batches = _TASK.batches(seed, _TASK.batch)
    for _ in range(_TASK.steps):
        trainer.step(next(batches))
    trainer.replicas.settle()
    if rank == 0:
        named = {name: p.detach() for name, p in trainer.named_parameters()}
        scored.load_state_dict(named)
        full = _accuracy(scored)
        core_of(scored, TensorSharding.model_validate_json(patterns), share)
        found = {"full": full, "core": _accuracy(scored)}
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def train(way: str, share: float, seed: int) -> Scores:
    """Train and score.

    Args:
        way: One of :data:`WAYS`.
        share: Of the neurons that are the core's.
        seed: Of weights and samples.
    """
    every, weak = WAYS[way] or (2, ())
    settings = Masked(core=share, every=every, weak_replicas=weak)
    made = plan_task(_TASK, {"synchronisation": str(settings)})
    # Of plain training, too, the core is the same.
    sharding = made.strategy.sharding
    if WAYS[way] is None:
        made = plan_task(_TASK, {})
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        out, store = f"{folder}/scores.json", f"{folder}/store"
        given = (store, made.to_json(), sharding.model_dump_json(), share, seed, out)
        ranks = [
            context.Process(target=_work, args=(rank, *given))
            for rank in range(_COPIES)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        if any(one.exitcode for one in ranks):
            raise RuntimeError(f"{way}, seed {seed}: a process failed")
        found = json.loads(Path(out).read_text(encoding="utf-8"))
    return Scores(way=way, share=share, seed=seed, **found)


def table(runs: Sequence[Scores]) -> str:
    """Return the mean and standard deviation of each way's accuracies."""
    lines = [("training", "neurons in the core", "core", "full network")]
    for way, share in dict.fromkeys((one.way, one.share) for one in runs):
        own = [one for one in runs if (one.way, one.share) == (way, share)]
        shown = (_shown([one.core for one in own]), _shown([one.full for one in own]))
        lines.append((way, f"{share:.0%}", *shown))
    return piped(lines)


def _shown(values: Sequence[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f} ± {spread:.1f} %"


def _page(text: str, seeds: int) -> str:
    """Page of the documentation."""
    return f"""# Partially masked training of digits

`python -m benchmarks.masked_training --seeds {seeds} --out docs/results`,
{date.today()}: {_COPIES} copies on gloo, {_TASK.steps} steps of {_TASK.batch} samples,
{_TASK.optimizer.name} at {_TASK.optimizer.learning_rate}, mean and standard deviation
of {seeds} seeds. Of the network's two hidden layers the first has neurons that can be
masked, 128 between a colwise layer and the rowwise one behind it. *In turn* is
`masked:every=2`. Accuracies are of 360 samples that are held out, of which one is 0.3
points.

{text}

Steps in turn train a core and a network at once, in as many steps as either takes by
itself. Plain training leaves to chance what the core can do.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print the table, write a page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder of the page")
    args = parser.parse_args(argv)
    runs: list[Scores] = []
    for way, share in product(WAYS, _CORES):
        for seed in range(args.seeds):
            runs.append(train(way, share, seed))
            print(json.dumps(asdict(runs[-1])), file=sys.stderr)
    text = table(runs)
    print(text)
    if args.out is not None:
        page = args.out / f"masked_training_{date.today()}.md"
        page.write_text(_page(text, args.seeds), encoding="utf-8")
        print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
