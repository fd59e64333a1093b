"""Deferred models: whatever a factory does, replayed values are those of doing it."""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from executors import build_model
from executors.deferred.model import held_tensors, record
from planner.errors import ExecutionError
from tests.models.tiny import TINY


class _Bare(nn.Module):
    """Holds what it is given as parameters, buffers or plain attributes."""

    def __init__(self, **tensors: Any) -> None:
        super().__init__()
        for name, value in tensors.items():
            setattr(self, name, value)


def _in_place_on_slices() -> nn.Module:
    weight = nn.Parameter(torch.empty(6, 8))
    with torch.no_grad():
        nn.init.normal_(weight)
        weight[2].zero_()
        weight[:, 1:3].mul_(3.0).add_(weight[:, 5:7])
        weight.view(8, 6)[3:].t().uniform_(-1, 1)
        weight.masked_fill_(weight > 1, 0.5)
    return _Bare(weight=weight)


def _data_and_detach() -> nn.Module:
    first = nn.Parameter(torch.randn(4, 4))
    kept = first.data
    first.data = torch.randn(4, 4).mul_(2)
    second = nn.Parameter(kept)
    second.detach().add_(1)
    first.data.copy_(second.data + first.detach())
    third = nn.Parameter(first.detach().clone())
    first.data.zero_()
    return _Bare(first=first, second=second, third=third)


def _order_of_reads_and_writes() -> nn.Module:
    scratch = torch.empty(5, 5)
    made = {}
    for index in range(3):
        scratch.normal_()
        made[f"w{index}"] = nn.Parameter(torch.empty(5, 5))
        made[f"w{index}"].data.copy_(scratch)
        scratch.mul_(2)
    return _Bare(**made)


def _values_asked_for() -> nn.Module:
    weight = torch.randn(40)
    steps = 0
    while weight.abs().max() > 1:
        weight = weight * 0.7
        steps += 1
    if float(weight.sum().item()) > 0:
        weight.neg_()
    table = torch.from_numpy(torch.arange(6.0).numpy() ** 2)
    rates = [0.1 * value for value in torch.linspace(0, 1, 5).tolist()]
    weight[weight > 0] = 0.25
    return _Bare(
        weight=nn.Parameter(weight),
        table=nn.Parameter(table * steps),
        chosen=nn.Parameter(torch.nonzero(weight < 0).float() + sum(rates)),
    )


def _copied_layers() -> nn.Module:
    layer = nn.Linear(4, 4)
    layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))
    layers[1].weight = layers[2].weight
    nn.init.normal_(layers[2].weight)
    return layers


def _converted() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(5, 4, padding_idx=2))
    model.append(model[0])
    return model.double().to(torch.bfloat16)


def _default_dtype() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        return _Bare(weight=nn.Parameter(torch.rand(4) + torch.arange(4) / 3))
    finally:
        torch.set_default_dtype(torch.float32)


def _own_seeds() -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    first = torch.randn(6, generator=generator)
    torch.manual_seed(3)
    second, third = torch.randn(6), torch.empty(6).normal_(generator=generator)
    torch.manual_seed(3)
    model = _Bare(again=nn.Parameter(torch.randn(6)), third=nn.Parameter(third))
    model.register_buffer("first", first)
    model.register_buffer("second", second)
    return model


def _tables() -> nn.Module:
    angles = torch.outer(torch.arange(8), 10.0 ** -torch.arange(0, 1, 0.25))
    rotary = torch.polar(torch.ones_like(angles), angles)
    model = _Bare(tables=[rotary, {"conj": rotary.conj()}, (angles.cos(), 3)])
    model.register_buffer("mask", torch.ones(8, 8).tril_().bool())
    return model


def _drawn_to_fit() -> nn.Module:
    tensors = {name: nn.Parameter(torch.empty(8, 8)) for name in ("a", "b", "c", "d")}
    nn.init.trunc_normal_(tensors["a"], std=1.0, a=-0.5, b=0.5)
    nn.init.trunc_normal_(tensors["b"], std=0.02)
    nn.init.orthogonal_(tensors["c"])
    nn.init.sparse_(tensors["d"], 0.5)
    return _Bare(**tensors)


def _real_and_deferred() -> nn.Module:
    real = torch.tensor([1.0, 2.0, 3.0])
    weight = nn.Parameter(torch.randn(3, 3) * real)
    bias = nn.Parameter(torch.tensor([4.0, 5.0, 6.0]))
    real.zero_()
    bias.data.add_(weight.data[0])
    joined = nn.Parameter(torch.cat([weight.data, bias.data[None], real[None]]))
    return _Bare(weight=weight, bias=bias, joined=joined)


def _torch_layers() -> nn.Module:
    return nn.ModuleList(
        [
            nn.LSTM(4, 4, num_layers=2),
            nn.MultiheadAttention(8, 2),
            nn.BatchNorm2d(4),
            nn.Conv3d(2, 3, 3),
            nn.EmbeddingBag(10, 4),
            nn.TransformerEncoderLayer(8, 2, 16),
            parametrizations.weight_norm(nn.Linear(4, 4)),
            parametrizations.spectral_norm(nn.Linear(4, 4)),
        ]
    )


_FACTORIES: dict[str, Callable[[], nn.Module]] = {
    function.__name__.strip("_"): function
    for function in (
        _in_place_on_slices,
        _data_and_detach,
        _order_of_reads_and_writes,
        _values_asked_for,
        _copied_layers,
        _converted,
        _default_dtype,
        _own_seeds,
        _tables,
        _drawn_to_fit,
        _real_and_deferred,
        _torch_layers,
    )
}


