"""Stages run one after another compute what the whole model computes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from executors.stages import LoweredStage, lower
from executors.tied import find_copies, untie
from planner.errors import ExecutionError
from planner.schema import Stage
from tests.distributed.cases import SEQ, UNITS, VOCAB, build


def _lower(
    model: nn.Module, cuts: Sequence[Sequence[str]], inputs: dict[str, torch.Tensor]
) -> list[LoweredStage]:
    stages = [Stage(rank=i, modules=tuple(cut)) for i, cut in enumerate(cuts)]
    return lower(
        model,
        stages,
        inputs,
        kind="mean_square",
        device=torch.device("cpu"),
        wire=(torch.float32, torch.float32),
    )


def _run(stages: list[LoweredStage], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    values: Any = ()
    for stage in stages:
        assert [tuple(v.shape) for v in values] == [
            tuple(v.shape) for v in stage.receives
        ]
        values = stage.module(*values, **inputs)
    result: torch.Tensor = values
    return result


def _cuts(units: Sequence[str], count: int) -> list[tuple[str, ...]]:
    bounds = [round(len(units) * i / count) for i in range(count + 1)]
    return [tuple(units[a:b]) for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_transformer_in_stages_is_the_transformer(name: str, count: int) -> None:
    model = build(name)
    ids = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=ids).logits
    expected.square().mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    stages = _lower(model, _cuts(UNITS[name], count), {"input_ids": ids})
    output = _run(stages, {"input_ids": ids})
    assert torch.equal(output, expected)
    output.square().mean().backward()
    for parameter, grad in grads.items():
        torch.testing.assert_close(model.get_parameter(parameter).grad, grad)
    # Names are the model's own, and nothing but the hidden state crosses a cut.
    found = [n for stage in stages for n, _ in stage.module.named_parameters()]
    assert set(grads) <= set(found)
    assert [len(stage.receives) for stage in stages[1:]] == [1] * (count - 1)


class _Skips(nn.Module):
    """A value that is read three units later, and a unit that returns two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair = nn.Linear(4, 4), _Pair()
        self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kept = self.first(x)
        left, right = self.pair(kept)
        inner = self.middle(left * mask)
        out: torch.Tensor = self.last(inner + kept + right)
        return out * (mask.float().sum() + 1)


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.scale, x.sin()


def test_skips_are_relayed_and_inputs_are_not() -> None:
    torch.manual_seed(0)
    model = _Skips()
    inputs = {"x": torch.randn(3, 4), "mask": torch.rand(3, 4) > 0.5}
    expected = model(**inputs)
    stages = _lower(model, [("first",), ("pair",), ("middle",), ("last",)], inputs)
    assert torch.equal(_run(stages, inputs), expected)
    # first's output; then with the pair; then the sum, as it needs no more units.
    assert [len(stage.receives) for stage in stages] == [0, 1, 3, 1]
    assert all(t.dtype == torch.float32 for s in stages for t in s.receives)


def test_stages_out_of_order_are_refused() -> None:
    inputs = {"x": torch.randn(3, 4), "mask": torch.zeros(3, 4, dtype=torch.bool)}
    with pytest.raises(ExecutionError, match="pair is on stage 0, but reads"):
        _lower(_Skips(), [("pair",), ("first", "middle", "last")], inputs)


class _Handing(nn.Module):
    """Hands the whole output of one unit to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.taker = _Pair(), _Taker()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.taker(*self.maker(x))
        return out


class _Taker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left - right * self.scale


def test_a_pair_crosses_a_cut() -> None:
    model, inputs = _Handing(), {"x": torch.randn(2, 4)}
    stages = _lower(model, [("maker",), ("taker",)], inputs)
    assert torch.equal(_run(stages, inputs), model(**inputs))
    assert len(stages[1].receives) == 2


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.one(self.two(self.one(x)))
        return out


def test_a_unit_that_is_called_twice_is_refused() -> None:
    with pytest.raises(ExecutionError, match="calls 'one' more than once"):
        _lower(_Twice(), [("one",), ("two",)], {"x": torch.randn(2, 4)})


def test_relayed_floats_always_get_a_gradient() -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(3, 4), "mask": torch.zeros(3, 4, dtype=torch.bool)}
    stages = _lower(_Skips(), [("first", "pair"), ("middle", "last")], inputs)
    values = [torch.randn(t.shape, requires_grad=True) for t in stages[1].receives]
    stages[1].module(*values, **inputs).sum().backward()
    for value in values:
        assert value.grad is not None
        assert value.grad.is_contiguous()


def test_a_unit_that_forward_never_calls_is_named() -> None:
    model = _Handing()
    model.spare = nn.Linear(4, 4)
    with pytest.raises(ExecutionError, match=r"'spare' on a stage.*never calls"):
        _lower(model, [("maker",), ("taker", "spare")], {"x": torch.randn(2, 4)})


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.one(x)
        return out if float(out.sum()) > 0 else -out


def test_a_model_that_cannot_be_traced_is_one_line() -> None:
    with pytest.raises(ExecutionError, match="cannot trace _Branches") as caught:
        _lower(_Branches(), [("one",), ()], {"x": torch.randn(2, 4)})
    assert "\n" not in str(caught.value)


def test_copies_of_tied_weights_are_found_and_untied() -> None:
    model = build("gpt2")
    ids = torch.zeros(2, SEQ, dtype=torch.long)
    stages = _lower(model, _cuts(UNITS["gpt2"], 3), {"input_ids": ids})
    modules = [stage.module for stage in stages]
    (tied,) = find_copies(modules)
    assert dict(tied.names) == {0: "transformer.wte.weight", 2: "lm_head.weight"}
    local = {0: modules[0], 2: modules[2]}
    untie(local, [tied])
    first = modules[0].get_parameter("transformer.wte.weight")
    last = modules[2].get_parameter("lm_head.weight")
    assert first is not last
    assert torch.equal(first, last)
