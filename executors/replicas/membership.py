"""Agreement of replicas on who takes part in an exchange.

Where a plan goes on without replicas that die, each replica has a process group of its
own. Replicas meet at exchanges alone, through a store that outlives them:

1. Each tells that it has come to the exchange. When all have come, but for those that
   are gone, the first to see it writes down who takes part; all others read that.
2. These exchange their messages, over a new group if they are others than before. Each
   votes that it has received all, or that it has not; results are used if all have.
   Otherwise nothing was changed, and they begin again with step 1.
3. Replicas that wait to join are written down in step 1, too. They take the state that
   the exchange has left from the first member, and are members from then on.

A replica is gone if its process has ended or was started again, as the launcher tells,
if it gave no sign of life for ``silence_s``, or if the others have waited for it at an
exchange for ``timeout_s``. One that was taken for gone, but was not, ends itself when
it finds that the others went on without it.
"""

from __future__ import annotations

import datetime
import itertools
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial, wraps
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from executors.launching.process_group import ranks_of_processes
from executors.launching.rendezvous import (
    ENDED,
    Meeting,
    here_key,
    hung_key,
    name_ranks,
    open_store,
)
from executors.replicas.groups import Group, Task
from planner.errors import ExecutionError, RankFailedError

__all__ = ["Exchange", "Membership", "open_membership"]

_LOG = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Given = ParamSpec("_Given")
#: Longest time between two signs of life, and pause of those who wait, in seconds.
_INTERVAL_S, _POLL_S = 1.0, 0.01
#: Failures of one exchange, one after the other, with nobody gone.
_ATTEMPTS = 3
_DONE, _FAILED = "done", "failed: "
_STORE_GONE = (
    "the store by which replicas agree has gone: the process that holds it, rank 0 or "
    "the launcher, has ended or hangs; start all replicas again"
)


