"""Stages run one after another compute what the whole model computes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from executors.pipelines.stages import LoweredStage, cuts_inside_stream, lower
from executors.pipelines.tied import find_copies, untie
from planner.errors import ExecutionError
from planner.schema import Plan, Stage
from tests.distributed.cases import SEQ, UNITS, VOCAB, build, make_plan
from tests.models.stacks import STACKS


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
        values = stage.module(*values, **{n: v.clone() for n, v in inputs.items()})
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


class _Towers(nn.Module):
    """Two encoders side by side, and what compares them."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.text = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.image:
            x = layer(x).relu()
        for layer in self.text:
            y = layer(y).relu()
        return self.head(x) @ y.T


def test_towers_may_share_stages() -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    cuts = [
        ("text.0", "image.0"),
        ("image.1", "image.2", "text.1"),
        ("text.2", "head"),
    ]
    _same(_Towers(), cuts, inputs)
    stages = _lower(_Towers(), cuts, inputs)
    assert [len(stage.sends) for stage in stages] == [2, 2, 1]


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


def test_a_unit_that_is_called_again_after_a_later_stage_is_refused() -> None:
    with pytest.raises(ExecutionError, match="one is on stage 0, but one of its 2 cal"):
        _lower(_Twice(), [("one",), ("two",)], {"x": torch.randn(2, 4)})


