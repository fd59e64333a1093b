"""Degrees as communicated, and the device of a process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from executors.mesh import arrange, choose_device, effective_mesh, process_group
from planner.errors import ExecutionError
from planner.schema import Mesh, Precision, Strategy


def test_zero0_makes_replicas_of_shards_and_moves_no_rank() -> None:
    mesh = Mesh(pp=2, dp_replicate=3, dp_shard=4, tp=2)
    as_is = Strategy(mesh=mesh, zero_stage=3, num_microbatches=2)
    assert effective_mesh(as_is) == mesh
    plain = effective_mesh(Strategy(mesh=mesh, zero_stage=0, num_microbatches=2))
    assert (plain.dp_replicate, plain.dp_shard) == (12, 1)
    for rank in range(mesh.num_devices):
        old, new = mesh.coordinates(rank), plain.coordinates(rank)
        assert (old["pp"], old["tp"]) == (new["pp"], new["tp"])
        assert new["dp_replicate"] == old["dp_replicate"] * 4 + old["dp_shard"]


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
        place = arrange(Strategy(precision=Precision(compute="float32")), device)
        assert (place.data_index, place.group("tp")) == (0, None)
        with pytest.raises(ExecutionError, match=r"1 processes were started.*needs 2"):
            arrange(Strategy(mesh=Mesh(tp=2)), device)
        with process_group(device):  # an outer group is used, and left alone
            assert dist.get_world_size() == 1
        assert dist.is_initialized()
    assert not dist.is_initialized()
