"""Degrees as communicated, and the device of a process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from executors.launching.process_group import process_group
from executors.mesh import build_mesh, choose_device, communication_degrees
from planner.errors import ExecutionError, StrategyError
from planner.schema import Mesh, Precision, Strategy


def test_zero0_makes_replicas_of_shards_and_moves_no_rank() -> None:
    mesh = Mesh(pp=2, dp_replicate=3, dp_shard=4, cp=2, tp=2)
    sharded = communication_degrees(Strategy(mesh=mesh, zero_stage=3))
    assert (sharded["replicate"], sharded["shard"], sharded["cp"]) == (3, 8, 2)
    plain = communication_degrees(Strategy(mesh=mesh, zero_stage=0))
    assert (plain["replicate"], plain["shard"], plain["cp"]) == (24, 1, 2)
    for degrees in (sharded, plain):
        outer = degrees["pp"] * degrees["replicate"] * degrees["shard"]
        assert outer * degrees["tp"] == mesh.num_devices


def test_experts_are_dealt_out_over_shards() -> None:
    mesh = Mesh(dp_shard=4, cp=2, ep=4)
    degrees = communication_degrees(Strategy(mesh=mesh, zero_stage=1))
    assert (degrees["expert_shard"], degrees["ep"]) == (2, 4)
    over_tp = communication_degrees(
        Strategy(mesh=Mesh(dp_shard=2, tp=4, ep=4), zero_stage=1)
    )
    assert (over_tp["expert_shard"], over_tp["ep"], over_tp["shard"]) == (2, 4, 2)
    with pytest.raises(StrategyError, match="ep=3 does not divide 8, the ranks"):
        communication_degrees(
            Strategy(mesh=mesh.model_copy(update={"ep": 3}), zero_stage=1)
        )


def test_a_gpu_that_is_not_there_is_refused() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ExecutionError, match=f"this machine has {count} GPUs"):
        choose_device(f"cuda:{count}")
    assert choose_device("cpu") == torch.device("cpu")


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    device = torch.device("cpu")
    with process_group(device):
        assert dist.get_world_size() == 1
        place = build_mesh(Strategy(precision=Precision(compute="float32")), device)
        assert (place.data_index, place.group("tp")) == (0, None)
        with pytest.raises(ExecutionError, match=r"1 processes were started.*needs 2"):
            build_mesh(Strategy(mesh=Mesh(tp=2)), device)
        with process_group(device):  # an outer group is used, and left alone
            assert dist.get_world_size() == 1
        assert dist.is_initialized()
    assert not dist.is_initialized()
