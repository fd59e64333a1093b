"""Stages that were traced attend as the model itself does: without making masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from executors.data import synthetic_batch
from executors.pipelines.export import export_model, fixed_shapes
from executors.pipelines.stages import lower
from planner.errors import ExecutionError
from tests.distributed.cases import build, make_plan


def _masks_given(name: str, block: str, **more: torch.Tensor) -> list[Any]:
    """Mask that reaches the first block of the last of two stages."""
    plan = make_plan(name, pp=2, schedule="1F1B", num_microbatches=4)
    model = build(name)
    inputs = synthetic_batch(plan.workload, 0, samples=4) | more
    stages = lower(
        model,
        plan.strategy.stages,
        inputs,
        kind="cross_entropy",
        device=torch.device("cpu"),
        wire=(torch.float32, torch.float32),
    )
    masks: list[Any] = []

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        masks.append(kwargs.get("attention_mask", args[1] if len(args) > 1 else None))

    model.get_submodule(block).register_forward_pre_hook(see, with_kwargs=True)
    relayed = stages[0].module(**inputs)
    stages[1].module(*relayed, **inputs)
    return masks


@pytest.mark.parametrize(
    ("name", "block"),
    [("llama", "model.layers.3"), ("bert", "bert.encoder.layer.3")],
)
def test_no_mask_is_made_for_whole_sequences(name: str, block: str) -> None:
    assert _masks_given(name, block) == [None]


def test_sequences_packed_in_a_row_keep_their_mask() -> None:
    packed = torch.arange(8).repeat(4, 2)
    (mask,) = _masks_given("llama", "model.layers.3", position_ids=packed)
    assert mask is not None
    assert not mask[0, 0, 8, :8].any()


def test_only_a_models_own_code_is_told_that_shapes_are_fixed() -> None:
    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.compiler.is_exporting())
            return x + 1

    seen: list[bool] = []
    for fixed in (False, True):
        if fixed:
            with fixed_shapes():
                torch.export.export(Asking(), (torch.ones(2),), strict=False)
        else:
            torch.export.export(Asking(), (torch.ones(2),), strict=False)
    assert seen == [True, False]


_LEAKED: list[torch.Tensor] = []


class _Turning(nn.Module):
    """A block that moves a table to its device, as Llama 4 does its rotations."""

    def __init__(self, keep: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.keep = keep

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * table.to(x.device)
        self.keep(y)
        total: torch.Tensor = sum(_LEAKED[-2:], x)
        return total


class _Turned(nn.Module):
    def __init__(self, leaks: bool = False) -> None:
        super().__init__()
        keep = _LEAKED.append if leaks else id
        self.layers = nn.ModuleList(_Turning(keep) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.arange(4).cos()
        for layer in self.layers:
            x = layer(x, table)
        return sum(_LEAKED[-2:], x)


def _exported(model: nn.Module) -> fx.GraphModule:
    made = export_model(
        model,
        {"x": torch.ones(2, 4)},
        ["layers.0", "layers.1"],
        "mean_square",
        torch.device("cpu"),
    )
    return fx.GraphModule(dict(made.attributes), made.graph)


def test_what_a_block_makes_of_a_table_is_made_again_for_later_ones() -> None:
    model = _Turned()
    x = torch.randn(2, 4)
    assert _exported(model)(x=x).equal(model(x))


def test_what_a_block_makes_of_its_weights_does_not_leave_it_unseen() -> None:
    with pytest.raises(
        ExecutionError, match=r"from within layers.0 .* is read outside"
    ):
        _exported(_Turned(leaks=True))


class _Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.vmap(lambda row: row.cumsum(0))(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_vmap_outside_of_units_is_refused() -> None:
    with pytest.raises(ExecutionError, match=r"calls torch\.vmap outside"):
        _exported(_Mapped())


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class _Between(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.between(self.layers[0](x)))


def _reverse(x: torch.Tensor) -> torch.Tensor:
    return _Reversed.apply(x)


def _hooked(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(torch.neg)
    return x


@pytest.mark.parametrize("between", [_reverse, _hooked])
def test_a_backward_of_ones_own_outside_of_units_is_refused(
    between: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(ExecutionError, match=r"(_Reversed.apply|register_hook) outs"):
        _exported(_Between(between))
    within = _Between(nn.Identity())
    within.layers[1] = nn.Sequential(nn.Linear(4, 4), _Between(between))
    _exported(within)


def test_pre_hooks_of_units_are_applied_once() -> None:
    model = _Between(nn.Identity())
    unit = model.layers[1]
    unit.register_forward_pre_hook(lambda _, args: args[0] * 3)
    unit.register_forward_pre_hook(lambda _, a, k: ((a[0] + 1,), k), with_kwargs=True)
    x = torch.randn(2, 4)
    assert _exported(model)(x=x).equal(model(x))
