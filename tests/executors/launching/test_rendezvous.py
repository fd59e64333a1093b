"""Ranks of one attempt find each other, and those that do not come are named."""

from __future__ import annotations

import datetime
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from executors.launching.rendezvous import Meeting, agree, meet, name_ranks
from planner.errors import ExecutionError, RankFailedError

PATIENCE_S = 20.0


def _together(store: dist.Store, world: int) -> set[str]:
    with ThreadPoolExecutor(world) as pool:
        words = [pool.submit(agree, store, r, world, PATIENCE_S) for r in range(world)]
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
        first = pool.submit(agree, store, 0, 3, PATIENCE_S)
        second = pool.submit(agree, store, 1, 3, PATIENCE_S)
        assert not first.done()
        third = agree(store, 2, 3, PATIENCE_S)
        assert {first.result(), second.result(), third} == {third}


@pytest.mark.parametrize(
    ("come", "said"),
    [
        ((0,), "ranks 1, 2, 3 of 4 did not start: no sign of them within 0.6 s"),
        ((0, 3), "ranks 1, 2 of 4 did not start: "),
        ((0, 1, 3), "rank 2 of 4 did not start: no sign of it within 0.6 s"),
        ((1, 3), "rank 0 of 4 did not start: "),
    ],
)
def test_those_that_do_not_come_are_named_on_all_that_have(
    come: tuple[int, ...], said: str
) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(4) as pool:
        tried = [pool.submit(agree, store, rank, 4, 0.6) for rank in come]
        for each in tried:
            with pytest.raises(RankFailedError, match=f"^{re.escape(said)}"):
                each.result()


def test_ranks_that_come_one_after_the_other_are_waited_for() -> None:
    store, begin = dist.HashStore(), time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        words = []
        for rank in (3, 1, 2, 0):
            words.append(pool.submit(agree, store, rank, 4, 2.0))
            time.sleep(0.8)
        assert len({word.result() for word in words}) == 1
    assert time.monotonic() - begin > 2.0  # longer than any one is waited for


def test_many_are_counted() -> None:
    assert name_ranks(range(5, 500), 512) == (
        "ranks 5, 6, 7, 8, 9, 10, 11, 12 and 487 more of 512"
    )


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port that is bound, and the environment of a rank that would use it."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(holder.getsockname()[1]))
        yield holder.getsockname()[1]


def _meet(rank: int, rank_timeout_s: float = PATIENCE_S) -> Meeting:
    timeout = datetime.timedelta(seconds=PATIENCE_S)
    return meet(rank, 2, rank_timeout_s=rank_timeout_s, timeout=timeout)


@pytest.mark.usefixtures("port")
def test_they_meet_in_a_store_of_rank_0() -> None:
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(_meet, 1)
        first = _meet(0)
    assert (first.is_host, second.result().is_host) == (True, False)
    first.store.set("said", "by 0")
    assert second.result().store.get("said") == b"by 0"


def test_a_rank_0_that_nobody_reaches_is_named(port: int) -> None:
    said = rf"^rank 0 of 2 did not answer at 127\.0\.0\.1:{port} within 0\.6 s"
    with pytest.raises(RankFailedError, match=said):
        _meet(1, 0.6)


def test_a_port_in_use_is_named_and_who_listens_there_is_not_waited_for(
    port: int,
) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(
            ExecutionError, match=rf"^rank 0 cannot listen at .*:{port}"
        ):
            _meet(0)
        # It takes the connection and never says a word.
        with pytest.raises(RankFailedError, match=r"^rank 0 of 2 did not answer"):
            _meet(1, 0.6)


@pytest.mark.parametrize("value", ["0", "many", "70000"])
def test_an_environment_that_names_no_place_is_refused(
    value: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", value)
    with pytest.raises(ExecutionError, match=f"^MASTER_PORT='{value}'; give a port"):
        _meet(0)
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ExecutionError, match=r"MASTER_ADDR is not; start all ranks"):
        _meet(0)
