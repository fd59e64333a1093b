"""Every cell of the composition table that says it runs, run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from planner.schema.composition import (
    FEATURES,
    TRIPLES,
    Cell,
    cell,
    compose,
    markdown,
    pairs,
)
from tests.distributed.cases import BATCH, LLAMA_SHARDING, UNITS, make_plan, reference
from tests.distributed.cases import train as train_by
from tests.distributed.compare import STEPS, Distance
from tests.distributed.pool import Pool

#: Of float32: what the order of additions may change.
EXACT = 1e-5
#: Where arithmetic is narrower than float32: bf16 has 8 bits, fp16 11, and each step
#: has weights that the ones before have moved apart; low-rank gradients are only held
#: to the loss.
TOLERANCE = {one.name: one.tolerance for one in FEATURES if one.tolerance}
#: Experts' weights are left whole by tp, as the planner leaves them.
MIXTRAL_SHARDING = {
    pattern: style
    for pattern, style in LLAMA_SHARDING.items()
    if ".mlp." not in pattern
} | {"layers.*.mlp.experts": "experts"}

RUNNING = [c for c in (*pairs(), *map(cell, TRIPLES)) if c.works]


def test_the_documentation_shows_the_table() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "composition.md").read_text()
    assert markdown() in text


def test_features_are_refused_for_a_reason_or_run() -> None:
    assert len(RUNNING) > 200
    for found in pairs():
        assert (
            found.strategy is None or found.works or found.violations[0].count(";") == 1
        )


def _run(pool: Pool, found: Cell) -> Distance:
    model = "mixtral" if "ep" in found.features else "llama"
    patterns = MIXTRAL_SHARDING if model == "mixtral" else LLAMA_SHARDING
    strategy = compose(found.features, UNITS[model], dict(patterns))
    assert strategy is not None
    parts = strategy.num_microbatches * strategy.mesh.data_parallel
    strategy = strategy.model_copy(
        update={
            "microbatch_size": BATCH // parts,
            "optimizer": make_plan(model).strategy.optimizer,
        }
    )
    world, plan = strategy.mesh.num_devices, make_plan(model, pp=strategy.mesh.pp)
    cluster = plan.cluster.model_copy(update={"num_devices": world})
    plan = plan.model_copy(update={"strategy": strategy, "cluster": cluster})
    ours = pool.run(train_by, world, plan.to_json(), STEPS, False)[0]
    return Distance(ours, _reference(model, strategy.grad_clip_norm))


@cache
def _reference(model: str, clip: float | None) -> list[dict[str, Any]]:
    """One process's training; of a cell's features clipping alone changes it."""
    return reference(make_plan(model, grad_clip_norm=clip), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("found", RUNNING, ids=lambda c: " x ".join(c.features))
def test_combinations_train_as_one_process_does(pool: Pool, found: Cell) -> None:
    far = _run(pool, found)
    narrow = [TOLERANCE[name] for name in found.features if name in TOLERANCE]
    if not narrow:
        assert far.largest <= EXACT
        return
    loss, first, gradients = (max(bounds) for bounds in zip(*narrow, strict=True))
    assert far.loss <= loss
    if {"ep", "bfloat16"} <= set(found.features):
        return  # Rounding sends tokens that are near a tie to other experts.
    assert far.first_gradients <= first
    assert far.gradients <= gradients


def test_every_feature_has_a_pair_that_runs() -> None:
    met = {name for found in RUNNING for name in found.features}
    assert met == {feature.name for feature in FEATURES}
