"""Live memory against sizes known by hand and against torch's own tracker."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from executors.measuring.memory import LiveMemory

MIB = 1 << 20


def test_what_lives_at_once_counts_and_what_died_does_not() -> None:
    with LiveMemory() as memory:
        base = memory.current_bytes
        kept = torch.zeros(MIB // 4)
        for _ in range(5):
            torch.zeros(MIB)  # 4 MiB, dead at once
        view = kept[: MIB // 8]
        assert memory.current_bytes - base == MIB
        assert memory.peak_bytes - base == 5 * MIB
        del kept
        assert memory.current_bytes - base == MIB  # the view keeps the storage
        del view
        assert memory.current_bytes == base


def test_storages_that_are_resized_count_as_they_are() -> None:
    tensor = torch.zeros(MIB // 4)
    with LiveMemory() as memory:
        before = memory.current_bytes
        tensor.untyped_storage().resize_(0)
        assert before - memory.current_bytes == MIB
        tensor.untyped_storage().resize_(2 * MIB)
        assert memory.current_bytes - before == MIB
    assert type(torch.UntypedStorage.resize_).__name__ == "method_descriptor"


def test_fake_tensors_take_no_memory() -> None:
    with FakeTensorMode():
        fake = torch.empty(1 << 40)
    with LiveMemory() as memory:
        assert fake.device.type == "cpu"
        assert memory.current_bytes < 1 << 40


def _step(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()


def test_the_peak_is_that_of_torchs_tracker() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    batch = torch.randn(512, 256)
    _step(model, batch)
    model.zero_grad()

    tracker = MemTracker()
    tracker.track_external(model, batch)
    with tracker:
        _step(model, batch)
    expected = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    model.zero_grad()

    with LiveMemory() as memory:
        outside = memory.current_bytes - _bytes(model, batch)
        _step(model, batch)
    assert memory.peak_bytes - outside == expected


def _bytes(model: nn.Module, batch: torch.Tensor) -> int:
    tensors = [*model.parameters(), batch]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
