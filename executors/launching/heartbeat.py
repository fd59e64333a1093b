"""Signs of life that ranks give each other while they train.

Without them a rank that is lost (its machine is off, its process stopped) is waited for
until a collective times out, after minutes, with an error that names no rank. Every
rank writes a counter to the store of the group; rank 0 reads those of all, the others
read rank 0's. When one has not moved for ``rank_timeout_s`` every rank ends with its
name: by ``os._exit``, because nothing interrupts a collective of gloo.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Collection, Iterable
from types import TracebackType
from typing import NoReturn, Self

from torch.distributed import Store  # type: ignore[attr-defined]

from executors.exception_chain import explain, is_consequence
from executors.launching.rendezvous import Meeting, name_ranks
from planner.errors import RankFailedError

__all__ = ["Heartbeat"]

#: Longest time between two signs, in seconds.
_INTERVAL_S = 1.0
_DONE, _FAILED, _VICTIM = "done", "failed: ", "victim"
_LOST = "lost"

_LOG = logging.getLogger(__name__)


class Heartbeat:
    """Gives signs of life for a block and watches those of the other ranks.

    Args:
        meeting: Of the ranks.
        rank: Number of this process.
        world: Number of processes.
        rank_timeout_s: Silence after which a rank is lost, in seconds.

    Raises:
        RankFailedError: At the end of the block, in place of an error that another
            rank's failure caused ("connection closed by peer"): which rank, and why.
    """

    def __init__(
        self, meeting: Meeting, rank: int, world: int, rank_timeout_s: float
    ) -> None:
        self._rank, self._world, self._timeout_s = rank, world, rank_timeout_s
        self._is_host = meeting.is_host
        self._store = _clone(meeting.store)
        self._interval_s = min(_INTERVAL_S, rank_timeout_s / 10)
        now = time.monotonic()
        self._states = dict.fromkeys(range(world), "")
        self._moved = dict.fromkeys(range(world), now)
        self._answered = now
        #: What this rank tells in place of its counter.
        self._last_words = ""
        self._told = threading.Event()
        self._wake, self._over = threading.Event(), threading.Event()
        self._gone = threading.Event()

    def __enter__(self) -> Self:
        for work in (self._beat, self._watch):
            threading.Thread(target=work, name="heartbeat", daemon=True).start()
        return self

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank has failed, before it closes connections."""
        if is_consequence(error):
            self._say(_VICTIM)
        else:
            said = ": ".join(filter(None, (type(error).__name__, explain(error))))
            self._say(f"{_FAILED}{said}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._say(_DONE)
                if self._is_host:
                    # The store ends with this process.
                    self._wait_for_others()
            elif isinstance(error, Exception) and is_consequence(error):
                cause = self._find_cause()
                if cause is not None:
                    raise RankFailedError(cause) from error
        finally:
            self._over.set()
            self._wake.set()

    def _say(self, words: str) -> None:
        self._last_words = words
        self._told.clear()
        self._wake.set()
        self._told.wait(2 * self._interval_s)

    def _wait_for_others(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline and not all(map(_ended, self._others())):
            time.sleep(0.01)
            self._wake.set()

    def _others(self) -> list[str]:
        return [said for rank, said in self._states.items() if rank != self._rank]

    def _find_cause(self) -> str | None:
        """Find out whose failure caused this rank's; None if nobody else's."""
        begin = time.monotonic()
        while time.monotonic() < begin + 4 * self._interval_s:
            raised = self._raised(self._states)
            if raised is not None:
                return raised
            if self._gone.wait(self._interval_s / 4):
                break
        if self._answered < begin or self._gone.is_set():
            return f"{self._host()} has ended or hangs; see its output"
        silent = [
            rank
            for rank, moved in self._moved.items()
            if moved < begin and rank != self._rank and not _ended(self._states[rank])
        ]
        if silent:
            who = name_ranks(silent, self._world)
            return f"{who} ended or stopped without an error; see the output there"
        going = [r for r, said in self._states.items() if said and not _ended(said)]
        if going:
            who = name_ranks(going, self._world)
            return f"{who} did not take part in a collective, but did not fail either"
        return None

    def _host(self) -> str:
        """Who holds the store, in words."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return "torchrun's store"
        return name_ranks([0], self._world)

    def _beat(self) -> None:
        """Write this rank's sign and read the others', until the block is over."""
        count = 0
        try:
            while not self._over.is_set():
                count += 1
                words = self._last_words
                self._store.set(f"beat/{self._rank}", words or str(count))
                self._read(all_ranks=self._rank == 0 or bool(words))
                self._answered = time.monotonic()
                if words:
                    self._told.set()
                self._wake.wait(self._interval_s)
                self._wake.clear()
        except RuntimeError:
            # Whoever holds the store has ended; the watch counts how long ago.
            self._gone.set()
            self._told.set()

    def _read(self, *, all_ranks: bool) -> None:
        ranks = range(self._world) if all_ranks else (0,)
        found = self._store.multi_get([f"beat/{rank}" for rank in ranks])
        now = time.monotonic()
        for rank, value in zip(ranks, found, strict=True):
            said = str(value, "utf-8")
            if said != self._states[rank]:
                self._states[rank], self._moved[rank] = said, now
        if self._rank and not self._over.is_set() and self._store.check([_LOST]):
            text = str(self._store.get(_LOST), "utf-8")
            self._store.add(f"{_LOST}/told", 1)
            self._give_up(text)

    def _watch(self) -> None:
        """End this process when another is silent for too long."""
        before = time.monotonic()
        while not self._over.wait(self._interval_s):
            now = time.monotonic()
            if now - before > self._timeout_s / 3:
                # This process itself was stopped: it has heard nobody meanwhile.
                self._answered = now
                self._moved = dict.fromkeys(self._moved, now)
            before = now
            if now - self._answered > self._timeout_s:
                if self._states[0] != _DONE:
                    self._give_up(self._silent(self._host()))
                return
            lost = [
                rank
                for rank in (range(1, self._world) if self._rank == 0 else (0,))
                if now - self._moved[rank] > self._timeout_s
                and self._states[rank] not in {_DONE, _VICTIM}
            ]
            if lost:
                text = self._raised(lost) or self._silent(name_ranks(lost, self._world))
                if self._rank == 0:
                    self._tell(text, lost)
                self._give_up(text)

    def _raised(self, ranks: Iterable[int]) -> str | None:
        """Return the error of the first of some ranks that has failed, if one has."""
        for rank in ranks:
            if self._states[rank].startswith(_FAILED):
                reason = self._states[rank].removeprefix(_FAILED)
                return f"{name_ranks([rank], self._world)} raised {reason}"
        return None

    def _silent(self, who: str) -> str:
        return (
            f"{who} gave no sign of life for {self._timeout_s:g} s: it was stopped, or "
            f"its machine or network was lost; resume from the last checkpoint"
        )

    def _tell(self, text: str, lost: Collection[int]) -> None:
        """Let all ranks that are left end with the same words, and wait for them.

        The store may end with this process.
        """
        left = [
            rank
            for rank, said in self._states.items()
            if rank not in {self._rank, *lost} and not _ended(said)
        ]
        deadline = time.monotonic() + self._timeout_s
        try:
            store = _clone(self._store)
            store.set(_LOST, text)
            while store.add(f"{_LOST}/told", 0) < len(left):
                if time.monotonic() > deadline:
                    return
                time.sleep(self._interval_s / 4)
        except RuntimeError:
            _LOG.debug("the store is gone", exc_info=True)

    def _give_up(self, text: str) -> NoReturn:
        sys.stderr.write(f"meshwright: {text}\n")
        sys.stderr.flush()
        os._exit(1)


def _ended(said: str) -> bool:
    return said in {_DONE, _VICTIM} or said.startswith(_FAILED)


def _clone(store: Store) -> Store:
    """The same store over a connection of its own, which nobody else waits on."""
    cloned: Store = store.clone()  # type: ignore[attr-defined]
    return cloned