def _names_the_store(method: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Method whose errors of the store, of which gloo's are no part, say what to do."""

    @wraps(method)
    def call(*args: _Given.args, **options: _Given.kwargs) -> _Result:
        try:
            return method(*args, **options)
        except ExecutionError:
            raise
        except RuntimeError as error:
            raise RankFailedError(_STORE_GONE) from error

    return call


class Exchange(Generic[_Result]):
    """An exchange that is under way.

    Args:
        membership: Of its replicas.
        task: What does it.
    """

    def __init__(
        self, membership: Membership, task: Task[tuple[_View, _Result]]
    ) -> None:
        self._membership, self._task = membership, task

    def wait(self) -> _Result:
        """Return the result, which all members have.

        Raises:
            RankFailedError: If the others went on without this replica, the exchange
                failed again and again, or the store has gone.
        """
        while not self._task.join(0.05):
            self._membership.require_store()
        if self._task.error is not None:
            raise self._task.error
        view, result = self._task.results[0]
        self._membership.owed = view if view.joiners else None
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """Replicas that take part in an exchange, and those that join after it.

    A replica is a number, and a token that a process has drawn: a process that is
    started again is another replica of the same number.
    """

    members: Mapping[int, str]
    joiners: Mapping[int, str] = field(default_factory=dict)
    #: Reasons for which members of the exchange before do not take part.
    gone: Mapping[int, str] = field(default_factory=dict)

    @property
    def next(self) -> dict[int, str]:
        """Members of the next exchange."""
        return dict(sorted((dict(self.members) | dict(self.joiners)).items()))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> _View:
        found = {
            name: {int(number): value for number, value in some.items()}
            for name, some in json.loads(text).items()
        }
        return cls(**found)


class Membership:
    """One replica of a run that goes on without those that die.

    Args:
        meeting: Store of all replicas, which outlives them.
        rank: Number of this process, and so of this replica.
        world: Number of replicas that the plan has.
        copy: Number of the replica on the plan's mesh, which its samples go by.
        numbers: Of the processes that stand for replicas; None for all.
        fewest: Replicas that go on at least: fewer wait at an exchange, ``timeout_s``
            at most, until another is there to join them.
        silence_s: Silence after which a replica is gone, in seconds.
        timeout_s: Longest wait for a replica that gives signs of life, in seconds.
    """

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        world: int,
        *,
        copy: int,
        numbers: Sequence[int] | None = None,
        fewest: int = 1,
        silence_s: float,
        timeout_s: float,
    ) -> None:
        self.rank, self.world, self.copy = rank, world, copy
        self._numbers = tuple(range(world) if numbers is None else numbers)
        self._fewest = fewest
        self._silence_s, self._timeout_s = silence_s, timeout_s
        self._is_host = meeting.is_host
        # Operations wait for each other on one connection.
        self._store, self._beats = _clone(meeting.store), _clone(meeting.store)
        self._interval_s = min(_INTERVAL_S, silence_s / 10)
        self._token = uuid.uuid4().hex
        self._members: dict[int, str] = {}
        #: Last exchange, if its first member owes its state to some that join.
        self.owed: _View | None = None
        self._group: tuple[Mapping[int, str], Group] | None = None
        #: Newest token of each number; last words of each token, and when it moved.
        self._newest: dict[int, str] = {}
        self._said: dict[str, str] = {}
        self._moved: dict[str, float] = {}
        self._polled = self._answered = time.monotonic()
        self._words = ""
        self._lost: Exception | None = None
        self._wake, self._over = threading.Event(), threading.Event()
        self._told = threading.Event()
        #: True if the run has begun before this process came.
        self.joins = False

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the replicas that the next exchange waits for."""
        return tuple(self._members)

    # -- Start and end -----------------------------------------------------------------

    @contextmanager
    def active(self) -> Iterator[Membership]:
        """Give signs of life for a block, and find the others at its beginning.

        Raises:
            RankFailedError: If replicas do not come, and the run has not begun: which.
        """
        self._come()
        beat = threading.Thread(target=self._beat, name="membership", daemon=True)
        beat.start()
        try:
            self._meet()
            yield self
        except BaseException as error:
            said = str(error).partition("\n")[0]
            self._say(f"{_FAILED}{type(error).__name__}: {said}")
            if isinstance(error, Exception):
                self._outlast_others()
            raise
        else:
            self._say(_DONE)
            self._outlast_others()
        finally:
            self._over.set()
            self._wake.set()

    def _come(self) -> None:
        """Write down this process as the newest of its number."""
        self._store.set(f"beat/{self._token}", "0")
        self._store.set(here_key(self.rank), self._token)

    @_names_the_store
    def _meet(self) -> None:
        """Wait for all replicas, unless the run has begun without this process."""
        text = self._read("quorum")
        last, found = time.monotonic(), {self.rank: self._token}
        while text is None:
            for number in self._numbers:
                token = self._read(here_key(number))
                if token not in {None, ENDED, found.get(number)}:
                    found[number], last = token, time.monotonic()
            late = time.monotonic() - last > self._silence_s
            if late or len(found) == len(self._numbers):
                missing = [n for n in self._numbers if n not in found]
                gone = dict.fromkeys(missing, "it did not start")
                text = self._decide("quorum", _View(members=found, gone=gone).to_json())
            time.sleep(_POLL_S)
            text = text or self._read("quorum")
        view = _View.from_json(text)
        if view.gone:
            if self._is_host:
                # The store may end with this process: first the others are to read it.
                time.sleep(self._interval_s)
            raise RankFailedError(
                f"{name_ranks(view.gone, self.world)} did not start within "
                f"{self._silence_s:g} s of the last rank that came; see the output "
                f"there, or allow more time with rank_timeout_s (--rank-timeout-s)"
            )
        # The others may have seen this process before it looked.
        self.joins = view.members.get(self.rank) != self._token
        if self.joins:
            return
        self._adopt(view.members)
        self._store.set("latest", view.to_json())

    def _outlast_others(self) -> None:
        """Hold the store, if it ends with this process, until nobody needs it."""
        while self._is_host and self._lost is None:
            latest = self._read("latest")
            if latest is not None:
                self._adopt(_View.from_json(latest).members)
            if all(self._is_gone(n) for n in self._members if n != self.rank):
                return
            self._wake.set()
            time.sleep(self._interval_s / 4)

    # -- Signs of life -----------------------------------------------------------------

    def _say(self, words: str) -> None:
        self._words = words
        self._told.clear()
        self._wake.set()
        self._told.wait(2 * self._interval_s)

    def _beat(self) -> None:
        """Write this replica's sign and read the others', until the run is over."""
        try:
            for count in itertools.count(1):
                words = self._words
                self._beats.set(f"beat/{self._token}", words or str(count))
                self._poll()
                if words:
                    self._told.set()
                if self._over.is_set():
                    return
                self._wake.wait(self._interval_s)
                self._wake.clear()
        except RuntimeError as error:
            self._lost = error
            self._told.set()

    def _poll(self) -> None:
        now = time.monotonic()
        if now - self._polled > self._silence_s / 3:
            # This process itself was stopped: it has heard nobody meanwhile.
            self._moved = dict.fromkeys(self._moved, now)
        members = dict(self._members)
        tokens = list(members.values())
        signs = self._read_all(f"beat/{token}" for token in tokens)
        for token, said in zip(tokens, signs, strict=True):
            if said != self._said.get(token):
                self._said[token], self._moved[token] = said, now
        numbers = [*members, self.rank]
        found = self._read_all(map(here_key, numbers))
        self._newest = dict(zip(numbers, found, strict=True))
        if self._newest[self.rank] == ENDED:
            # Told late of the process before this one.
            self._beats.set(here_key(self.rank), self._token)
        self._polled = self._answered = time.monotonic()

    def _read_all(self, keys: Iterable[str]) -> list[str]:
        return [str(value, "utf-8") for value in self._beats.multi_get(list(keys))]

    def require_store(self) -> None:
        """Raise if the store has gone, or does not answer.

        Raises:
            RankFailedError: If so.
        """
        now = time.monotonic()
        silent = now - self._answered > self._silence_s + self._interval_s
        if self._lost is not None or (silent and self._holds_still(now)):
            raise RankFailedError(_STORE_GONE) from self._lost

    def _holds_still(self, now: float) -> bool:
        """Return True if this process was not stopped itself."""
        before, self._polled = self._polled, now
        return now - before < self._silence_s / 3

    def is_gone(self, number: int) -> bool:
        """Return True if a replica is not waited for any more."""
        return self._is_gone(number)

    def _is_gone(self, number: int, token: str = "") -> bool:
        return self._why_gone(number, token) is not None

    def _why_gone(self, number: int, token: str = "") -> str | None:
        """Reason for which a replica is not waited for; None if it is there."""
        token = token or self._members.get(number, "")
        if token == self._token:
            return None
        newest = self._newest.get(number, token)
        if newest == ENDED:
            return "its process ended"
        if newest != token:
            return "it was started again"
        said = self._said.get(token, "")
        if said.startswith(_FAILED):
            return f"it raised {said.removeprefix(_FAILED)}"
        if said == _DONE:
            return "it is done"
        now = time.monotonic()
        heard = now - self._polled < self._silence_s / 3
        if heard and now - self._moved.setdefault(token, now) > self._silence_s:
            return f"it gave no sign of life for {self._silence_s:g} s"
        return None

    # -- Exchanges ---------------------------------------------------------------------

    def begin(self, number: int, work: Callable[[Group], _Result]) -> Exchange[_Result]:
        """Begin an exchange among the replicas that there are.

        Args:
            number: Of the exchange, from 1; equal on all replicas.
            work: Sends and receives over a group, and changes nothing that a second
                call with another group would need.
        """
        return Exchange(self, Task(partial(self._exchange, number, work)))

    @_names_the_store
    def _exchange(
        self, number: int, work: Callable[[Group], _Result]
    ) -> tuple[_View, _Result]:
        failures = 0
        for attempt in itertools.count():
            key = f"{number}.{attempt}"
            view = self._assemble(key, number)
            before = self._members
            # Those who are not in it are not waited for again.
            self._adopt(view.members)
            task = Task(partial(self._attempt, key, view, work))
            if self._agree(key, view, task):
                group, result = task.results[0]
                self._group = (view.members, group)
                self._adopt(view.next)
                self._store.set("latest", _View(members=view.next).to_json())
                for token in view.joiners.values():
                    self._store.set(f"admitted/{token}", view.to_json())
                return view, result
            self._group = None
            failures = failures + 1 if before == self._members else 1
            if failures == _ATTEMPTS:
                raise RankFailedError(
                    f"exchange {number} among {name_ranks(self.members, self.world)} "
                    f"failed {failures} times; see the network between them"
                ) from task.error
        raise AssertionError("attempts are endless")

    def _assemble(self, key: str, number: int) -> _View:
        """Come to an exchange; return who takes part, as all others find it too."""
        self._store.set(f"{key}/at/{self.rank}", self._token)
        since = time.monotonic()
        while (text := self._read(f"{key}/members")) is None:
            late = time.monotonic() - since > self._timeout_s
            view = self._proposal(key, late=late)
            if view is not None and len(view.next) >= self._fewest:
                text = self._decide(f"{key}/members", view.to_json())
                break
            if view is not None and late:
                raise RankFailedError(
                    f"{name_ranks(view.next, self.world)} waited {self._timeout_s:g} s "
                    f"for others at exchange {number}, but min_replicas="
                    f"{self._fewest} are to go on; see why the others ended"
                )
            time.sleep(_POLL_S)
        view = _View.from_json(text)
        if view.members.get(self.rank) != self._token:
            reason = view.gone.get(self.rank, "it was taken for gone before")
            raise RankFailedError(
                f"the others went on without {name_ranks([self.rank], self.world)} at "
                f"exchange {number}: {reason}; start it again and it joins them"
            )
        for other, reason in view.gone.items():
            who = name_ranks([other], self.world)
            if self._newest.get(other) == self._members.get(other):
                # Its process may live; the launcher ends it.
                self._store.set(hung_key(other), reason)
            _LOG.warning("going on without %s: %s", who, reason)
        return view

    def _proposal(self, key: str, *, late: bool) -> _View | None:
        """Who could take part in an exchange; None if others are to be waited for."""
        others = {n for n in self._members if n != self.rank}
        come = {n for n in others if self._read(f"{key}/at/{n}") is not None}
        gone = {n: self._why_gone(n) for n in others}
        if not late and any(gone[n] is None for n in others - come):
            return None
        here = sorted({self.rank, *(n for n in come if gone[n] is None)})
        return _View(
            members={n: self._members[n] for n in here},
            joiners=self._waiting(here),
            gone={
                n: gone[n] or "it did not come to the exchange"
                for n in sorted(others - set(here))
            },
        )

    def _waiting(self, here: Sequence[int]) -> dict[int, str]:
        """Replicas that wait to join."""
        found = {}
        for number in self._numbers:
            token = self._read(f"wants/{number}")
            if number not in here and token and token == self._read(here_key(number)):
                found[number] = token
        return found

    def _attempt(
        self, key: str, view: _View, work: Callable[[Group], _Result]
    ) -> tuple[Group, _Result]:
        """Do the work over the members' group: the last one, if they are the same."""
        if self._group is not None and self._group[0] == view.members:
            return self._group[1], work(self._group[1])
        order = sorted(view.members)
        store = PrefixStore(f"{key}/group", _clone(self._store))
        index = order.index(self.rank)
        group = Group(store, index, len(order), self._timeout_s)
        return group, work(group)

    def _agree(self, key: str, view: _View, task: Task[Any]) -> bool:
        """Wait until all members have their results; False if one will not."""
        outcome, voted = f"{key}/outcome", False
        others = [n for n in view.members if n != self.rank]
        while (found := self._read(outcome)) is None:
            if not voted and task.join(_POLL_S):
                voted = True
                if task.error is not None:
                    _LOG.info("an exchange failed", exc_info=task.error)
                    found = self._decide(outcome, "again")
                    break
                self._store.set(f"{key}/has/{self.rank}", "1")
            waits = [n for n in others if self._read(f"{key}/has/{n}") is None]
            if any(self._is_gone(n) for n in waits):
                found = self._decide(outcome, "again")
                break
            if voted and not waits:
                found = self._decide(outcome, "use")
                break
            time.sleep(_POLL_S if voted else 0)
        return found == "use"

    # -- Joining -----------------------------------------------------------------------

    def admit(self, pack: Callable[[], torch.Tensor]) -> None:
        """Give the state after an exchange to those that join at it.

        Called by all members behind each exchange; only the first of them sends.

        Args:
            pack: Returns the state as bytes. Shape [n], of dtype uint8.
        """
        view, self.owed = self.owed, None
        if view is None:
            return
        _LOG.info("%s joined", name_ranks(view.joiners, self.world))
        if self.rank != min(view.members):
            return
        state = pack()
        for number, token in view.joiners.items():
            group = f"state/{token}"
            task = Task(partial(self._send, group, state))
            while not task.join(0.05):
                if self._is_gone(number, token):
                    break
            if not task.over or task.error is not None:
                # It asks again, or is gone.
                _LOG.warning(
                    "%s did not take its state",
                    name_ranks([number], self.world),
                    exc_info=task.error,
                )

    def _send(self, name: str, state: torch.Tensor) -> None:
        self._pair(name, 0).send(state)

    def _receive(self, name: str) -> torch.Tensor:
        return self._pair(name, 1).receive()

    def _pair(self, name: str, index: int) -> Group:
        store = PrefixStore(name, _clone(self._store))
        return Group(store, index, 2, self._timeout_s)

    @_names_the_store
    def join(self) -> torch.Tensor:
        """Wait to be admitted to a run; return the state of a member.

        Returns:
            What its ``pack`` returned; see :meth:`admit`.

        Raises:
            RankFailedError: If the run ends before.
        """
        while True:
            self._store.set(f"wants/{self.rank}", self._token)
            view = self._await_admission()
            source = min(view.members)
            name = f"state/{self._token}"
            task = Task(partial(self._receive, name))
            while not task.join(0.05) and not self._is_gone(source):
                self.require_store()
            if task.over and task.error is None:
                self._adopt(view.next)
                return task.results[0]
            # The others take the replica of this token for gone, once there is another.
            self._token = uuid.uuid4().hex
            self._come()

    def _await_admission(self) -> _View:
        while (text := self._read(f"admitted/{self._token}")) is None:
            latest = self._read("latest")
            if latest is not None:
                self._adopt(_View.from_json(latest).members)
            self.require_store()
            if self._members and all(self._is_gone(n) for n in self._members):
                raise RankFailedError(
                    f"{name_ranks([self.rank], self.world)} found no replica to join: "
                    f"the run has ended, or all others are gone"
                )
            time.sleep(5 * _POLL_S)
        view = _View.from_json(text)
        self._adopt(view.members)
        return view

    # -- The store ---------------------------------------------------------------------

    def _adopt(self, members: Mapping[int, str]) -> None:
        now = time.monotonic()
        for number, token in members.items():
            self._moved.setdefault(token, now)
            if self._members.get(number) != token:
                # What was read of the process before it says nothing of this one.
                self._newest[number] = token
        self._members = dict(members)

    def _read(self, key: str) -> str | None:
        if not self._store.check([key]):
            return None
        return str(self._store.get(key), "utf-8")

    def _decide(self, key: str, value: str) -> str:
        """Write a value unless there is one; return the one that there is then."""
        return str(self._store.compare_set(key, "", value), "utf-8")