def _values(
    factory: Callable[[], nn.Module], small_bytes: int
) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(11)
    model, recording = record(factory, small_bytes=small_bytes)
    assert recording is not None
    assert (recording.operations > 0) == (small_bytes == 0)
    values = [
        recording.replay(tensor) if recording.defers(tensor) else tensor
        for tensor in held_tensors(model)
    ]
    return model, values


@pytest.mark.parametrize("name", [*_FACTORIES, *TINY])
def test_replayed_values_are_those_of_doing_it_at_once(name: str) -> None:
    factory = _FACTORIES[name] if name in _FACTORIES else TINY[name].build
    model, deferred = _values(factory, 0)
    done, at_once = _values(factory, sys.maxsize)
    assert len(deferred) == len(at_once)
    for ours, theirs in zip(deferred, at_once, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert list(model.state_dict()) == list(done.state_dict())
    names = [dict(m.named_parameters()).keys() for m in (model, done)]
    assert names[0] == names[1]


def test_deferred_parameters_take_no_memory() -> None:
    # 4 TB each, more than any machine has.
    model, recording = record(lambda: nn.Linear(1_000_000, 1_000_000, bias=False))
    assert recording is not None
    assert recording.defers(model.weight)
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.requires_grad
    assert model.weight.device.type == "cpu"


def test_a_tensor_has_its_values_whatever_else_is_replayed() -> None:
    def pair() -> nn.Module:
        return nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))

    torch.manual_seed(0)
    model, recording = record(pair, small_bytes=0)
    assert recording is not None
    last = recording.replay(model[1].weight)
    torch.manual_seed(99)
    torch.rand(3)
    recording.replay(model[0].weight)
    assert torch.equal(recording.replay(model[1].weight), last)
    assert not torch.equal(recording.replay(model[0].weight), last)


def test_replaying_leaves_the_generator_alone() -> None:
    model, recording = record(lambda: nn.Linear(20, 20), small_bytes=0)
    assert recording is not None
    torch.manual_seed(5)
    before = torch.get_rng_state()
    recording.replay(model.weight)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.initial_seed() == 5


def test_draws_follow_the_distributions_of_torch() -> None:
    model = build_model(lambda: nn.Linear(400, 400), seed=1)
    limit = 1 / math.sqrt(400)
    weight = model.weight.detach()
    assert weight.abs().max() <= limit
    # A uniform variable's standard deviation; 160,000 draws are within 1 % of it.
    assert float(weight.std()) == pytest.approx(limit / math.sqrt(3), rel=0.01)
    assert float(weight.mean()) == pytest.approx(0, abs=limit / 100)


def test_build_model_depends_on_the_seed_alone() -> None:
    def factory() -> nn.Module:
        return nn.Sequential(nn.Linear(200, 200), nn.Dropout(), nn.Linear(200, 200))

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build_model(factory, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second, other = build_model(factory, seed=4), build_model(factory, seed=5)
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert type(ours) is nn.Parameter
        assert torch.equal(ours, theirs)
    assert not torch.equal(first[0].weight, other[0].weight)


def test_build_model_keeps_ties_dtypes_and_gradients() -> None:
    def factory() -> nn.Module:
        model = nn.Sequential(nn.Embedding(300, 100), nn.Linear(100, 300, bias=False))
        model[1].weight = model[0].weight
        model.append(nn.Linear(100, 300).requires_grad_(False).to(torch.bfloat16))
        model.listed = [model[0].weight]
        return model

    model = build_model(factory)
    assert model[0].weight is model[1].weight
    assert model.listed[0] is model[0].weight
    assert model[2].weight.dtype is torch.bfloat16
    assert not model[2].weight.requires_grad
    model[1](torch.ones(1, 100)).sum().backward()
    assert model[0].weight.grad is not None


def test_memory_that_is_never_written_is_zero() -> None:
    model = build_model(lambda: _Bare(weight=nn.Parameter(torch.empty(300, 300))))
    assert not model.weight.any()


def test_what_modules_do_not_show_is_built_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def factory() -> nn.Module:
        table = torch.randn(200, 200)
        model = nn.Linear(200, 200)
        model.register_forward_hook(lambda *_: table)
        return model

    torch.manual_seed(3)
    with caplog.at_level(logging.WARNING, "executors.deferred.model"):
        model, recording = record(factory)
    torch.manual_seed(3)
    assert recording is None
    assert torch.equal(model.weight, factory().weight)
    assert "160,000 bytes of tensors are kept" in caplog.text


def test_what_cannot_be_recorded_is_built_whole_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def factory() -> nn.Module:
        weight = torch.randn(200, 200)
        weight.resize_(100, 400)
        return _Bare(weight=nn.Parameter(weight))

    with caplog.at_level(logging.WARNING, "executors.deferred.model"):
        model, recording = record(factory)
    assert recording is None
    assert model.weight.shape == (100, 400)
    assert model.weight.any()
    assert "resize_" in caplog.text


def test_a_large_constant_that_changed_later_is_not_used() -> None:
    real = torch.arange(40_000, dtype=torch.float32)

    def factory() -> nn.Module:
        weight = torch.empty(40_000)
        weight.copy_(real)
        return _Bare(weight=nn.Parameter(weight))

    model, recording = record(factory)
    assert recording is not None
    assert torch.equal(recording.replay(model.weight), real)
    real.add_(1)
    with pytest.raises(ExecutionError, match="changed in place"):
        recording.replay(model.weight)


def test_a_tensor_from_elsewhere_has_no_values() -> None:
    _, recording = record(lambda: nn.Linear(2, 2))
    assert recording is not None
    with pytest.raises(ExecutionError, match="outside of the recording"):
        recording.replay(torch.ones(2))
