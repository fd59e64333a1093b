"""Local steps that exchange the largest entries of weights' ways alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from executors.communication.chunks import CHUNK, decode_chunks, encode_chunks
from executors.dryrun import dry_runs
from planner.schema.methods.local_steps import LocalSteps
from planner.schema.verification import Verification
from tests.distributed.cases import build, largest_gap
from tests.distributed.planned import planned
from tests.distributed.pool import Pool
from tests.distributed.test_local_steps import ADAMW, _plan, resume, train


def _with(top: int, mesh: str = "one rank", **changes: Any) -> Any:
    method = LocalSteps(period=2, top=top)
    return _plan(mesh, 2, synchronisation=method, **changes)


def test_message_and_residual_make_up_the_values_exactly() -> None:
    assert CHUNK == LocalSteps.CHUNK
    torch.manual_seed(0)
    values = [torch.randn(2, 2500), torch.randn(30, 40), torch.randn(7)]
    for top in (2, 64, 4096):
        message, sent = encode_chunks(values, top)
        # Two chunks, and one for each of the others; 12 bits an index.
        assert message.nbytes == 4 * (4 * top + 3 * top // 2)
        assert message.nbytes == LocalSteps(top=top).gathered_bytes(
            [(2, 2500), (30, 40), (7,)], copies=1
        )
        decoded = decode_chunks(message, top, values)
        assert torch.equal(decoded, torch.cat([one.flatten() for one in sent]))
        for value, said in zip(values, sent, strict=True):
            residual = value - said
            assert torch.equal(said + residual, value)
            kept = residual[said == 0].abs()
            if kept.any() and value.numel() <= CHUNK:
                assert kept.max() <= said[said != 0].abs().min()


def test_all_entries_are_the_whole_exchange(pool: Pool) -> None:
    some = _with(4096, optimizer=ADAMW)
    whole = _plan("one rank", 2, optimizer=ADAMW)
    ours = pool.run(train, 2, some.to_json(), 4)
    theirs = pool.run(train, 2, whole.to_json(), 4)
    assert largest_gap(ours[0]["weights"], theirs[0]["weights"]) <= 3e-5
    assert ours[0]["digests"][1::2] == ours[1]["digests"][1::2]


@pytest.mark.parametrize("mesh", ["one rank", "zero 3"])
def test_few_entries_are_gathered_and_copies_are_equal(pool: Pool, mesh: str) -> None:
    plan = _with(64, mesh, optimizer=ADAMW)
    world = plan.strategy.mesh.num_devices
    found = pool.run(train, world, plan.to_json(), 4)
    half = world // 2
    for rank in range(half):
        one, other = found[rank]["digests"], found[rank + half]["digests"]
        same = [a == b for a, b in zip(one, other, strict=True)]
        assert same == [False, True, False, True]
    plain, exchange = found[0]["traffic"][-2:]
    more = exchange.get("all_gather", 0) - plain.get("all_gather", 0)
    method = plan.strategy.synchronisation
    shapes = [tuple(p.shape) for p in build("llama").parameters()]
    if mesh == "one rank":
        assert more == method.gathered_bytes(shapes, copies=2)
        assert exchange["all_reduce"] == 4
    assert 0 < more < found[0]["weight_bytes"]


@pytest.mark.parametrize("mesh", ["one rank", "zero 3"])
def test_residuals_are_resumed_bit_for_bit(
    pool: Pool, tmp_path: Path, mesh: str
) -> None:
    plan = _with(64, mesh, optimizer=ADAMW)
    world = plan.strategy.mesh.num_devices
    for each in pool.run(resume, world, plan.to_json(), str(tmp_path / "kept")):
        assert each["first"] + each["rest"] == each["straight"]


def test_a_dry_run_finds_the_bytes_that_the_plan_predicts() -> None:
    made = planned(
        "tiny-llama",
        dp_replicate=2,
        num_microbatches=1,
        recompute="none",
        synchronisation="local_steps:period=2,top=64",
    )
    found = dry_runs(made, lambda: build("tiny-llama"), [0])
    assert not any(rank.failure for rank in found)
    kinds = {one.name: one for one in Verification.of(made, found).deviations}
    gathers = kinds["all-gather, busiest rank"]
    assert gathers.predicted == gathers.found > 0
    assert kinds["all-reduce, busiest rank"].predicted == 0
    memory = kinds["peak memory, pp rank 0"]
    assert memory.predicted == pytest.approx(memory.found, rel=0.1)
