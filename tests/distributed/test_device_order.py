"""Plans whose ranks are out of the order of devices, on real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executors import launch
from executors.launching.process_group import ranks_of_processes
from planner.cluster import Cluster, device_type
from planner.schema import Optimizer, Plan
from planner.search import get_partitioner
from tests.cost.made import request_for, uniform_graph
from tests.distributed.cases import build, make_plan

#: Two change places; halves do; neighbours do, too; all do.
ORDERS = {
    "two": ((1, 2), (0, 1)),
    "halves": ((2, 4), (0, 2)),
    "neighbours": ((1, 2), (0, 1), (3, 4), (2, 3)),
    "gaps": ((9, 10), (3, 5), (1, 2)),
}


def train(args: dict[str, Any], emit: Callable[[Any], None]) -> dict[str, Any]:
    """Losses of a run that saves every step, and the rank that this process has had.

    One run a process: torch keeps meshes by the ranks in them, and would take one
    order's place on a mesh for that of another.
    """
    import os

    import torch
    import torch.distributed as dist

    from executors import run
    from executors.data import synthetic_batch

    torch.set_num_threads(1)
    plan = Plan.from_json(args["plan"])
    ranks, told = [], []

    def data(step: int) -> dict[str, torch.Tensor]:
        ranks.append(dist.get_rank())
        return synthetic_batch(plan.workload, step)

    result = run(
        plan,
        lambda: build(plan.model.name),
        data,
        steps=args["steps"],
        on_step=lambda report: told.append(report.loss),
        checkpoint_dir=args["folder"],
        checkpoint_every=1,
        keep_checkpoints=9,
        resume=args["resume"],
    )
    # Progress is told where launchers listen: on the process they call rank 0.
    assert told == (list(result.losses) if os.environ["RANK"] == "0" else [])
    return {"losses": list(result.losses), "rank": ranks[0]}


def _divided() -> tuple[tuple[int, int], ...]:
    """Two stages of two replicas over two scattered sites, as ``dtfm`` lays them."""
    site = np.array([0, 1, 1, 0])
    near = site[:, None] == site[None, :]
    cluster = Cluster.from_matrices(
        np.where(near, 1e10, 1e8), np.full((4, 4), 1e-4), device_type("a100-80")
    )
    pins = {"pp": 2, "tp": 1, "cp": 1, "ep": 1}
    request = request_for(uniform_graph(4), cluster, global_batch=16, pins=pins)
    best = get_partitioner("dtfm").search(request).candidates[0].strategy
    assert best.mesh.pp == 2
    return best.device_ranges


def _moved(plan: Plan, order: str) -> Plan:
    ranges = _divided() if order == "dtfm" else ORDERS[order]
    assert ranges
    strategy = plan.strategy.model_copy(update={"device_ranges": ranges})
    cluster = plan.cluster.model_copy(update={"num_devices": 10})
    return plan.model_copy(update={"strategy": strategy, "cluster": cluster})


@pytest.mark.parametrize(
    ("order", "mesh"),
    [
        ("two", {}),
        ("dtfm", {"pp": 2, "schedule": "1F1B", "num_microbatches": 4}),
        pytest.param(
            "halves",
            {"pp": 2, "schedule": "1F1B", "num_microbatches": 4},
            marks=pytest.mark.slow,
        ),
        pytest.param("neighbours", {"dp_replicate": 2}, marks=pytest.mark.further),
        pytest.param("gaps", {"tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_plan_in_another_order_trains_alike(
    tmp_path: Path, order: str, mesh: dict[str, Any]
) -> None:
    """The same losses, bit for bit, and checkpoints that either order goes on from."""
    plan = make_plan(
        "llama",
        dp_shard=2,
        zero_stage=3,
        optimizer=Optimizer(name="AdamW", learning_rate=1e-3),
        **mesh,
    )
    moved = _moved(plan, order)

    def losses(
        plan: Plan, folder: str, steps: int, resume: str | bool = False
    ) -> list[float]:
        arguments = {
            "plan": plan.to_json(),
            "folder": str(tmp_path / folder),
            "steps": steps,
            "resume": resume,
        }
        ids = plan.strategy.device_ids()
        found = launch(f"{__name__}:train", arguments, processes=len(ids))
        assert [each["rank"] for each in found] == list(ranks_of_processes(ids))
        assert [ids[each["rank"]] for each in found] == sorted(ids)
        assert all(each["losses"] == found[0]["losses"] for each in found)
        return list(found[0]["losses"])

    straight = losses(plan, "straight", 4)
    assert losses(moved, "moved", 2) == straight[:2]
    assert losses(plan, "moved", 4, resume="step-000002") == straight[2:]
    assert losses(moved, "straight", 4, resume="step-000002") == straight[2:]


def test_an_order_that_a_group_of_the_caller_has_not_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from executors.launching.process_group import process_group
    from planner.errors import ExecutionError

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        with (
            pytest.raises(ExecutionError, match="process 1 is rank 3 of the plan"),
            process_group(torch.device("cpu"), device_ids=(2, 3, 0, 1)),
        ):
            pass
        with process_group(torch.device("cpu"), device_ids=(0, 1, 2, 3)):
            pass
    finally:
        dist.destroy_process_group()
