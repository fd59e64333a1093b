"""Ranks of one attempt agree, whatever an earlier attempt left in the store."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from executors.launching.process_group import agree, fresh_store
from planner.errors import ExecutionError

PATIENCE = datetime.timedelta(seconds=20)


def _together(store: dist.Store, world: int) -> set[str]:
    with ThreadPoolExecutor(world) as pool:
        words = [pool.submit(agree, store, r, world, PATIENCE) for r in range(world)]
        return {word.result() for word in words}


def test_each_attempt_has_a_word_of_its_own() -> None:
    store = dist.HashStore()
    attempts = [_together(store, 4) for _ in range(5)]
    assert all(len(words) == 1 for words in attempts)
    assert len(set.union(*attempts)) == 5


def test_tokens_of_the_dead_do_not_count() -> None:
    store = dist.HashStore()
    # Left by ranks that were killed before they heard an answer.
    for rank in (1, 2):
        store.set(f"meshwright/rank/{rank}", f"dead{rank}")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(agree, store, 0, 3, PATIENCE)
        second = pool.submit(agree, store, 1, 3, PATIENCE)
        assert not first.done()
        third = agree(store, 2, 3, PATIENCE)
        assert {first.result(), second.result(), third} == {third}


def test_one_that_does_not_come_is_missed() -> None:
    with pytest.raises(ExecutionError, match=r"1 of 2 ranks started within 0\.1 s"):
        agree(dist.HashStore(), 0, 2, datetime.timedelta(seconds=0.1))


def test_without_a_store_of_torchrun_torch_makes_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert fresh_store(PATIENCE) is None
