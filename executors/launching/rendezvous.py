"""Ranks find each other at the start of a run, or name those that do not come.

A rank is missing when it gives no sign for ``rank_timeout_s`` after the last one came,
so that ranks which start slowly, one after the other, are waited for.

torchrun keeps one store through all its restarts (torch 2.13). A restarted rank may
then read there at which address a peer listened that was killed, and fails to connect,
as in two of three restarts tried. Its count of restarts does not tell attempts apart:
each node has its own. So ranks agree on a prefix that no earlier attempt has written
under. Source: github.com/pytorch/pytorch/issues/135712.
"""

from __future__ import annotations

import datetime
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from planner.errors import ExecutionError, RankFailedError

__all__ = [
    "ENDED",
    "REPLICAS_PREFIX",
    "Meeting",
    "agree",
    "beat_key",
    "here_key",
    "hung_key",
    "meet",
    "name_ranks",
    "open_store",
]

#: Of what replicas tell each other that go on without those that die.
REPLICAS_PREFIX = "meshwright/replicas"
#: What a launcher writes in place of a replica's token once its process has ended.
ENDED = "ended"

_POLL_S = 0.02
#: How much longer than rank 0 others wait, which is to tell them, as a share.
_SLACK = 1 / 6
#: Ranks that a message names one by one.
_NAMED = 8
_PATIENCE = "or allow more time with rank_timeout_s (--rank-timeout-s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Ranks that have found each other.

    Attributes:
        store: Seen by the ranks of this attempt alone.
        is_host: True if this process holds the store that the others use.
    """

    store: Store
    is_host: bool


def meet(
    rank: int, world: int, *, rank_timeout_s: float, timeout: datetime.timedelta
) -> Meeting:
    """Wait until every rank has come, by the address in torchrun's environment.

    Args:
        rank: Number of this process.
        world: Number of processes.
        rank_timeout_s: Longest time without a new rank, in seconds.
        timeout: Of the returned store's operations.

    Raises:
        RankFailedError: If ranks do not come: which.
        ExecutionError: If the environment names no address, or the port is in use.
    """

    def word(base: Store, alive: Callable[[], None]) -> str:
        return agree(base, rank, world, rank_timeout_s, alive)

    return _connected(rank, world, rank_timeout_s, timeout, word)


def open_store(
    rank: int, world: int, *, rank_timeout_s: float, timeout: datetime.timedelta
) -> Meeting:
    """Connect to the store at the address in torchrun's environment; wait for no rank.

    Args:
        rank: Number of this process.
        world: Number of processes.
        rank_timeout_s: Longest time until the store answers, in seconds.
        timeout: Of the returned store's operations.

    Raises:
        RankFailedError: If the store does not answer.
        ExecutionError: As for :func:`meet`.
    """
    return _connected(rank, world, rank_timeout_s, timeout, lambda *_: REPLICAS_PREFIX)


def _connected(
    rank: int,
    world: int,
    rank_timeout_s: float,
    timeout: datetime.timedelta,
    agreed: Callable[[Store, Callable[[], None]], str],
) -> Meeting:
    """Connect to the store, and use the part of it whose prefix is agreed on there."""
    address, port = _address()
    # The store of torchrun's agent, where there is one; else process 0 makes it.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_host = rank == 0 and not agent
    alive = _Sign()

    host = "torchrun's store" if agent else f"rank 0 of {world}"
    lost = RankFailedError(
        f"{host} did not answer at {address}:{port} within {rank_timeout_s:g} s; see "
        f"its output, {_PATIENCE}"
    )

    def work() -> Meeting:
        if not is_host:
            _wait_for_listener(address, port, rank_timeout_s, lost)
            alive.give()
        base = TCPStore(
            address,
            port,
            world,
            is_master=is_host,
            timeout=datetime.timedelta(seconds=rank_timeout_s),
            wait_for_workers=False,
            # One process may make groups one after the other.
            multi_tenant=is_host,
        )
        word = agreed(base, alive.give)
        base.set_timeout(timeout)
        return Meeting(store=PrefixStore(word, base), is_host=is_host)

    try:
        return _watched(work, alive, (1 + _SLACK) * rank_timeout_s, lost)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise ExecutionError(
                f"rank 0 cannot listen at {address}:{port}, another program uses this "
                f"port; set MASTER_PORT to a free one for all ranks"
            ) from error
        raise lost from error


def _wait_for_listener(
    address: str, port: int, rank_timeout_s: float, lost: Exception
) -> None:
    """Return when a program listens at an address; torch logs pages where none does."""
    deadline = time.monotonic() + rank_timeout_s
    while True:
        try:
            with socket.create_connection((address, port), timeout=rank_timeout_s):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise lost from error
        time.sleep(0.1)


def _address() -> tuple[str, int]:
    """Address and port of the store from torchrun's environment."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ExecutionError(
                f"WORLD_SIZE is set, {name} is not; start all ranks with torchrun, or "
                f"set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each"
            )
    port = os.environ["MASTER_PORT"]
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ExecutionError(f"MASTER_PORT={port!r}; give a port from 1 to 65535")
    return os.environ["MASTER_ADDR"], int(port)


