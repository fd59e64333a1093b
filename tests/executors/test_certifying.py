"""Small twins of plans, held to plain training by numbers."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from executors.certifying import compare
from executors.certifying.compare import (
    CHANGE_TOLERANCE,
    _change_errors,
    _noise,
    _train_whole,
    compare_with_whole,
)
from executors.certifying.small_plan import small_plan
from executors.strategies import collectives, tensor_parallel
from planner import plan
from planner.errors import ExecutionError
from planner.random_draws import BatchDraws
from planner.schema import Optimizer, Plan, Precision
from tests.distributed.cases import build, make_plan


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 2},
        {"dp_shard": 2, "zero_stage": 3},
        {"cp": 2},
        {"pp": 2, "schedule": "1F1B", "num_microbatches": 4},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_right_is_called_right(changes: dict[str, Any]) -> None:
    found = compare_with_whole(make_plan("llama", **changes), build("llama"))
    assert found.verdict == "right", found
    assert found.loss_error < 1e-5
    assert found.change_error < 1e-3


def test_a_gradient_that_is_not_summed_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backward = staticmethod(lambda _, *grads: (grads[0], None))
    monkeypatch.setattr(collectives._Copy, "backward", backward)
    found = compare_with_whole(make_plan("llama", tp=2), build("llama"))
    assert found.verdict == "wrong"
    assert found.change_error > 0.1


def test_numbers_that_are_none_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only a later parameter holds them, and every loss is equal."""
    backward = staticmethod(lambda _, *grads: (grads[0] * float("nan"), None))
    monkeypatch.setattr(collectives._Copy, "backward", backward)
    found = compare_with_whole(make_plan("llama", tp=2), build("llama"), steps=1)
    assert found.verdict == "wrong"
    assert found.loss_error < 1e-5
    assert found.change_error == float("inf")


def test_a_rank_that_dies_crashes_the_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(*_: object) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(tensor_parallel, "copy_to_region", leave)
    found = compare_with_whole(make_plan("llama", tp=2), build("llama"))
    assert (found.verdict, found.violation) == (
        "crashed",
        "RuntimeError: no such device (in model.layers.0.self_attn.q_proj)",
    )


def test_changes_within_rounding_of_a_parameter_are_right() -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(1.0)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    moved = {"weight": weights["weight"] + 1e-6, "bias": weights["bias"] + 1e-6}
    off = {"weight": moved["weight"] + 3e-7, "bias": moved["bias"] + 3e-7}
    whole = {"losses": [1.0, 1.0, 1.0], "weights": moved}
    errors = _change_errors(model, whole, [{"weights": off}])
    assert errors["weight"] < CHANGE_TOLERANCE < 0.1 < errors["bias"]


class _Kinked(nn.Module):
    """Units that rounding switches on or off, where their activation has a kink."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 64, bias=False), nn.Linear(64, 8)
        self.activation = activation
        with torch.no_grad():
            self.inner.weight[:, 3] = -self.inner.weight[:, :3].sum(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        even = torch.ones_like(x[..., :4])
        return x + self.outer(self.activation(self.inner(even)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh()], ids=str)
def test_noise_tells_kinks_from_smooth_training(activation: nn.Module) -> None:
    torch.manual_seed(0)
    model = _Kinked(activation)
    made = _planned(model, dp_shard=2)
    whole = _train_whole(made, model, 1, BatchDraws())
    noise, _ = _noise(made, model, whole, 1)
    assert (noise["inner.weight"] > 0.5) == isinstance(activation, nn.ReLU)
    assert noise["outer.bias"] < CHANGE_TOLERANCE


class _Normed(nn.Module):
    """A pair of layers with a parameter between them that tp ranks share."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(1))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x).tanh()
        inner = inner * self.scale if self.between else inner
        out: torch.Tensor = self.down(inner)
        return x + (out if self.between else out * self.scale)


