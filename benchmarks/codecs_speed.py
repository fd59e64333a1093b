"""Speed of gradient buckets of our own against DistributedDataParallel's, and codecs'.

python -m benchmarks.codecs_speed [--pairs 15] [--width 512] [--layers 8]

Two gloo ranks train one perceptron by each in turn. Steps come in pairs, ours and DDP's
one after the other, in turns first, so that other load of the machine meets both; the
ratio is DDP's seconds over ours, its median over pairs with the quartiles. The goal is
0.95 at least without a codec.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from executors.communication.buckets import BucketedReplicas, PlainExchange
from executors.launching.launcher import launch
from planner.plugins import load_object
from planner.schema.methods import method_of, methods

_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Sizes of the benchmark."""

    pairs: int = 15
    """Pairs of steps, after two that are not counted."""
    width: int = 512
    """Features of every layer."""
    layers: int = 8
    """Layers of the perceptron."""
    batch: int = 64
    """Samples of a rank."""
    bucket_bytes: int = 4 * 2**20
    """Bytes of a bucket, ours and DDP's."""


def _model(options: Options) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(options.width, options.width) for _ in range(options.layers)]
    return nn.Sequential(*(one for layer in layers for one in (layer, nn.ReLU())))


def _step(
    module: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor
) -> float:
    dist.barrier()
    begin = time.perf_counter()
    optimizer.zero_grad()
    module(inputs).square().mean().backward()
    if isinstance(module, BucketedReplicas):
        module.finish()
    optimizer.step()
    dist.barrier()
    return time.perf_counter() - begin


def _exchanges() -> dict[str, Callable[[], Any]]:
    """Makers of every exchange by name, the plain one first."""
    found: dict[str, Callable[[], Any]] = {"no codec": PlainExchange}
    for one in methods("gradient_compression"):
        if one.document is not None:
            codec = one.document.model_validate({})
            runs = method_of("gradient_compression", codec).runs
            assert runs is not None
            found[one.kind] = partial(load_object(runs), codec)
    return found


def ratios(
    arguments: dict[str, Any], emit: Callable[[Any], None]
) -> dict[str, Sequence[float]]:
    """On a rank: DDP's seconds over ours of each pair, by exchange."""
    del emit
    options = Options(**arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    inputs = torch.randn(options.batch, options.width)
    found: dict[str, Sequence[float]] = {}
    for name, make in _exchanges().items():
        exchange = make()
        ours = BucketedReplicas(_model(options), group, exchange, options.bucket_bytes)
        ddp = DistributedDataParallel(
            _model(options),
            gradient_as_bucket_view=True,
            bucket_cap_mb=options.bucket_bytes / 2**20,
        )
        mine = exchange.optimizer(torch.optim.Adam(ours.parameters()))
        # Of the steps after the warm-up, if the codec has one.
        if hasattr(mine, "warm_up_steps"):
            mine.warm_up_steps = 1
        theirs = torch.optim.Adam(ddp.parameters())
        first = partial(_step, ours, mine, inputs)
        second = partial(_step, ddp, theirs, inputs)
        seconds = []
        for number in range(options.pairs + 2):
            ours_first = number % 2 == 1
            pair = (first(), second()) if ours_first else (second(), first())[::-1]
            seconds.append(pair)
        counted = np.array(seconds[2:])
        found[name] = (counted[:, 1] / counted[:, 0]).tolist()
        # Reducers must be gone before their group is.
        del ours, ddp, first, second
    dist.destroy_process_group()
    return found


def main() -> None:
    """Print a ratio for each exchange."""
    options = tyro.cli(Options)
    found = launch("benchmarks.codecs_speed:ratios", asdict(options), processes=_RANKS)[
        0
    ]
    print(f"DDP's seconds over ours, {_RANKS} gloo ranks, {options.pairs} pairs")
    for name, each in found.items():
        low, middle, high = np.quantile(each, [0.25, 0.5, 0.75])
        print(f"{name:12} {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
