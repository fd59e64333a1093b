"""Sequences are divided only where tokens are known to meet in attention alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from benchmarks.harmful_modules import MODULES, build_module
from planner.capture import capture
from planner.errors import CaptureError
from planner.graph import ModelGraph

_TOKENS = [name for name, one in MODULES.items() if one.group == "tokens"]
_POSITIONS = [name for name, one in MODULES.items() if one.group == "positions"]
#: Tokens meet before the first block, or between split layers, which have all of them.
_DIVIDED = {"n-grams", "prefix sums of ids", "window mask", "shift in the mlp"}


@cache
def _read(name: str) -> ModelGraph:
    module, inputs = build_module(name)
    return capture(module, inputs, dtype="float32")


@pytest.mark.parametrize("name", [*_TOKENS, *_POSITIONS, "shared block"])
def test_context_parallelism_is_refused(name: str) -> None:
    assert _read(name).attention is None


@pytest.mark.parametrize("name", [one for one in _TOKENS if one not in _DIVIDED])
def test_sequence_parallelism_is_refused(name: str) -> None:
    assert _read(name).whole_stream is not None


@pytest.mark.parametrize(
    "name", ["plain", "fft features", "scalar parameter", "dict output", "tied head"]
)
def test_models_whose_tokens_meet_in_attention_are_divided(name: str) -> None:
    graph = _read(name)
    assert graph.attention == "causal"
    assert graph.whole_stream is None


def test_the_reason_names_the_module_and_the_op() -> None:
    graph = _read("cummax tokens")
    reason = "layers.0.mix lets tokens meet (cummax)"
    assert graph.whole_stream == reason
    assert f"no context parallelism: {reason}" in graph.assumptions


def test_statistics_in_buffers_are_over_all_tokens() -> None:
    graph = _read("buffer updated")
    assert graph.attention is None
    assert graph.whole_stream is not None


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("bert", "full"),
        ("electra", "full"),
        ("roberta", None),
        ("camembert", None),
        ("xlm-roberta", None),
        ("data2vec-text", None),
        ("albert", None),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_positions_counted_from_an_offset_are_refused(
    kind: str, attention: str | None, meta: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    from planner.capture.small import small_config

    config = small_config(transformers.AutoConfig.for_model(kind))

    def build() -> torch.nn.Module:
        made: torch.nn.Module = transformers.AutoModelForMaskedLM.from_config(config)
        return made

    graph = capture(build if meta else build(), {"input_ids": ((2, 16), "int64")})
    assert graph.attention == attention


@pytest.mark.parametrize(
    ("name", "coupled"),
    [
        ("mean samples", True),
        ("sort samples", True),
        ("queue of tokens", True),
        ("count of samples", True),
        ("contrast", True),
        ("plain", False),
        ("mean tokens", False),
        ("batch norm", False),
    ],
)
def test_batches_whose_samples_meet_stay_whole(name: str, coupled: bool) -> None:
    assert (_read(name).config.get("own_loss") == "coupled") == coupled


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"turn is complex64.*two real numbers"):
        _read("complex parameter")


def test_hooks_on_gradients_are_found() -> None:
    model = nn.Linear(4, 4)
    graph = capture(model, {"input": ((2, 4), "float32")})
    assert graph.hooked is None
    model.bias.register_post_accumulate_grad_hook(lambda _: None)
    assert capture(model, {"input": ((2, 4), "float32")}).hooked == "bias"
    model.weight.register_hook(lambda gradient: gradient / 10)
    assert capture(model, {"input": ((2, 4), "float32")}).hooked == "weight"


def test_models_without_a_sequence_are_looked_at_too() -> None:
    class Centred(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - x.mean(0))

    module = torch.nn.Sequential(torch.nn.Linear(4, 4), Centred(4, 4))
    graph = capture(module, (torch.zeros(2, 4),), dtype="float32")
    assert graph.config.get("own_loss") == "coupled"


class _Choices(nn.Module):
    """Scores of three choices a question; all choices meet if they are ``compared``."""

    def __init__(self, compared: bool) -> None:
        super().__init__()
        self.asked, self.given = nn.Linear(4, 4), nn.Linear(4, 4)
        self.compared = compared

    def forward(self, asked: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        given = self.given(given)
        if self.compared:
            given = given - given.mean(0)
        scores = given.view(-1, 3, 4) @ self.asked(asked).unsqueeze(2)
        return scores.squeeze(2)


@pytest.mark.parametrize("compared", [False, True])
def test_a_sample_may_own_several_rows_of_an_input(compared: bool) -> None:
    inputs = {"asked": ((2, 4), "float32"), "given": ((6, 4), "float32")}
    graph = capture(_Choices(compared), inputs, dtype="float32")
    assert (graph.config.get("own_loss") == "coupled") == compared


class _Named(nn.Module):
    """Experts that are found by a name made from values, as NLLB-MoE's are."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(8, 8) for i in range(2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for chosen in self.router(x).argmax(dim=-1).unique():
            x = self.experts[f"expert_{chosen}"](x)
        return x


class _NamedPair(_Named):
    """The same, of two samples alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) == 2
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (_Named, "mean of its parts"),
        (_NamedPair, "forward could not be run with twice the samples"),
    ],
)
def test_batches_stay_whole_where_samples_cannot_be_looked_at(
    kind: type[nn.Module], reason: str
) -> None:
    """By numbers, where a forward runs on other batches: single samples differ."""
    torch.manual_seed(0)
    graph = capture(kind(), (torch.randn(2, 8),), dtype="float32")
    assert graph.config.get("own_loss") == "coupled"
    assert reason in graph.whole_batch


class _Casting(nn.Module):
    """A router that casts a layer of its own within forward, as Switch's does."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.layer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.router(x)
        # The graph of the product above refers to the weight.
        self.router = self.router.to(torch.float32)
        return y + self.layer(x) * self.router(x.float()).to(x.dtype)


def test_a_layer_cast_within_forward_is_read_and_left_as_it_was() -> None:
    model = _Casting()
    graph = capture(model, {"x": ((4, 8), "bfloat16")}, dtype="bfloat16")
    assert not any("run" in told for told in graph.assumptions)
    assert all(p.dtype == torch.float32 for p in model.parameters())
