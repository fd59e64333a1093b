"""The check of the first step: right plans pass it, and wrong ones do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from executors import first_step, run, steps
from planner.errors import ExecutionError
from planner.schema import Plan, Precision
from planner.schema.methods.local_steps import LocalSteps
from tests.distributed.cases import build, gpt2, make_plan
from tests.distributed.pool import Pool

BFLOAT16 = {"precision": Precision(compute="bfloat16")}
PIPELINE = {"pp": 2, "schedule": "1F1B", "num_microbatches": 4}
ZBV = {"pp": 2, "virtual_stages": 2, "schedule": "ZBVZeroBubble", "num_microbatches": 4}
CUBE = PIPELINE | {"dp_shard": 2, "tp": 2, "zero_stage": 2}


def _dropping() -> nn.Module:
    return gpt2(0.3)


def _mixing() -> nn.Module:
    """A Llama whose tokens see all before them in one of the feed-forward layers."""
    model = build("llama")
    model.get_submodule("model.layers.1.mlp").register_forward_hook(
        lambda _, __, output: output + output.cumsum(1)
    )
    return model


def _noisy() -> nn.Module:
    model = build("llama")
    model.get_submodule("model.norm").register_forward_hook(
        lambda _, __, output: output + torch.randn_like(output)
    )
    return model


_ONE = build("perceptron")


def _broken() -> nn.Module:
    model = build("perceptron")
    with torch.no_grad():
        next(model.parameters())[0] = float("nan")
    return model


MODELS = {
    "broken": _broken,
    "dropping": _dropping,
    "mixing": _mixing,
    "noisy": _noisy,
    "one": lambda: _ONE,
}


def check(plan_json: str, model: str, **options: Any) -> Any:
    """Findings of the check and the losses that followed; or the error."""
    plan = Plan.from_json(plan_json)
    build_fn = MODELS.get(model, lambda: build(model))
    options = {"steps": 2} | options
    try:
        result = run(plan, build_fn, check_first_step=True, **options)
    except ExecutionError as error:
        return str(error)
    return result.first_step_check, result.losses


def ask(pool: Pool, plan: Plan, model: str, **options: Any) -> Any:
    """The same on processes; all of them must answer the same."""
    world = plan.strategy.mesh.num_devices
    answers = pool.run(_checked, world, plan.to_json(), model, options)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def _checked(plan_json: str, model: str, options: dict[str, Any]) -> Any:
    return check(plan_json, model, **options)


def plain(pool: Pool, plan: Plan, model: str) -> Any:
    """Losses without the check."""
    world = plan.strategy.mesh.num_devices
    return pool.run(_plain, world, plan.to_json(), model)[0]


def _plain(plan_json: str, model: str) -> Any:
    build_fn = MODELS.get(model, lambda: build(model))
    return run(Plan.from_json(plan_json), build_fn, steps=2).losses


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        pytest.param("llama", {"dp_replicate": 2}, marks=pytest.mark.further),
        pytest.param(
            "llama",
            {"dp_shard": 2, "zero_stage": 1, "num_microbatches": 2},
            marks=pytest.mark.further,
        ),
        ("llama", {"dp_shard": 2, "zero_stage": 3}),
        ("llama", {"tp": 2, "sequence_parallel": True, "loss_parallel": True}),
        ("llama", {"cp": 2, "zero_stage": 2}),
        pytest.param(
            "llama", {"cp": 2, "context_algorithm": "ring"}, marks=pytest.mark.further
        ),
        pytest.param(
            "resnet",
            {"dp_shard": 2, "zero_stage": 1, "num_microbatches": 2},
            marks=pytest.mark.further,
        ),
        # Dropout, also where it is computed again, is off in the check alone.
        ("dropping", PIPELINE | {"recompute": "full"}),
        ("mixtral", {"dp_shard": 4, "ep": 2, "zero_stage": 2}),
        pytest.param(
            "llama",
            CUBE | BFLOAT16 | {"sequence_parallel": True},
            marks=pytest.mark.further,
        ),
        pytest.param("llama", CUBE, marks=pytest.mark.further),
        pytest.param("gpt2", ZBV, marks=pytest.mark.further),
        pytest.param(
            "gpt2",
            ZBV | {"schedule": "InterleavedZeroBubble"},
            marks=pytest.mark.further,
        ),
        pytest.param(
            "mixtral",
            {"dp_shard": 4, "ep": 2, "zero_stage": 3} | BFLOAT16,
            marks=pytest.mark.further,
        ),
        pytest.param(
            "dropping",
            {"dp_replicate": 2, "compile": True},
            marks=pytest.mark.further,
        ),
    ],
)
def test_a_right_plan_passes_and_trains_as_without(
    pool: Pool, model: str, strategy: dict[str, Any]
) -> None:
    plan = make_plan("gpt2" if model == "dropping" else model, **strategy)
    found, losses = ask(pool, plan, model)
    narrow = plan.strategy.precision.compute == "bfloat16"
    near = 5e-3 if narrow else 1e-6
    assert found.loss == pytest.approx(found.whole_loss, rel=near)
    assert found.grad_norm == pytest.approx(found.whole_grad_norm, rel=near)
    assert found.parameter_error < near
    if model in {"dropping", "resnet"}:
        # Generators and running statistics are as if nothing had been checked.
        assert losses == plain(pool, plan, model)
    if model != "dropping":
        assert losses[0] == pytest.approx(found.loss, rel=1e-6)


def test_tokens_that_meet_outside_of_attention_are_caught_under_cp(pool: Pool) -> None:
    """A plan by hand, of which no analysis has seen the model."""
    plan = make_plan("llama", cp=2, zero_stage=1)
    text = ask(pool, plan, "mixing")
    print(text)
    assert text.startswith("the first step has loss ")
    assert "the gradient norm, by more than 0.001 of it" in text
    assert "(cp2 zero1" in text
    assert "\n" not in text
    # The same model on a plan that leaves sequences whole.
    found, _ = ask(pool, make_plan("llama", dp_replicate=2), "mixing")
    assert f"and gradient norm {found.whole_grad_norm:.6g} in one process" in text


def _unsummed(plan_json: str) -> Any:
    with mock.patch.object(steps, "sum_over_tp", return_value=None):
        return check(plan_json, "llama")


def test_a_wrong_gradient_of_small_parameters_is_named(pool: Pool) -> None:
    """Norms whose gradient each tp rank has a part of, and nobody sums."""
    plan = make_plan("llama", tp=2, sequence_parallel=True)
    texts = pool.run(_unsummed, 2, plan.to_json())
    print(texts[0])
    for text in texts:
        assert "norm.weight (" in text
        assert "by more than 0.02 of it" in text
    assert texts[0] == texts[1]


@pytest.mark.further
def test_a_resumed_run_compares_from_the_weights_it_goes_on_with(
    pool: Pool, tmp_path: Path
) -> None:
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "resume": True}
    first, begun = ask(
        pool, make_plan("gpt2", dp_shard=2, zero_stage=3), "gpt2", **kept
    )
    found, losses = ask(pool, make_plan("gpt2", **PIPELINE), "gpt2", steps=3, **kept)
    assert len(begun) == 2
    assert len(losses) == 1
    assert found.whole_loss == pytest.approx(losses[0], rel=1e-6)
    assert found.whole_loss != pytest.approx(first.whole_loss, rel=1e-3)
    # Nothing is left to do, nor to check.
    assert ask(pool, make_plan("gpt2", **PIPELINE), "gpt2", steps=3, **kept) == (
        None,
        (),
    )


@pytest.mark.parametrize(
    ("model", "strategy", "said"),
    [
        ("broken", {"dp_replicate": 2}, "has loss nan and gradient norm nan in one"),
        ("noisy", {"dp_replicate": 2}, "draws random numbers other than dropout's"),
        ("one", {"dp_replicate": 2}, "returned the same model twice"),
        (
            "llama",
            {
                "dp_replicate": 2,
                "synchronisation": LocalSteps(period=2),
                "semantics": "approximate",
            },
            "copies train on their own between exchanges, so that it is not one",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    pool: Pool, model: str, strategy: dict[str, Any], said: str
) -> None:
    name = {"noisy": "llama", "one": "perceptron", "broken": "perceptron"}.get(
        model, model
    )
    assert said in ask(pool, make_plan(name, **strategy), model)


def _full(plan_json: str) -> Any:
    memory = mock.Mock(available=1000)
    with mock.patch.object(first_step.psutil, "virtual_memory", return_value=memory):
        return check(plan_json, "llama")


def test_a_model_that_does_not_fit_is_refused_with_the_bytes(pool: Pool) -> None:
    for text in pool.run(_full, 2, make_plan("llama", tp=2).to_json()):
        assert "weights and gradients take 0.0 GB, rank 0 has 0.0 GB free" in text
        assert "meshwright verify --numerics" in text