class _Stack(nn.Module):
    def __init__(self, between: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Normed(between) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _planned(model: nn.Module, **pins: int) -> Plan:
    return plan(
        model,
        "local:2",
        global_batch=4,
        example_inputs={"x": torch.randn(4, 8)},
        pin=pins or {"tp": 2},
        precision=Precision(compute="float32"),
        optimizer=Optimizer(name="SGD", learning_rate=1e-2),
    )


@pytest.mark.parametrize("between", [True, False])
def test_parameters_within_a_region_and_after_it(between: bool) -> None:
    torch.manual_seed(0)
    model = _Stack(between)
    made = _planned(model)
    styles = made.strategy.sharding.patterns
    assert styles.get("layers.*.scale") == ("replicated" if between else None)
    found = compare_with_whole(made, model)
    assert found.verdict == "right", found


def test_a_parameter_that_is_forgotten_is_named() -> None:
    torch.manual_seed(0)
    model = _Stack(between=True)
    made = _planned(model)
    sharding = made.strategy.sharding
    kept = {p: s for p, s in sharding.patterns.items() if s != "replicated"}
    changed = made.strategy.model_copy(
        update={"sharding": sharding.model_copy(update={"patterns": kept})}
    )
    found = compare_with_whole(made.model_copy(update={"strategy": changed}), model)
    assert found.verdict == "late"
    assert 'add "layers.0.scale": "replicated" to' in str(found.violation)


def test_the_twin_has_every_axis_at_degree_two() -> None:
    made = make_plan(
        "llama", dp_replicate=2, dp_shard=4, tp=2, pp=2, num_microbatches=2
    )
    small = small_plan(made, build("llama"), high=50).strategy
    assert small.mesh.model_dump() == {
        "pp": 2,
        "dp_replicate": 1,
        "dp_shard": 2,
        "cp": 1,
        "tp": 2,
        "ep": 1,
    }
    assert small.optimizer.name == "SGD"


def test_a_model_without_what_is_split_is_refused() -> None:
    with pytest.raises(ExecutionError, match="small model has no"):
        small_plan(make_plan("llama", tp=2), build("gpt2"))


def test_inputs_of_a_twin_are_float32_as_its_weights_are() -> None:
    torch.manual_seed(0)
    model = _Stack(between=True)
    made = plan(
        model,
        "local:2",
        global_batch=8,
        example_inputs={"x": torch.randn(8, 3, 8)},
        pin={"dp_replicate": 2},
    )
    assert made.strategy.precision.compute == "bfloat16"
    found = compare_with_whole(small_plan(made, model), model)
    assert found.verdict == "right", found


class _Pair(nn.Module):
    """Two layers, of which a subclass says what lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("codes", torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.norm(self.first(x)))
        return made.square().mean()


class _Contrastive(_Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = (functional.normalize(y, dim=1) for y in (self.first(x), self.last(x)))
        return functional.cross_entropy(a @ b.T, torch.arange(len(x)))


class _Codebook(_Pair):
    """The mean of what was nearest replaces a code, outside of any layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        near = torch.cdist(y, self.codes).argmin(1)
        chosen = self.codes[near]
        with torch.no_grad():
            counts = functional.one_hot(near, 4).float()
            means = counts.T @ y / counts.sum(0).clamp(min=1)[:, None]
            self.codes.mul_(0.5).add_(means, alpha=0.5)
        z: torch.Tensor = self.last(y + (chosen - y).detach())
        return functional.mse_loss(z, x) + functional.mse_loss(y, chosen)


class _Reentrant(_Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        made: torch.Tensor = checkpoint(self.last, y.tanh(), use_reentrant=True)
        return made.square().mean()


@pytest.mark.parametrize(
    ("kind", "microbatches"),
    [(_Pair, 1), (_Contrastive, 1), (_Codebook, 1), (_Reentrant, 4)],
)
def test_pipelines_of_own_code_train_as_one_process_does(
    kind: type[_Pair], microbatches: int
) -> None:
    """Batches that must stay whole do so in the twin, too."""
    torch.manual_seed(0)
    model = kind()
    made = _planned(model, pp=2, num_microbatches=min(microbatches, 2))
    twin = small_plan(made, model)
    assert twin.strategy.num_microbatches == microbatches
    found = compare_with_whole(twin, model)
    assert found.verdict == "right", found


def test_reentrant_checkpoints_train_on_replicas_as_in_one_process() -> None:
    torch.manual_seed(0)
    model = _Reentrant()
    found = compare_with_whole(_planned(model, dp_replicate=2), model)
    assert found.verdict == "right", found


def _forever(*_: object) -> None:
    while True:
        pass


def test_ranks_that_compute_when_the_time_is_up_are_not_called_hung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare, "_train_as_rank", _forever)
    with pytest.raises(ExecutionError, match="longer than is waited for"):
        compare_with_whole(make_plan("llama", tp=2), build("llama"), timeout_s=0.1)


def test_ranks_that_wait_are_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_train_as_rank", lambda *_: time.sleep(60))
    found = compare_with_whole(make_plan("llama", tp=2), build("llama"), timeout_s=0.1)
    assert found.verdict == "hung"
    assert found.violation == "ranks 0, 1 wait"
