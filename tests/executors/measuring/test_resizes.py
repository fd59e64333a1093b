"""Who is told of a storage that is resized, and when."""

from __future__ import annotations

import pytest
import torch

from executors.measuring.resizes import watched_resizes


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
