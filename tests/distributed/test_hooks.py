"""Hooks on the gradients of parameters are called on one device, else refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from executors import build_model, run
from executors.data import synthetic_batch
from planner import plan
from planner.errors import ExecutionError, NoFeasiblePlanError
from planner.schema import Optimizer, Plan, Precision


class _Hooked(nn.Module):
    """Large enough that weights are recorded first, and computed later."""

    def __init__(self, *, recurrent: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(160, 160) for _ in range(2))
        self.tail = nn.GRU(160, 160) if recurrent else nn.Identity()
        self.head = nn.Linear(160, 8)
        self.layers[0].weight.register_hook(lambda gradient: 50 * gradient)
        bias = self.head.bias
        bias.register_post_accumulate_grad_hook(_enlarge)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        found = self.tail(x)
        scores: torch.Tensor = self.head(found[0] if isinstance(found, tuple) else x)
        return scores


def _enlarge(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 10


def _made(compute: Any, cluster: str = "local:1", **pins: Any) -> Plan:
    found: Plan = plan(
        _Hooked(),
        cluster,
        global_batch=8,
        example_inputs={"x": torch.randn(8, 3, 160)},
        pin=pins,
        partitioner="exhaustive",
        precision=Precision(compute=compute),
        optimizer=Optimizer(name="SGD", learning_rate=1.0),
    )
    return found


def _losses(made: Plan, model: nn.Module) -> list[float]:
    """Losses of plain training; bfloat16 by autocast."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    narrow = made.strategy.precision.compute == "bfloat16"
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        (x,) = synthetic_batch(made.workload, step).values()
        with torch.autocast("cpu", enabled=narrow):
            scores = model(x)
        loss = scores.float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("compute", "rel"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_hooks_are_called_on_one_device(compute: str, rel: float) -> None:
    made = _made(compute)
    losses = run(made, _Hooked, steps=3).losses
    assert losses == pytest.approx(_losses(made, build_model(_Hooked)), rel=rel)
    # Copies have no hooks.
    without = _losses(made, copy.deepcopy(build_model(_Hooked)))
    assert losses[1:] != pytest.approx(without[1:], rel=5 * rel)


@pytest.mark.parametrize(
    ("cluster", "compute", "pins", "given"),
    [
        ("local:2", "float32", {"dp_replicate": 2}, "2 devices"),
        ("local:2", "float32", {"dp_shard": 2, "zero_stage": 3}, "2 devices"),
        ("local:2", "float32", {"pp": 2}, "2 devices"),
        ("local:1", "float32", {"num_microbatches": 2}, "num_microbatches=2"),
        ("local:1", "float16", {}, "compute=float16"),
    ],
    ids=str,
)
def test_hooks_that_would_not_be_called_are_refused(
    cluster: str, compute: str, pins: dict[str, Any], given: str
) -> None:
    said = rf"layers.0.weight has a hook on its gradient, with {given}, .*remove it"
    with pytest.raises(NoFeasiblePlanError, match=said):
        _made(compute, cluster, **pins)


def test_other_devices_stay_idle_where_there_are_hooks() -> None:
    assert _made("float32", "local:2").strategy.mesh.num_devices == 1


def _recurrent() -> nn.Module:
    return _Hooked(recurrent=True)


def test_hooks_are_refused_by_the_executors_too() -> None:
    made = _made("float32")
    halves = {"num_microbatches": 2, "microbatch_size": 4}
    strategy = made.strategy.model_copy(update=halves)
    with pytest.raises(ExecutionError, match="with num_microbatches=2, which call it"):
        run(made.model_copy(update={"strategy": strategy}), _Hooked, steps=1)
    with pytest.raises(ExecutionError, match="recurrent layers do not call"):
        run(_made("bfloat16"), _recurrent, steps=1, force=True)
