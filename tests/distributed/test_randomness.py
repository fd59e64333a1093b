"""Random numbers: parameters belong to the seed, dropout to the seed and the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from executors import run
from planner.schema import Plan
from tests.distributed.cases import build, gpt2, make_plan
from tests.distributed.pool import Pool

PIPELINE = {"pp": 2, "num_microbatches": 4, "schedule": "1F1B"}
MESHES: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "zero3": {"dp_shard": 2, "zero_stage": 3},
    "tp": {"tp": 2, "sequence_parallel": True},
    "cp": {"cp": 2},
    "pp": PIPELINE,
}


def _unseeded(name: str) -> nn.Module:
    """Parameters from the generator as it is: as ``run`` has seeded it."""
    if name == "dropout":
        return gpt2(dropout=0.2)
    state = torch.get_rng_state()
    model = build(name)
    torch.set_rng_state(state)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def train(plan_json: str, model: str, options: dict[str, Any]) -> list[float]:
    """Losses of a run."""
    plan = Plan.from_json(plan_json)
    # Whatever was drawn before must not matter.
    torch.manual_seed(torch.distributed.get_rank() + 123)
    return list(run(plan, lambda: _unseeded(model), **options).losses)


def _losses(pool: Pool, plan: Plan, model: str, **options: Any) -> list[float]:
    world = plan.strategy.mesh.num_devices
    found = pool.run(train, world, plan.to_json(), model, options)
    assert all(losses == found[0] for losses in found)
    return list(found[0])


def train_alone(plan_json: str, seeds: list[int]) -> list[list[float]]:
    """Losses of a process without others, one run a seed."""
    return [train(plan_json, "llama", {"steps": 2, "seed": seed}) for seed in seeds]


@pytest.fixture(scope="module")
def alone(pool: Pool) -> list[list[float]]:
    """Losses of a single process with seeds 3 and 4."""
    found: list[list[list[float]]] = pool.run(
        train_alone, 1, make_plan("llama").to_json(), [3, 4]
    )
    return found[0]


@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_are_those_of_the_seed_on_every_mesh(
    pool: Pool, alone: list[list[float]], mesh: str
) -> None:
    plan = make_plan("llama", **MESHES[mesh])
    found = _losses(pool, plan, "llama", steps=2, seed=3)
    assert found == pytest.approx(alone[0], rel=1e-5)
    assert found != pytest.approx(alone[1], rel=1e-3)


@pytest.mark.parametrize(
    "mesh", ["ddp", "zero3", pytest.param("pp", marks=pytest.mark.slow)]
)
def test_dropout_is_that_of_seed_and_plan(
    pool: Pool, tmp_path: Path, mesh: str
) -> None:
    plan = make_plan("gpt2", **MESHES[mesh])
    straight = _losses(pool, plan, "dropout", steps=4)
    assert _losses(pool, plan, "dropout", steps=4) == straight
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "resume": True}
    parts = [_losses(pool, plan, "dropout", steps=steps, **kept) for steps in (2, 4)]
    assert [*parts[0], *parts[1]] == straight
    # Masks are drawn, and other ones with another seed: without them only the order
    # of additions would differ.
    assert _losses(pool, plan, "gpt2", steps=1)[0] != straight[0]
    assert _losses(pool, plan, "dropout", steps=1, seed=1)[0] != straight[0]


def test_replicas_drop_different_features(pool: Pool) -> None:
    """Two replicas of one batch, and the batch twice on one: not the same masks."""
    found = pool.run(_masks, 2, make_plan("gpt2", dp_replicate=2).to_json())
    assert found[0] != found[1]


def _masks(plan_json: str) -> list[float]:
    from executors.mesh import build_mesh
    from executors.trainer import Trainer

    plan = Plan.from_json(plan_json)
    torch.manual_seed(0)
    Trainer(plan, build("gpt2"), build_mesh(plan.strategy, torch.device("cpu")))
    return nn.functional.dropout(torch.ones(64), 0.5).tolist()
