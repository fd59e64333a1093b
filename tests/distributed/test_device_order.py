"""Plans whose ranks are out of the order of devices, on real processes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executors import launch
from executors.mesh import ranks_of_processes
from planner.schema import Optimizer, Plan
from tests.distributed.cases import build, make_plan

#: Halves change places; neighbours do, too; all four do.
ORDERS = {
    "halves": ((2, 4), (0, 2)),
    "neighbours": ((1, 2), (0, 1), (3, 4), (2, 3)),
    "gaps": ((9, 10), (3, 5), (1, 2)),
}


def train(args: dict[str, Any], emit: Callable[[Any], None]) -> dict[str, Any]:
    """Losses of the plan as it is, in another order, resumed, and resumed as it is."""
    import os

    import torch
    import torch.distributed as dist

    from executors import run
    from executors.data import synthetic_batch

    torch.set_num_threads(1)
    plan = Plan.from_json(args["plan"])
    strategy = plan.strategy.model_copy(update={"device_ranges": args["ranges"]})
    moved = plan.model_copy(update={"strategy": strategy})
    ranks = []

    def data(step: int) -> dict[str, torch.Tensor]:
        ranks.append(dist.get_rank())
        return synthetic_batch(plan.workload, step)

    def losses(plan: Plan, steps: int, **options: Any) -> list[float]:
        told: list[float] = []
        result = run(
            plan,
            lambda: build(plan.model.name),
            data,
            steps=steps,
            on_step=lambda report: told.append(report.loss),
            **options,
        )
        # Progress is told where launchers listen: on the process they call rank 0.
        assert told == (list(result.losses) if os.environ["RANK"] == "0" else [])
        return list(result.losses)

    ports = iter(args["ports"])

    def fresh(plan: Plan, steps: int, **options: Any) -> list[float]:
        # A second group at the first one's address may meet what that has left there.
        os.environ["MASTER_PORT"] = str(next(ports))
        return losses(plan, steps, **options)

    kept = {
        "checkpoint_dir": args["folder"],
        "checkpoint_every": 1,
        "keep_checkpoints": 9,
    }
    straight = fresh(plan, 4)
    ranks.clear()
    return {
        "straight": straight,
        "moved": fresh(moved, 2, **kept),
        "rank": ranks[0],
        "resumed": fresh(moved, 4, resume=True, **kept),
        "moved back": fresh(plan, 4, resume="step-000002", **kept),
    }


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.mark.parametrize(
    ("order", "mesh"),
    [
        ("halves", {"pp": 2, "schedule": "1F1B", "num_microbatches": 4}),
        pytest.param("neighbours", {"dp_replicate": 2}, marks=pytest.mark.further),
        pytest.param("gaps", {"tp": 2}, marks=pytest.mark.further),
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
    ids = [device for start, stop in ORDERS[order] for device in range(start, stop)]
    arguments = {
        "plan": plan.to_json(),
        "ranges": ORDERS[order],
        "folder": str(tmp_path / "kept"),
        "ports": _free_ports(4),
    }
    found = launch(f"{__name__}:train", arguments, processes=4)
    for process, seen in enumerate(found):
        assert ids[seen["rank"]] == sorted(ids)[process]
        assert seen["rank"] == ranks_of_processes(ids)[process]
        assert seen["moved"] + seen["resumed"] == seen["straight"]
        assert seen["moved back"] == seen["straight"][2:]


def test_an_order_that_a_group_of_the_caller_has_not_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from executors.mesh import process_group
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
