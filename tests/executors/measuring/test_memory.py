"""Live memory against sizes known by hand and against torch's own tracker."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from executors.measuring.memory import LiveMemory, watched_resizes

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


def _sizes(*, before: bool) -> list[int]:
    """Sizes reported of a storage of 16 bytes that shrinks, and then grows."""
    storage = torch.zeros(4).untyped_storage()
    told: list[int] = []
    with watched_resizes(lambda s: told.append(s.nbytes()), before=before):
        storage.resize_(0)
        storage.resize_(64)
    storage.resize_(8)
    return told


def test_the_new_size_is_told_and_nothing_after_the_block() -> None:
    assert _sizes(before=False) == [0, 64]


def test_the_old_size_is_told_where_it_is_asked_for() -> None:
    assert _sizes(before=True) == [16, 0, 0, 64]


def test_watchers_within_watchers_both_see_and_leave_torch_as_it_was() -> None:
    original = torch.UntypedStorage.resize_
    storage = torch.zeros(4).untyped_storage()
    told: list[str] = []
    with (
        pytest.raises(RuntimeError),
        watched_resizes(lambda _: told.append("outer"), before=True),
        watched_resizes(lambda _: told.append("inner"), before=True),
    ):
        storage.resize_(-1)
    assert told == ["inner", "outer"]
    assert torch.UntypedStorage.resize_ is original
