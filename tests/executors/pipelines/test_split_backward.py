"""Both parts of a split backward together give the gradients of a whole one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from executors.certifying.compare import compare_with_whole
from executors.pipelines.split_backward import backward_inputs, backward_weights
from planner import plan
from planner.schema import Optimizer, Precision


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] * weight, (grads[0] * x).sum((0, 1))


class _Stage(nn.Module):
    """Layers, and what makes one of their weights hard to defer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.a, self.b = (nn.Parameter(torch.randn(4)) for _ in range(2))
        self.table = nn.Embedding(5, 4)
        self.kind = kind

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> Any:
        bias = self.table(ids)
        h = self.first(x).tanh()
        match self.kind:
            case "plain":
                pass
            case "own input":
                return h, bias.tanh() * self.a
            case "sum with own input":
                own = bias * self.a
                return self.second(h + own), own.sin()
            case "used twice":
                h = self.last(self.second(self.first(h).tanh()).tanh())
            case "shared bias":
                for layer in (self.first, self.second, self.last):
                    h = layer(h + bias).tanh() + bias * self.b
            case "one gradient of two":
                h = h + self.a.expand_as(h) + self.b
                h = functional.linear(h, self.second.weight + self.last.weight)
            case "chained merges":
                h = h * self.a
                h = h * (self.a + self.b)
                h = h * self.b
            case "python":
                h = _Scale.apply(h, self.a)  # type: ignore[no-untyped-call]
            case "frozen":
                self.first.weight.requires_grad_(False)
                self.second.bias.requires_grad_(False)
        return self.second(h).sin(), self.last(h)


_KINDS = (
    "plain",
    "own input",
    "sum with own input",
    "used twice",
    "shared bias",
    "one gradient of two",
    "chained merges",
    "python",
    "frozen",
)


@pytest.mark.parametrize("kind", _KINDS)
def test_parts_add_up_to_the_whole(kind: str) -> None:
    torch.manual_seed(0)
    split = _Stage(kind).double()
    whole = copy.deepcopy(split)
    waiting = []
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(2, 3, 4, dtype=torch.double, requires_grad=True)
        ids = torch.randint(5, (2, 3))
        outputs = whole(x, ids)
        grads = [torch.randn_like(output) for output in outputs]
        torch.autograd.backward(outputs, grads)

        ours = x.detach().requires_grad_()
        found, deferred = backward_inputs(
            split(ours, ids), grads, [ours, ids], split.parameters()
        )
        torch.testing.assert_close(found, (x.grad, None))
        waiting.append(deferred)
    # Inputs of several microbatches first, as zero-bubble schedules do.
    for deferred in waiting:
        backward_weights(deferred)
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for name, parameter in split.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


def test_weights_of_plain_layers_are_deferred() -> None:
    split = _Stage("plain")
    x = torch.randn(2, 3, 4, requires_grad=True)
    outputs = split(x, torch.zeros(2, 3, dtype=torch.long))
    backward_inputs(
        outputs, [torch.ones_like(o) for o in outputs], [x], split.parameters()
    )
    assert all(p.grad is None for p in split.parameters())


def test_a_loss_that_reads_no_input_trains_the_weights() -> None:
    split = _Stage("plain")
    x = torch.randn(2, 3, 4, requires_grad=True)
    loss = split.table.weight.square().sum()
    found, deferred = backward_inputs([loss], None, [x], split.parameters())
    backward_weights(deferred)
    assert found == (None,)
    assert split.table.weight.grad is not None


class _Towers(nn.Module):
    """Two towers, whose results meet at the end, and a table that each layer adds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.table = nn.Embedding(8, 4)
        self.second = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.bias = nn.Embedding(8, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for layer in self.first:
            x = x + layer(x).tanh()
        y, bias = self.table(ids), self.bias(ids)
        for layer in self.second:
            y = y + layer(y + bias).tanh()
        out: torch.Tensor = self.out(x * y)
        return out


@pytest.mark.parametrize(
    "schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_towers_train_under_split_backwards(schedule: str) -> None:
    torch.manual_seed(0)
    model = _Towers()
    made = plan(
        model,
        "local:2",
        global_batch=8,
        example_inputs={
            "x": torch.randn(8, 3, 4),
            "ids": torch.randint(8, (8, 3)),
        },
        pin={"pp": 2, "schedule": schedule, "virtual_stages": 2},
        precision=Precision(compute="float32"),
        optimizer=Optimizer(name="SGD", learning_rate=1e-2),
    )
    found = compare_with_whole(made, model)
    assert found.verdict == "right", found
