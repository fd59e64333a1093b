"""Batch norms over data-parallel ranks are those of one process over the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from executors.mesh import build_mesh
from executors.strategies.batch_norms import synchronise_batch_norms
from planner.errors import ExecutionError
from planner.schema import Optimizer
from tests.distributed.cases import make_plan
from tests.distributed.compare import distance
from tests.distributed.pool import Pool
from tests.marked import cases

MESHES: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "zero3": {"dp_shard": 2, "zero_stage": 3},
    "zero3 recompute": {"dp_shard": 2, "zero_stage": 3, "recompute": "full"},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 2},
}


@pytest.mark.parametrize("mesh", cases(MESHES, further=["zero3 recompute", "hsdp"]))
def test_training_is_that_of_one_process(pool: Pool, mesh: str) -> None:
    # Small steps: batch norms over few values make much of rounding.
    optimizer = Optimizer(name="SGD", learning_rate=1e-3)
    far = distance(pool, "resnet", optimizer=optimizer, **MESHES[mesh])
    assert far.largest <= 5e-5


NORMS: dict[str, Callable[[], nn.Module]] = {
    "features": lambda: nn.BatchNorm1d(3),
    "images": lambda: nn.BatchNorm2d(3, momentum=None),
    "plain": lambda: nn.BatchNorm1d(3, affine=False, track_running_stats=False),
    "volumes": lambda: nn.BatchNorm3d(3, eps=0.1, momentum=0.3),
}
SHAPES = {"features": (8, 3), "images": (8, 3, 2, 5), "plain": (8, 3, 4)}


def _trained(kind: str, part: slice, ranks: int) -> dict[str, torch.Tensor]:
    """Results, gradients and buffers of two forwards and backwards on some samples."""
    norm = NORMS[kind]()
    if ranks > 1:
        plan = make_plan("llama", dp_replicate=ranks)
        place = build_mesh(plan.strategy, torch.device("cpu"))
        synchronise_batch_norms(norm, place)
    drawn = torch.Generator().manual_seed(0)
    shape = SHAPES.get(kind, (8, 3, 2, 2, 2))
    found: dict[str, torch.Tensor] = {}
    for step in range(2):
        # A mean far from zero: squares would cancel.
        values = 100 + torch.randn(shape, generator=drawn)
        weights = torch.randn(shape, generator=drawn)[part]
        mine = values[part].clone().requires_grad_()
        made = norm(mine)
        (made * weights).sum().backward()
        assert mine.grad is not None
        found |= {f"made {step}": made.detach(), f"gradient {step}": mine.grad}
    found |= {n: p.grad for n, p in norm.named_parameters() if p.grad is not None}
    found |= dict(norm.named_buffers())
    norm.eval()
    return found | {"evaluated": norm(values[part]).detach()}


def _on_rank(kind: str, ranks: int) -> dict[str, Any]:
    size, rank = 8 // ranks, dist.get_rank()
    found = _trained(kind, slice(rank * size, (rank + 1) * size), ranks)
    return {name: value.tolist() for name, value in found.items()}


@pytest.mark.parametrize("kind", NORMS)
def test_statistics_and_gradients_are_those_of_all_samples(
    pool: Pool, kind: str
) -> None:
    whole = _trained(kind, slice(0, 8), 1)
    ours = pool.run(_on_rank, 2, kind, 2)
    for name, expected in whole.items():
        parts = [torch.tensor(one[name]) for one in ours]
        if name in {"weight", "bias"}:
            found = parts[0] + parts[1]
        elif expected.shape[:1] == (8,):
            if kind == "plain" and name == "evaluated":
                continue  # of the batch at hand, which each rank has its own of
            found = torch.cat(parts)
        else:
            assert parts[0].equal(parts[1])
            found = parts[0]
        torch.testing.assert_close(
            found, expected, rtol=1e-4, atol=1e-5, check_dtype=False
        )


class _Own(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) * 2


def _refused() -> str:
    plan = make_plan("llama", dp_replicate=2)
    place = build_mesh(plan.strategy, torch.device("cpu"))
    try:
        synchronise_batch_norms(nn.Sequential(_Own(3)), place)
    except ExecutionError as error:
        return str(error)
    return ""


def test_a_batch_norm_with_a_forward_of_its_own_is_refused(pool: Pool) -> None:
    for said in pool.run(_refused, 2):
        assert said.startswith("0 is a _Own, whose forward is its own")
