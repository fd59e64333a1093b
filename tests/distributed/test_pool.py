"""The pool that the other tests here trust."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.pool import Pool, PoolError


def _wait_alone() -> int:
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()
    return dist.get_rank()


def _rank() -> int:
    return dist.get_rank()


def _meets_late(marker: str, times: int) -> int:
    """Fails as gloo does so many times, then goes on."""
    seen = Path(marker)
    if dist.get_rank() == 1:
        failed = len(seen.read_text()) if seen.exists() else 0
        if failed < times:
            seen.write_text("x" * (failed + 1))
            raise RuntimeError("Gloo connectFullMesh failed with a closed connection")
    return dist.get_rank()


def test_a_group_that_did_not_meet_is_made_once_more(tmp_path: Path) -> None:
    workers = Pool(2)
    try:
        assert workers.run(_meets_late, 2, str(tmp_path / "once"), 1) == [0, 1]
        with pytest.raises(PoolError, match="connectFullMesh"):
            workers.run(_meets_late, 2, str(tmp_path / "always"), 9)
        # gloo itself may fail in one of the two meetings.
        assert (tmp_path / "always").read_text() in {"x", "xx"}
    finally:
        workers.close()


def test_a_hang_ends_with_the_stack_of_every_rank_and_a_new_pool() -> None:
    workers = Pool(2)
    try:
        assert workers.run(_rank, 2) == [0, 1]
        with pytest.raises(PoolError, match="timed out") as caught:
            workers.run(_wait_alone, 2, timeout_s=3.0)
        text = str(caught.value)
        assert text.count("in _wait_alone") == 2
        assert "in barrier" in text
        assert workers.run(_rank, 2) == [0, 1]
    finally:
        workers.close()