def _clone(store: Store) -> Store:
    """The same store over a connection of its own, which nobody else waits on."""
    cloned: Store = store.clone()  # type: ignore[attr-defined]
    return cloned


@contextmanager
def open_membership(
    rank: int,
    world: int,
    device_ids: Sequence[int],
    *,
    fewest: int = 1,
    silence_s: float,
    timeout_s: float,
) -> Iterator[Membership]:
    """Membership of this process for the block.

    Args:
        rank: Number of this process.
        world: Number of processes, each of them a replica.
        device_ids: Device id of every rank; () if processes are in their order.
        fewest: See :class:`Membership`.
        silence_s: The same.
        timeout_s: The same.

    Raises:
        ExecutionError: If a process group exists already, or the number of processes
            is wrong.
        RankFailedError: If other replicas do not come.
    """
    if dist.is_initialized():
        raise ExecutionError(
            "on_failure=continue under a process group that exists already, which ends "
            "with each of its ranks; use meshwright run, or on_failure=stop"
        )
    ranks = ranks_of_processes(device_ids) or tuple(range(world))
    if len(ranks) != world:
        raise ExecutionError(
            f"{world} processes were started, the plan has {len(ranks)} replicas; "
            f"start one process a replica"
        )
    timeout = datetime.timedelta(seconds=timeout_s)
    meeting = open_store(rank, world, rank_timeout_s=silence_s, timeout=timeout)
    membership = Membership(
        meeting,
        rank,
        world,
        copy=ranks[rank],
        fewest=fewest,
        silence_s=silence_s,
        timeout_s=timeout_s,
    )
    with membership.active():
        yield membership
