"""The pool that the other tests here trust."""

from __future__ import annotations

import time

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