def _same(model: nn.Module, cuts: Sequence[Sequence[str]], inputs: Any) -> None:
    """Output, gradients and buffers of the stages are the model's, bit by bit."""
    model.train()
    whole = copy.deepcopy(model)
    expected = whole(**{name: value.clone() for name, value in inputs.items()})
    expected.square().mean().backward()
    stages = _lower(model, cuts, inputs)
    output = _run(stages, inputs)
    assert torch.equal(output, expected)
    output.square().mean().backward()
    for name, parameter in whole.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, parameter.grad), name
    for name, buffer in whole.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def _stack_inputs(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    stack = STACKS[name]
    return {
        key: torch.randint(4, (4, *shape), generator=generator)
        if key in stack.integers
        else torch.randn(4, *shape, generator=generator)
        for key, shape in stack.shapes.items()
    }


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("count", [2, 4])
def test_modules_within_modules_are_cut_anywhere(name: str, count: int) -> None:
    torch.manual_seed(0)
    stack = STACKS[name]
    if count > 2 and name in ("shared", "recurrent"):
        with pytest.raises(ExecutionError, match=r"one of its \d calls reads"):
            _lower(stack.build(), _cuts(stack.units, 4), _stack_inputs(name))
    else:
        _same(stack.build(), _cuts(stack.units, count), _stack_inputs(name))


def test_token_ids_shifted_in_place_are_shifted_on_every_stage() -> None:
    """Encoder-decoders fill the decoder's inputs so; no result names the filling."""
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    sizes = {
        f"{part}_{size}": value
        for part in ("encoder", "decoder")
        for size, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
    }
    config = BartConfig(
        vocab_size=VOCAB, d_model=16, use_cache=False, dropout=0.0, **sizes
    )
    model = BartForConditionalGeneration(config)
    ids = torch.randint(3, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "labels": ids.flip(0)}
    expected = model(**inputs).logits
    cuts = [
        ("model.encoder.layers.0",),
        ("model.encoder.layers.1", "model.decoder.layers.0"),
        ("model.decoder.layers.1", "lm_head"),
    ]
    assert torch.equal(_run(_lower(model, cuts, inputs), inputs), expected)


class _Aliased(nn.Module):
    """A module with two names, called by either."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.body = nn.Sequential(self.first, nn.Linear(4, 4))
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.body(self.first(x)))
        return out


def test_a_module_may_have_two_names() -> None:
    model, cuts = _Aliased(), [("first",), ("body.1", "last")]
    inputs = {"x": torch.randn(2, 4)}
    _same(model, cuts, inputs)
    nodes = _lower(model, cuts, inputs)[0].module.graph.nodes
    assert [n.target for n in nodes if n.op == "call_module"] == ["first", "first"]


class _Leaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = _Keeper(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(self.one(x)) + self.one.kept
        return out


class _Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.inner(x)
        return self.kept.sin()


@pytest.mark.filterwarnings("ignore:The tensor attribute")
def test_a_value_that_leaves_a_unit_unreturned_is_refused() -> None:
    with pytest.raises(ExecutionError, match=r"within one \(linear\) is read outside"):
        _lower(_Leaking(), [("one",), ("two",)], {"x": torch.randn(2, 4)})


class _Counts(nn.Module):
    """Counts its calls, and reads the count ``late`` or at once."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.one, self.two, self.late = nn.Linear(4, 4), nn.Linear(4, 4), late
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("other", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.other += 1
        x = self.one(x + self.count)
        if self.late:
            x = self.two(x)
            self.count[0] += 1
        else:
            self.count[0] += 1
            x = self.two(x) * self.count
        return x


def test_a_buffer_is_changed_once_and_on_one_stage() -> None:
    inputs = {"x": torch.randn(2, 4)}
    _same(_Counts(late=True), [("one",), ("two",)], inputs)
    with pytest.raises(
        ExecutionError, match=r"the buffer count, which stages \[0, 1\]"
    ):
        _lower(_Counts(late=False), [("one",), ("two",)], inputs)


class _Halves(nn.Module):
    """Adds to a value of which it has kept a view."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        half = x[:, :2]
        x += self.two(x)
        return x.sum() + half


def test_views_of_what_is_changed_later_do_not_part() -> None:
    with pytest.raises(ExecutionError, match="changes in place what earlier stages"):
        _lower(_Halves(), [("one",), ("two",)], {"x": torch.randn(2, 4)})


class _Makes(nn.Module):
    """Makes tensors on the device of its input, with gradients and without."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = torch.arange(4.0, device=x.device).to(x.device) + x.sum()
        ones = torch.ones(4, device=x.device) * torch.tensor([2.0, 1.0, 1.0, 1.0])
        out: torch.Tensor = self.two(self.one(x) * scale * ones)
        return out


def test_constants_are_made_where_the_stage_runs() -> None:
    stages = lower(
        _Makes(),
        [Stage(rank=0, modules=("one",)), Stage(rank=1, modules=("two",))],
        {"x": torch.randn(2, 4)},
        kind="mean_square",
        device=torch.device("meta"),
        wire=(torch.float32, torch.float32),
    )
    values: Any = ()
    for stage in stages:
        values = stage.module.to("meta")(*values, x=torch.empty(2, 4, device="meta"))
    assert values.device.type == "meta"
    assert values.shape == (2, 4)


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


class _Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.one(x)
        out: torch.Tensor = self.two(x)
        return out


def test_a_unit_without_gradients_is_refused() -> None:
    with pytest.raises(ExecutionError, match=r"'one' on a stage.*only within no_grad"):
        _lower(_Frozen(), [("one",), ("two",)], {"x": torch.randn(2, 4)})


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


HIDDEN = 32


def _plan(cuts: list[tuple[str, ...]], **changes: Any) -> Plan:
    plan = make_plan("llama", pp=2, tp=2, **changes)
    stages = tuple(Stage(rank=i, modules=cut) for i, cut in enumerate(cuts))
    strategy = plan.strategy.model_copy(update={"stages": stages})
    return plan.model_copy(update={"strategy": strategy})


def _cut_at(*bounds: int) -> list[tuple[str, ...]]:
    units = UNITS["llama"]
    edges = (0, *bounds, len(units))
    return [units[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize(
    ("bounds", "inside"),
    [
        # embed | 4 layers | norm, head: scattered by the second, gathered by it.
        ((1, 5), set()),
        ((2, 3, 4), {0, 1, 2}),
        # The stage that ends with the last layer gathers.
        ((1, 3, 5), {1}),
        ((2, 6), {0}),
    ],
)
def test_the_stream_is_divided_between_first_and_last_block(
    bounds: tuple[int, ...], inside: set[int]
) -> None:
    plan = _plan(_cut_at(*bounds), sequence_parallel=True)
    assert cuts_inside_stream(build("llama"), plan.strategy) == inside


def test_without_sequence_parallelism_the_stream_is_whole() -> None:
    assert not cuts_inside_stream(build("llama"), _plan(_cut_at(3)).strategy)


def _lowered(model: torch.nn.Module, cuts: Any, **changes: Any) -> list[LoweredStage]:
    ids = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(1))
    return lower(
        model,
        [Stage(rank=i, modules=cut) for i, cut in enumerate(cuts)],
        {"input_ids": ids},
        kind="cross_entropy",
        device=torch.device("cpu"),
        wire=(torch.float32, torch.float32),
        **changes,
    )


def test_stages_tell_the_shapes_of_shards() -> None:
    first, second, third = _lowered(
        build("llama"), _cut_at(3, 5), stream_shards=2, inside_stream={0}
    )
    assert [tuple(t.shape) for t in first.sends] == [(2, SEQ // 2, HIDDEN)]
    assert [tuple(t.shape) for t in second.receives] == [(2, SEQ // 2, HIDDEN)]
    assert [tuple(t.shape) for t in second.sends] == [(2, SEQ, HIDDEN)]
    flags = [(s.input_sharded, s.output_sharded) for s in (first, second, third)]
    assert flags == [(False, True), (True, False), (False, False)]


def test_a_stream_that_cannot_be_dealt_out_crosses_whole() -> None:
    stages = _lowered(build("llama"), _cut_at(3), stream_shards=3, inside_stream={0})
    assert not stages[0].output_sharded
    assert [tuple(t.shape) for t in stages[1].receives] == [(2, SEQ, HIDDEN)]
