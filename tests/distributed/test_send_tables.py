"""Sums by send tables are those of all_reduce, and send what the tables say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner.errors import ExecutionError, StrategyError
from planner.schema import Communication, Precision
from planner.schema.send_tables import (
    SendTable,
    direct,
    halving,
    hierarchy,
    ring,
    tree,
)
from planner.schema.strategy_parts import Collective
from tests.distributed.cases import make_plan, reference, train
from tests.distributed.compare import STEPS, Distance, distance
from tests.distributed.pool import Pool

TABLES = {
    "ring": ring([0, 2, 1, 3]),
    "halving": halving([3, 1, 0, 2]),
    "tree": tree([0, 1, 2, 3], pieces=3),
    "direct": direct([0.5, 0.25, 0.25, 0.0]),
    "hierarchy": hierarchy(range(4), [[0, 0, 1, 1]]),
    "three": halving([0, 1, 2]),
}
#: Odd, so that chunks differ in length; and fewer than there are chunks.
SIZES = (1001, 3, 0)


def _sums(text: str) -> dict[str, Any]:
    import torch.distributed as dist

    from executors.communication.tables import TableSum
    from executors.measuring.traffic import CollectiveCounter

    table = SendTable.from_json(text)
    group = dist.new_group(list(range(table.ranks)))
    rank, found, sent = dist.get_rank(), [], 0
    if rank < table.ranks:
        summed = TableSum(table, group)
        for size in SIZES:
            mine = torch.arange(size, dtype=torch.float64) * (rank + 1)
            with CollectiveCounter() as counter:
                summed.run(mine)
            found.append(mine)
            traffic = counter.traffic()
            sent += traffic["send"].bytes if "send" in traffic else 0
    return {"found": found, "sent": sent}


@pytest.mark.parametrize("name", TABLES)
def test_sums_are_right_on_every_rank(pool: Pool, name: str) -> None:
    table = TABLES[name]
    results = pool.run(_sums, 4, table.to_json())
    total = sum(range(1, table.ranks + 1))
    for rank in range(table.ranks):
        for size, found in zip(SIZES, results[rank]["found"], strict=True):
            torch.testing.assert_close(
                found, torch.arange(size, dtype=torch.float64) * total, rtol=0, atol=0
            )
        # Chunks are whole elements, each as near as possible to its share.
        expected = table.bytes_sent(8 * sum(SIZES))[rank]
        messages = sum(send.source == rank for send in table.sends)
        assert abs(results[rank]["sent"] - expected) <= 8 * messages * len(SIZES)


def _wrong(text: str) -> str:
    import torch.distributed as dist

    from executors.communication.tables import TableSum
    from planner.errors import MeshwrightError

    try:
        TableSum(SendTable.from_json(text), dist.group.WORLD)
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_table_for_others_is_refused_before_anything_is_sent(pool: Pool) -> None:
    for said in pool.run(_wrong, 2, ring(range(3)).to_json()):
        assert said.startswith(ExecutionError.__name__)
        assert "over 3 ranks for a sum over 2" in said
    wrong = '{"collective": "all_reduce", "ranks": 2, "shares": [1.0], "owners": []'
    for said in pool.run(_wrong, 2, wrong + ', "sends": [[0, 0, 1, 0, 1]]}'):
        assert said.startswith(StrategyError.__name__)
        assert "rank 0 lacks what ranks [1] gave" in said


@pytest.mark.parametrize(
    "collective",
    [
        Collective(algorithm="ring", order=(1, 0, 3, 2)),
        Collective(algorithm="direct", parts=(0.4, 0.3, 0.3, 0.0)),
        Collective(algorithm="hierarchy", domains=((0, 0, 1, 1),)),
    ],
    ids=lambda one: one.algorithm,
)
def test_training_is_that_of_one_process(pool: Pool, collective: Collective) -> None:
    far = distance(
        pool,
        "llama",
        dp_replicate=4,
        communication=Communication(replicas=collective),
        grad_clip_norm=1.0,
    )
    assert far.largest <= 1e-4


SHARDED = {
    "zero1": {"dp_shard": 2, "zero_stage": 1, "num_microbatches": 2},
    "zero2": {"dp_shard": 2, "zero_stage": 2, "num_microbatches": 4},
    "zero3": {"dp_shard": 2, "zero_stage": 3, "num_microbatches": 4},
    "tp": {"tp": 2, "num_microbatches": 2},
    "pp": {"pp": 2, "schedule": "1F1B", "num_microbatches": 4},
}


@pytest.mark.parametrize("name", SHARDED)
def test_shards_stages_and_parts_sum_over_their_replicas(pool: Pool, name: str) -> None:
    for collective in (
        Collective(algorithm="ring"),
        Collective(algorithm="direct", parts=(0.75, 0.25)),
    ):
        far = distance(
            pool,
            "llama",
            dp_replicate=2,
            communication=Communication(replicas=collective),
            grad_clip_norm=1.0,
            **SHARDED[name],
        )
        assert far.largest <= 1e-4


EXPERTS = {
    "zero2": {"dp_shard": 2, "ep": 2, "zero_stage": 2, "num_microbatches": 2},
    "zero3": {"dp_shard": 2, "ep": 2, "zero_stage": 3},
    "over-tp": {"ep": 2, "tp": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_sum_over_their_replicas(pool: Pool, name: str) -> None:
    far = distance(
        pool,
        "mixtral",
        dp_replicate=2,
        communication=Communication(replicas=Collective(algorithm="ring")),
        grad_clip_norm=1.0,
        **EXPERTS[name],
    )
    assert far.largest <= 1e-4


@pytest.mark.parametrize(
    ("model", "zero"),
    [("llama", 3), pytest.param("mixtral", 2, marks=pytest.mark.further)],
)
def test_bfloat16_computes_with_what_the_library_sums(
    pool: Pool, model: str, zero: int
) -> None:
    found = []
    for algorithm in ("ring", "library"):
        plan = make_plan(
            model,
            dp_replicate=2,
            dp_shard=2,
            ep=2 if model == "mixtral" else 1,
            zero_stage=zero,
            num_microbatches=2,
            precision=Precision(compute="bfloat16"),
            communication=Communication(replicas=Collective(algorithm=algorithm)),
        )
        found.append(pool.run(train, 4, plan.to_json(), STEPS, False)[0])
    for step in found[1]:
        for name in {"grads", "weights"} & step.keys():
            step[name] = {key: torch.tensor(value) for key, value in step[name].items()}
    far = Distance(*found)
    # The sum of two float32 gradients, in whichever order.
    assert far.first_gradients <= 1e-6
    assert far.largest <= 1e-2


def _by_nccl(text: str, variables: list[str | None]) -> dict[str, Any]:
    """Train as if gloo were NCCL, with a value of NCCL_ALGO on each rank."""
    import os
    from unittest import mock

    import torch.distributed as dist

    from executors.communication.tables import TableSum
    from executors.strategies import data_parallel

    told = variables[dist.get_rank()]
    environment = {} if told is None else {"NCCL_ALGO": told}
    with (
        mock.patch.object(data_parallel, "_backend", return_value="nccl"),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(TableSum, "run", autospec=True) as run,
        mock.patch.object(TableSum, "rounds", autospec=True) as rounds,
    ):
        trained: dict[str, Any] = {"steps": train(text, 2, False)}
    return trained | {"messages": run.call_count + rounds.call_count}


NAMED: dict[str, tuple[dict[str, Any], list[bool]]] = {
    "replicas": ({"dp_replicate": 2}, [True, True]),
    # The first and third rank have replicas of a shard.
    "shards": (
        {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 1, "num_microbatches": 2},
        [False, True, False, True],
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_sums_are_left_to_nccl_where_all_ranks_have_named_its_algorithm(
    pool: Pool, name: str
) -> None:
    changes, sends = NAMED[name]
    ring = Communication(replicas=Collective(algorithm="ring"))
    plan = make_plan("llama", communication=ring, **changes)
    world = plan.strategy.mesh.num_devices
    named: list[str | None] = ["allreduce:ring"] * world
    found = pool.run(_by_nccl, world, plan.to_json(), named)
    assert all(rank["messages"] == 0 for rank in found)
    far = Distance(found[0]["steps"], reference(plan, 2, tied=False))
    assert far.largest <= 1e-4
    # The last rank was told another: those that sum with it send messages of our own.
    found = pool.run(_by_nccl, world, plan.to_json(), [*named[:-1], None])
    assert [rank["messages"] > 0 for rank in found] == sends
