"""Ranks compute their own shards: values of the whole model, memory of a share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from executors import build_model, run
from executors.checkpoints.snapshot import full_parameters
from executors.deferred.model import record
from executors.mesh import build_mesh
from executors.trainer import Trainer
from planner.schema import Plan, Precision
from tests.distributed.cases import build, make_plan
from tests.distributed.pool import Pool
from tests.marked import cases

#: Strategies, with the model that they are tried on.
PLANS: dict[str, dict[str, Any]] = {
    "alone": {},
    "replicas": {"dp_replicate": 2},
    # Five rows over four ranks: 2, 2, 1 and none.
    "zero3-uneven": {"model": "perceptron", "dp_shard": 4, "zero_stage": 3},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 2},
    "tp": {"tp": 2},
    "tp-zero3": {"tp": 2, "dp_shard": 2, "zero_stage": 3, "sequence_parallel": True},
    "tp-replicas": {"tp": 2, "dp_replicate": 2},
    "stages": {"pp": 2, "schedule": "1F1B", "num_microbatches": 2, "tied": True},
    "stages-tp": {"pp": 2, "tp": 2, "schedule": "1F1B", "num_microbatches": 2},
    "both-ends-on-one-rank": {
        "pp": 2,
        "virtual_stages": 2,
        "schedule": "ZBVZeroBubble",
        "num_microbatches": 4,
        "tied": True,
    },
    "bfloat16": {
        "dp_shard": 2,
        "zero_stage": 3,
        "precision": Precision(parameter="bfloat16", compute="bfloat16"),
    },
    "experts": {"model": "mixtral", "dp_shard": 4, "ep": 2, "zero_stage": 3},
    "experts-tp": {
        "model": "mixtral",
        "dp_shard": 2,
        "ep": 2,
        "tp": 2,
        "zero_stage": 1,
    },
    "batch-norm": {"model": "resnet", "dp_shard": 2, "zero_stage": 3},
    "tied-replicas": {"model": "gpt2", "dp_replicate": 2},
    "tied-zero3": {"model": "gpt2", "dp_shard": 2, "zero_stage": 3},
}

#: Those in which four ranks divide everything but vectors between them.
FURTHER = {
    "hsdp",
    "tp",
    "tp-replicas",
    "stages",
    "both-ends-on-one-rank",
    "experts",
    "tied-replicas",
}
SHARES = {"tp-zero3", "stages-tp", "experts"}


def _started(plan_json: str, tied: bool, small_bytes: int) -> dict[str, Any]:
    """Build this rank's part; tell what differs from the whole model, and its size."""
    plan = Plan.from_json(plan_json)
    place = build_mesh(plan.strategy, torch.device("cpu"))

    def factory() -> nn.Module:
        return build(plan.model.name, tied=tied)

    model, recording = record(factory, small_bytes=small_bytes)
    assert recording is not None
    trainer = Trainer(plan, model, place, recording)
    dtype = getattr(torch, plan.strategy.precision.parameter)
    whole = build_model(factory).to(dtype)
    found = full_parameters(trainer)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    wrong = [name for name, p in found.items() if not torch.equal(p, expected[name])]
    buffers = dict(whole.named_buffers())
    held = loose = 0
    for part in trainer.parts.values():
        for name, buffer in part.inner.named_buffers():
            # Those of other names are constants of the exported graph.
            if name in buffers and not torch.equal(buffer, buffers[name]):
                wrong.append(name)
        for parameter in part.inner.parameters():
            local = (
                parameter.to_local() if isinstance(parameter, DTensor) else parameter
            )
            held += local.nbytes
            loose += local.untyped_storage().nbytes() - local.nbytes
    return {
        "wrong": wrong,
        "lacking": [n for n, _ in whole.named_parameters() if n not in found],
        "held": held / sum(p.nbytes for p in whole.parameters()),
        "loose": loose,
    }


@pytest.mark.parametrize("name", cases(PLANS, further=FURTHER))
def test_every_plan_starts_from_the_same_values(pool: Pool, name: str) -> None:
    changes = dict(PLANS[name])
    tied = changes.get("tied", False)
    plan = make_plan(changes.pop("model", "llama"), **changes)
    world = plan.strategy.mesh.num_devices
    # 5000 bytes: some parameters have values at once, some have them later.
    for small_bytes in (0, 5000) if world <= 2 else (0,):
        for rank in pool.run(_started, world, plan.to_json(), tied, small_bytes):
            assert rank["wrong"] == []
            # The second name of a tied weight.
            assert set(rank["lacking"]) <= ({"lm_head.weight"} if tied else set())
            if name in SHARES:
                assert rank["held"] < 0.4
                assert rank["loose"] == 0


class _Chosen(nn.Module):
    """Keeps a large table where no module shows it, and looks values up in it."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.randn(200, 100)
        self.look = lambda: table[:32, :96]
        self.model = build("llama")

    def forward(self, input_ids: torch.Tensor) -> Any:
        output = self.model(input_ids=input_ids)
        output.logits = output.logits + self.look().sum() * 0
        return output


def _trained(plan_json: str, model: str) -> tuple[float, ...]:
    plan = Plan.from_json(plan_json)
    factory = _Chosen if model == "chosen" else lambda: build(model)
    return run(plan, factory, steps=2, force=True).losses


def test_runs_of_any_plan_have_the_losses_of_the_whole_model(pool: Pool) -> None:
    alone = pool.run(_trained, 1, make_plan("gpt2").to_json(), "gpt2")[0]
    plan = make_plan("gpt2", dp_shard=2, zero_stage=3)
    for losses in pool.run(_trained, 2, plan.to_json(), "gpt2"):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_a_model_that_cannot_be_recorded_is_trained_all_the_same(pool: Pool) -> None:
    alone = pool.run(_trained, 1, _chosen_plan().to_json(), "chosen")[0]
    plan = _chosen_plan(dp_shard=2, zero_stage=3)
    for losses in pool.run(_trained, 2, plan.to_json(), "chosen"):
        assert losses == pytest.approx(alone, rel=1e-5)


def _chosen_plan(**changes: Any) -> Plan:
    plan = make_plan("llama", **changes)
    (stage,) = plan.strategy.stages
    units = tuple(f"model.{unit}" for unit in stage.modules)
    stages = (stage.model_copy(update={"modules": units}),)
    strategy = plan.strategy.model_copy(update={"stages": stages})
    return plan.model_copy(update={"strategy": strategy})