class _Sign:
    """Time at which a thread last told that it goes on."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def give(self) -> None:
        self.at = time.monotonic()


def _watched(
    work: Callable[[], Meeting], alive: _Sign, silence_s: float, lost: Exception
) -> Meeting:
    """Call a function in a thread; raise an error if the thread is silent for so long.

    Operations on a store whose host is stopped, or a port on which another program
    listens, block for ever whatever their timeout (torch 2.13).
    """
    done: list[Meeting] = []
    failed: list[BaseException] = []

    def call() -> None:
        try:
            done.append(work())
        except BaseException as error:  # raised again below
            failed.append(error)

    thread = threading.Thread(target=call, name="rendezvous", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
        if thread.is_alive() and time.monotonic() - alive.at > silence_s:
            raise lost
    if failed:
        raise failed[0]
    return done[0]


def agree(
    store: Store,
    rank: int,
    world: int,
    rank_timeout_s: float,
    alive: Callable[[], None] = lambda: None,
) -> str:
    """Agree on a token that the living ranks share and dead ones never saw.

    Every rank leaves a token of its own; rank 0 answers each token that it sees, those
    of the dead too. A rank that has the answer has come. When all have, or no other
    has come for some time, rank 0 tells everybody.

    Args:
        store: That all reach.
        rank: Number of this process.
        world: Number of processes.
        rank_timeout_s: Longest time without a new rank, in seconds.
        alive: Called again and again while the store answers.

    Raises:
        RankFailedError: The same on all ranks that have come, naming those that have
            not.
    """
    if rank:
        word = _join(store, rank, world, rank_timeout_s, alive)
        absent = str(store.get(f"{word}/absent"), "ascii")
        store.add(f"{word}/told", 1)
    else:
        word = f"meshwright/{uuid.uuid4().hex}"
        absent = _gather(store, word, world, rank_timeout_s, alive)
    if not absent:
        return word
    missing = [int(number) for number in absent.split(",")]
    raise _missing(missing, world, rank_timeout_s)


def _missing(ranks: Sequence[int], world: int, silence_s: float) -> RankFailedError:
    them, their = ("it", "its") if len(ranks) == 1 else ("them", "their")
    return RankFailedError(
        f"{name_ranks(ranks, world)} did not start: no sign of {them} within "
        f"{silence_s:g} s of the last rank that came; see {their} output, {_PATIENCE}"
    )


def _join(
    store: Store,
    rank: int,
    world: int,
    rank_timeout_s: float,
    alive: Callable[[], None],
) -> str:
    """Find rank 0's word and wait until it has told who is there."""
    token = uuid.uuid4().hex
    store.set(f"meshwright/rank/{rank}", token)
    come = store.add("meshwright/come", 1)
    wanted, word, pause = f"meshwright/answer/{token}", "", _POLL_S
    patience = rank_timeout_s
    last = time.monotonic()
    while True:
        alive()
        if store.check([wanted]):
            if word:
                return word
            word = str(store.get(wanted), "ascii")
            store.set(beat_key(word, rank), "0")
            # From here on rank 0 decides.
            wanted, pause = f"{word}/absent", _POLL_S
            patience = (1 + _SLACK) * rank_timeout_s
            last = time.monotonic()
            continue
        now, count = time.monotonic(), store.add("meshwright/come", 0)
        if count != come:
            come, last = count, now
        if now - last > patience:
            raise _missing([0], world, patience)
        time.sleep(pause)
        # Thousands of ranks share one store.
        pause = min(2 * pause, 0.5)


def _gather(
    store: Store,
    word: str,
    world: int,
    rank_timeout_s: float,
    alive: Callable[[], None],
) -> str:
    """Answer every rank until all have come; the numbers of those that have not."""
    store.set(beat_key(word, 0), "0")
    store.add("meshwright/come", 1)
    absent, answered = set(range(1, world)), set()
    last = time.monotonic()
    while absent and time.monotonic() - last <= rank_timeout_s:
        alive()
        for other in sorted(absent):
            key = f"meshwright/rank/{other}"
            token = str(store.get(key), "ascii") if store.check([key]) else None
            if token is not None and token not in answered:
                store.set(f"meshwright/answer/{token}", word)
                answered.add(token)
            if token is not None and store.check([beat_key(word, other)]):
                absent.remove(other)
                last = time.monotonic()
        time.sleep(_POLL_S)
    text = ",".join(map(str, sorted(absent)))
    store.set(f"{word}/absent", text)
    if absent:
        # The store may end with this process: first the others are to have read it.
        others = world - 1 - len(absent)
        deadline = time.monotonic() + _SLACK * rank_timeout_s
        while store.add(f"{word}/told", 0) < others and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    return text


def beat_key(word: str, rank: int) -> str:
    """Key under which a rank gives signs of life, the first one as it comes."""
    return f"{word}/beat/{rank}"


def here_key(rank: int) -> str:
    """Key of the token of the newest process of a rank, below ``REPLICAS_PREFIX``."""
    return f"here/{rank}"


def hung_key(rank: int) -> str:
    """Key of why others went on without a rank, below ``REPLICAS_PREFIX``."""
    return f"hung/{rank}"


def name_ranks(ranks: Iterable[int], world: int) -> str:
    """Return ``rank 2 of 4``, or ``ranks 2, 3 of 4``; the first few of many."""
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:_NAMED]))
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}{more} of {world}"
