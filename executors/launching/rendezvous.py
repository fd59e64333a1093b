"""A store of keys that no earlier attempt of torchrun has written to.

torchrun keeps one store through all its restarts (torch 2.13). A restarted rank may
then read there at which address a peer listened that was killed, and fails to connect,
as in two of three restarts tried. Its count of restarts does not tell attempts apart:
each node has its own. Source: github.com/pytorch/pytorch/issues/135712.
"""

from __future__ import annotations

import datetime
import os
import time
import uuid

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from planner.errors import ExecutionError

__all__ = ["agree", "fresh_store"]

_POLL_S = 0.02


def fresh_store(timeout: datetime.timedelta) -> Store | None:
    """A store for the ranks of this attempt; None where any store is fresh.

    Args:
        timeout: How long to wait for the other ranks.

    Raises:
        ExecutionError: If they do not come in time.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        is_master=False,
        timeout=timeout,
    )
    return PrefixStore(agree(store, rank, world, timeout), store)


def agree(store: Store, rank: int, world: int, timeout: datetime.timedelta) -> str:
    """A word that the living ranks have in common, and dead ones never heard.

    Every rank leaves a token of its own; rank 0 answers each token that it sees, those
    of the dead too, until as many have heard the answer as there are others.

    Raises:
        ExecutionError: On rank 0, if they do not come in time.
    """
    if rank != 0:
        token = uuid.uuid4().hex
        store.set(f"meshwright/rank/{rank}", token)
        word = str(store.get(f"meshwright/answer/{token}"), "ascii")
        store.add(f"{word}/heard", 1)
        return word
    word, answered = f"meshwright/{uuid.uuid4().hex}", set()
    deadline = time.monotonic() + timeout.total_seconds()
    while (heard := store.add(f"{word}/heard", 0)) < world - 1:
        for other in range(1, world):
            key = f"meshwright/rank/{other}"
            said = str(store.get(key), "ascii") if store.check([key]) else None
            if said is not None and said not in answered:
                store.set(f"meshwright/answer/{said}", word)
                answered.add(said)
        if time.monotonic() > deadline:
            raise ExecutionError(
                f"{heard + 1} of {world} ranks came within {timeout.total_seconds():g} "
                f"s; look why the others did not start"
            )
        time.sleep(_POLL_S)
    return word
