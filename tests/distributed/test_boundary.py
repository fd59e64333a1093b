"""tp ranks that share the messages between pipeline stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from executors.dryrun.run import dry_run
from planner import plan
from planner.errors import NoFeasiblePlanError
from planner.schema import Communication, Mesh, Strategy
from planner.schema.violations import executor_violations
from planner.targets.base import Case, get_target
from tests.distributed.cases import build, make_plan, train
from tests.distributed.pool import Pool
from tests.marked import cases

SCATTERED = Communication(boundary="scattered")

PIPELINES: dict[str, dict[str, Any]] = {
    "1F1B": {"schedule": "1F1B"},
    "eager": {"schedule": "Eager1F1B"},
    "interleaved": {"schedule": "Interleaved1F1B", "virtual_stages": 2},
    "V, split backward": {"schedule": "ZBVZeroBubble", "virtual_stages": 2},
    "sequence parallel": {"schedule": "1F1B", "sequence_parallel": True},
    "recomputed": {"schedule": "1F1B", "recompute": "full"},
}


@pytest.mark.parametrize("name", cases(PIPELINES, further=set(PIPELINES) - {"1F1B"}))
def test_losses_and_gradients_are_those_of_direct_messages(
    pool: Pool, name: str
) -> None:
    found = []
    for communication in (Communication(), SCATTERED):
        made = make_plan(
            "llama",
            pp=2,
            tp=2,
            num_microbatches=4,
            communication=communication,
            **PIPELINES[name],
        )
        found.append(pool.run(train, 4, made.to_json(), 3, False)[0])
    for direct, scattered in zip(*found, strict=True):
        assert scattered["loss"] == direct["loss"]
        assert sorted(scattered["grads"]) == sorted(direct["grads"])
        for weight, gradient in direct["grads"].items():
            assert np.array_equal(scattered["grads"][weight], gradient), weight


def _bytes(rank: int, communication: Communication) -> dict[str, float]:
    """Bytes of each kind of call in a step, by a dry run."""
    made = make_plan(
        "llama",
        pp=2,
        tp=2,
        num_microbatches=4,
        schedule="1F1B",
        communication=communication,
    )
    result = dry_run(made, lambda: build("llama"), rank)
    assert result.failure is None
    return {entry.kind: entry.bytes for entry in result.collectives}


@pytest.mark.parametrize("rank", [0, 3])
def test_stages_send_a_tp_th_part_and_gather_all(rank: int) -> None:
    direct, scattered = _bytes(rank, Communication()), _bytes(rank, SCATTERED)
    assert scattered["send"] == direct["send"] / 2
    assert scattered["recv"] == direct["recv"] / 2
    whole = direct["recv"]
    # What is received in parts is gathered: activations behind, gradients before.
    assert scattered["all_gather"] == direct.get("all_gather", 0.0) + whole
    others = {"send", "recv", "all_gather"}
    for kind in {*direct, *scattered} - others:
        assert scattered[kind] == direct[kind]


def test_predictions_halve_what_stages_send_and_add_gathers() -> None:
    pins = {
        "pp": 2,
        "tp": 2,
        "dp_shard": 1,
        "cp": 1,
        "sequence_parallel": False,
        "schedule": "1F1B",
        "recompute": "none",
        "num_microbatches": 8,
    }
    found = {}
    for boundary in ("direct", "scattered"):
        made = plan(
            "gpt2",
            "dgx-a100:1",
            global_batch=16,
            seq_len=256,
            pin={**pins, "boundary": boundary},
            target="any",
            partitioner="exhaustive",
        )
        assert made.strategy.communication.boundary == boundary
        found[boundary] = made.prediction
        assert ("scattered_boundary" in made.strategy.label()) == (
            boundary == "scattered"
        )
        assert ("tp ranks share" in made.summary()) == (boundary == "scattered")
    direct, scattered = found["direct"], found["scattered"]
    sent = direct.collective_bytes["send"]
    # Weights that first and last stage share are summed besides.
    saved = direct.link_bytes["pp"] - scattered.link_bytes["pp"]
    assert saved == pytest.approx(sent / 2)
    assert scattered.collective_bytes["send"] == pytest.approx(sent / 2)
    gathered = scattered.collective_bytes["all_gather"]
    assert gathered == pytest.approx(
        direct.collective_bytes.get("all_gather", 0.0) + sent
    )
    tensor = scattered.breakdown_s["tensor"] - direct.breakdown_s["tensor"]
    assert tensor > 0


@pytest.mark.parametrize(
    ("pins", "words"), [({"pp": 1}, "pp=1"), ({"tp": 1}, "tp=1; there are no ranks")]
)
def test_there_must_be_stages_and_ranks_that_share(
    pins: dict[str, Any], words: str
) -> None:
    mesh = Mesh(**({"pp": 2, "tp": 2} | pins))
    given = Strategy(mesh=mesh, communication=SCATTERED)
    reasons = executor_violations(given)
    assert any(words in reason and "use direct" in reason for reason in reasons)
    with pytest.raises(NoFeasiblePlanError, match="boundary"):
        plan(
            "gpt2",
            "dgx-a100:1",
            global_batch=16,
            seq_len=256,
            pin={**pins, "boundary": "scattered"},
            target="any",
            partitioner="exhaustive",
        )


def test_frameworks_have_no_word_for_it() -> None:
    given = make_plan(
        "llama",
        pp=2,
        tp=2,
        num_microbatches=4,
        schedule="1F1B",
        communication=SCATTERED,
    )
    case = Case(strategy=given.strategy)
    for name in ("megatron", "torchtitan", "nanotron"):
        told = [one.field for one in get_target(name).violations(case)]
        assert "communication.boundary" in told
