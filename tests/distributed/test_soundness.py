"""Numbers that are not finite, and copies of weights that differ, end a run by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from executors import run
from executors.trainer import StepResult, Trainer
from planner.errors import ExecutionError
from planner.schema import Plan, Precision
from tests.distributed.cases import build, make_plan
from tests.distributed.pool import Pool

PIPELINE = {"pp": 2, "schedule": "1F1B", "num_microbatches": 4}


class _Spoil(torch.autograd.Function):
    """Identity whose gradient is not finite in one backward of one rank."""

    calls = 0

    @staticmethod
    def forward(_: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(_: Any, *grads: Any) -> Any:
        _Spoil.calls += 1
        spoiled = _Spoil.calls == 2 and dist.get_rank() == 1
        return grads[0] * (float("inf") if spoiled else 1)


def _spoiled() -> nn.Module:
    _Spoil.calls = 0
    model = build("llama")
    model.get_submodule("model.layers.2").register_forward_hook(
        lambda _, __, output: _Spoil.apply(output)
    )
    return model


def _ends(plan_json: str, model_fn: Callable[[], nn.Module], **options: Any) -> str:
    try:
        run(Plan.from_json(plan_json), model_fn, **{"steps": 3} | options)
    except ExecutionError as error:
        return str(error)
    return ""


def _run_spoiled(plan_json: str) -> str:
    return _ends(plan_json, _spoiled)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ({"dp_replicate": 2, "grad_clip_norm": 1.0}, "ranks 0, 1"),
        ({"dp_shard": 2, "zero_stage": 2, "grad_clip_norm": 1.0}, "ranks 0, 1"),
    ],
)
def test_gradients_that_are_not_finite_are_named(
    pool: Pool, strategy: dict[str, Any], ranks: str
) -> None:
    texts = pool.run(_run_spoiled, 2, make_plan("llama", **strategy).to_json())
    assert texts[0] == texts[1]
    assert texts[0].startswith("the gradient norm of step 2 is nan; gradients of ")
    # Not those behind the third layer.
    assert (
        f"28 parameters, from model.embed_tokens.weight to "
        f"model.layers.2.post_attention_layernorm.weight, are not finite on {ranks}; "
        f"lower the learning rate"
    ) in texts[0]


def _shift(trainer: Trainer, fqn: str) -> None:
    """Change one value of this rank's part of a parameter by its last bit."""
    found = [
        parameter
        for part in trainer.parts.values()
        for name, parameter in part.inner.named_parameters()
        if name == fqn
    ]
    assert found, fqn
    local = found[0].to_local() if isinstance(found[0], DTensor) else found[0]
    bits = local.detach().view(-1).view(torch.int32)
    bits[bits.numel() // 2] ^= 1


def _drifting(plan_json: str, fqn: str, rank: int, options: dict[str, Any]) -> str:
    """A weight drifts on one rank after the second step."""
    step = Trainer.step

    def stepped(trainer: Trainer, batch: Any, **options: Any) -> StepResult:
        result = step(trainer, batch, **options)
        if trainer.done == 2 and dist.get_rank() == rank:
            _shift(trainer, fqn)
        return result

    plan = Plan.from_json(plan_json)
    with mock.patch.object(Trainer, "step", stepped):
        return _ends(
            plan_json, lambda: build(plan.model.name), **{"steps": 2} | options
        )


NORM = "model.layers.1.input_layernorm.weight"
EXPERTS = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("model", "strategy", "fqn", "rank", "said"),
    [
        ("llama", {"dp_replicate": 4}, NORM, 2, "along replicate of {}: rank 2"),
        (
            "llama",
            {"dp_replicate": 2, "precision": Precision(compute="bfloat16")},
            NORM,
            1,
            "along replicate of {}: rank 1",
        ),
        (
            "llama",
            {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
            "lm_head.weight",
            3,
            "along replicate of {}: rank 3",
        ),
        ("llama", {"cp": 2}, "lm_head.weight", 1, "along replicate of {}: rank 1"),
        (
            "llama",
            {"tp": 2, "sequence_parallel": True},
            NORM,
            1,
            "along tp of {}: rank 1",
        ),
        (
            "mixtral",
            {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero_stage": 2},
            EXPERTS,
            2,
            "along replicate of {}: rank 2",
        ),
        (
            "gpt2",
            PIPELINE,
            "transformer.wte.weight",
            0,
            "on several stages of {}: rank 1",
        ),
    ],
)
def test_copies_that_differ_in_a_bit_are_named(
    pool: Pool,
    model: str,
    strategy: dict[str, Any],
    fqn: str,
    rank: int,
    said: str,
) -> None:
    plan = make_plan(model, **strategy)
    world = plan.strategy.mesh.num_devices
    texts = pool.run(_drifting, world, plan.to_json(), fqn, rank, {})
    assert len(set(texts)) == 1
    which, _, more = said.format(fqn).partition(": ")
    assert f"copies {which} differ by up to " in texts[0]
    assert f": {more} with other values than rank " in texts[0]
    assert texts[0].startswith("after step 2 ")
    assert "look for a faulty device" in texts[0]


def test_copies_are_compared_as_often_as_asked(pool: Pool) -> None:
    plan = make_plan("llama", dp_replicate=2)
    often = {"steps": 6, "check_replicas_every": 4}
    for text in pool.run(_drifting, 2, plan.to_json(), NORM, 1, often):
        assert text.startswith("after step 4 copies along replicate of ")


def test_copies_that_differ_are_not_saved(pool: Pool, tmp_path: Path) -> None:
    options = {
        "steps": 4,
        "checkpoint_dir": str(tmp_path / "kept"),
        "checkpoint_every": 1,
    }
    plan = make_plan("llama", dp_replicate=2)
    for text in pool.run(_drifting, 2, plan.to_json(), NORM, 1, options):
        assert text.startswith(f"after step 2 copies along replicate of {NORM} differ")
        assert f"resume from {tmp_path / 'kept' / 'step-000001'}" in text
