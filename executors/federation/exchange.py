"""Exchanges between members, in which a member takes part as a whole or not at all.

One process of each member leads it: leaders agree on who takes part, as replicas of one
process do (:mod:`executors.replicas.membership`). An attempt of an exchange is

1. leaders tell each other their members, and draw a name for the attempt's rings;
2. each leader writes an order for its followers, the other processes of its member;
3. owners of the same weights average them around rings, one a distinct tuple of owners;
4. followers tell their leader that they have the mean; leaders vote.

If all have it, the next order is to use it; else the next one begins another attempt
with the same values, which nothing has changed. A member that joins gets the state of
one that trains in rings of the two, as bits to which it adds zero.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from executors.federation.weights import MemberWeights
from executors.launching.rendezvous import ENDED, here_key
from executors.replicas.groups import Group, Task
from executors.replicas.membership import Membership
from executors.replicas.pieces import local_part
from planner.errors import RankFailedError
from planner.schema import Federation
from planner.schema.federation import rings_of

__all__ = ["Joined", "MemberExchange", "Place"]

_LOG = logging.getLogger(__name__)

#: Pause between two looks at the store, in seconds.
_POLL_S = 0.01
#: A process whose end the launcher told so long ago, and that said nothing since, has
#: ended; one that was started again says so at once.
_ENDED_S = 3.0
#: Integers of the same size as a value, whose sums with zero keep every bit.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Values = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place of this process in a federation.

    Attributes:
        federation: All members.
        member: Number of its member.
        process: Number of this process in the whole run.
        rank: Its rank in the member.
        leader: Number of the process that leads the member.
        followers: Numbers of the others.
    """

    federation: Federation
    member: int
    process: int
    rank: int
    leader: int
    followers: tuple[int, ...]

    @property
    def leads(self) -> bool:
        """True if this process leads its member."""
        return self.process == self.leader


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """State that a member got as it joined.

    Attributes:
        done: Steps done.
        kept: By kind (``weights``, ``global``, ``momentum``), what this rank owns.
    """

    done: int
    kept: Mapping[str, Values]


@dataclass(kw_only=True)
class _Rings:
    """Rings of some members that this process is in.

    Attributes:
        name: Of the attempt that made them.
        members: Numbers of the members.
        rings: A group, and the weights that go around it.
    """

    name: int
    members: tuple[int, ...]
    rings: list[tuple[Group, tuple[str, ...]]]


class MemberExchange:
    """Exchanges of one process.

    Args:
        place: Of this process.
        weights: Of its member.
        store: That all processes see.
        own: That the processes of this attempt of the member alone see.
        membership: Agreement with the other members' leaders; None for followers.
        timeout_s: Longest that a message may take, in seconds.
    """

    def __init__(
        self,
        place: Place,
        weights: MemberWeights,
        *,
        store: Store,
        own: Store,
        membership: Membership | None,
        timeout_s: float,
    ) -> None:
        self._place, self.weights = place, weights
        self._store, self._own = _clone(store), _clone(own)
        self._membership, self._timeout_s = membership, timeout_s
        self._orders = 0
        self._rings: _Rings | None = None
        self._joining: _Rings | None = None
        #: Attempts so far; one that was left behind changes nothing any more.
        self._attempts = 0
        self._ended: dict[int, float] = {}
        self._token = uuid.uuid4().hex
        #: Members that took part in the last exchange.
        self.members: tuple[int, ...] = (place.member,)
        #: Bytes that this process sent in exchanges so far.
        self.sent_bytes = 0
        if place.leads:
            owners = json.dumps([weights.owners[name] for name in weights.names])
            self._store.set(f"owners/{place.member}", owners)
        else:
            self._store.set(here_key(place.process), self._token)

    # -- Beginning ---------------------------------------------------------------------

    def begin(self, kinds: Sequence[str]) -> Joined | None:
        """Find out whether the run has begun before; then take its state.

        Args:
            kinds: Of state that members keep.

        Returns:
            None if the run begins now.
        """
        order: dict[str, Any]
        if self._membership is not None:
            order = {"joins": self._membership.joins}
            if self._membership.joins:
                packed = self._membership.join()
                order |= json.loads(packed.numpy().tobytes())
            self._give(order)
        else:
            order = self._next_order()
        if not order["joins"]:
            return None
        kept = self._take_state(order, kinds)
        return Joined(done=order["done"], kept=kept)

    def _take_state(
        self, order: Mapping[str, Any], kinds: Sequence[str]
    ) -> dict[str, Values]:
        like = self.weights.whole(local_part)
        kept: dict[str, Values] = {}
        for kind in kinds:
            none = {name: torch.zeros_like(_bits(one)) for name, one in like.items()}
            bits = self._pass_bits(order, none)
            kept[kind] = {
                name: one.view(like[name].dtype) for name, one in bits.items()
            }
        return kept

    # -- An exchange -------------------------------------------------------------------

    def mean(self, number: int, values: Values) -> tuple[Values, dict[str, Any]]:
        """Average values over the members that there are.

        Args:
            number: Of the exchange, from 1.
            values: Of the weights that this rank owns.

        Returns:
            The mean, weighted as the federation says; and the order that all processes
            of the member have, for :meth:`admit`.

        Raises:
            RankFailedError: If the others went on without this member, or a process of
                it has ended.
        """
        if self._membership is None:
            return self._follow(values)
        work = partial(self._lead, values)
        found = self._membership.begin(number, work).wait()
        order: dict[str, Any] = {"do": "use"}
        view = self._membership.owed
        if view is not None and min(view.members) == self._place.process:
            order |= {
                "source": self._place.member,
                "joiners": [self._member_of(process) for process in view.joiners],
                "name": _draw(),
            }
        self._give(order)
        return found, order

    def _member_of(self, process: int) -> int:
        return self._place.federation.processes[process][0]

    def _lead(self, values: Values, group: Group) -> Values:
        """One attempt, as the leader of a member."""
        self._attempts += 1
        attempt = self._attempts
        known = self._rings.name if self._rings is not None else 0
        mine = torch.tensor([[self._place.member, known, _draw()]])
        facts = group.all_gather(mine) if group.size > 1 else mine
        members = tuple(facts[:, 0].tolist())
        same = len(set(facts[:, 1].tolist())) == 1 and known > 0
        name = known if same else int(facts[0, 2])
        if attempt != self._attempts:
            raise RankFailedError("the others began another attempt")
        number = self._give({"do": "average", "members": members, "name": name})
        found = self._average(attempt, members, name, values)
        self._await_followers(number)
        return found

    def _follow(self, values: Values) -> tuple[Values, dict[str, Any]]:
        """All attempts of an exchange, as a follower."""
        order = self._next_order()
        while True:
            number = self._orders - 1
            self._attempts += 1
            members, name = tuple(order["members"]), order["name"]
            work = partial(self._average, self._attempts, members, name, values)
            task: Task[Values] = Task(work)
            told = False
            while (following := self._peek_order()) is None:
                if not told and task.join(_POLL_S):
                    said = "1" if task.error is None else f"failed: {task.error}"
                    self._own.set(f"did/{number}/{self._place.process}", said)
                    told = True
                elif told:
                    time.sleep(_POLL_S)
            order = following
            if order["do"] == "use":
                assert task.results, "the leader has waited for it"
                return task.results[0], order

    def _await_followers(self, number: int) -> None:
        """Wait until all followers have the result of an order.

        Raises:
            RankFailedError: If one failed, or has ended.
        """
        left = set(self._place.followers)
        while left:
            for process in sorted(left):
                said = _read(self._own, f"did/{number}/{process}")
                if said is not None:
                    left.remove(process)
                if said not in {None, "1"}:
                    raise RankFailedError(f"process {process} {said}")
                if said is None and self._has_ended(process):
                    raise RankFailedError(
                        f"process {process} of {self._name} has ended; start all "
                        f"processes of the member again and it joins"
                    )
            time.sleep(_POLL_S if left else 0)

    @property
    def _name(self) -> str:
        return self._place.federation.members[self._place.member].name

    # -- Rings -------------------------------------------------------------------------

    def _average(
        self, attempt: int, members: tuple[int, ...], name: int, values: Values
    ) -> Values:
        """Average values over some members, in rings of this name."""
        shares = self._place.federation.shares(members)
        share = shares[self._place.member]
        scaled = {one: value * share for one, value in values.items()}
        if len(members) == 1:
            self.members = members
            return scaled
        rings = self._rings
        if rings is None or (rings.name, rings.members) != (name, members):
            rings, self._rings = self._connect(members, name), None
        before = _sent(rings)
        found = self._around(rings, scaled)
        if attempt == self._attempts:
            self.sent_bytes += _sent(rings) - before
            # Only rings in which all went well are used again.
            self._rings = rings
            self.members = members
        return found

    def _connect(self, members: tuple[int, ...], name: int) -> _Rings:
        """Make the groups of the rings that this process is in."""
        owners = [self._owners(member) for member in members]
        index = members.index(self._place.member)
        rings = []
        # In the same order everywhere, so that nobody waits in a circle.
        for ring, names in rings_of(owners).items():
            if ring[index] != self._place.rank:
                continue
            prefix = f"rings/{name}/{'-'.join(map(str, ring))}"
            store = PrefixStore(prefix, _clone(self._store))
            group = Group(store, index, len(members), self._timeout_s)
            rings.append((group, names))
        return _Rings(name=name, members=members, rings=rings)

    def _owners(self, member: int) -> dict[str, int]:
        """Rank that owns each weight in a member."""
        if member == self._place.member:
            return self.weights.owners
        text = str(self._store.get(f"owners/{member}"), "utf-8")
        return dict(zip(self.weights.names, json.loads(text), strict=True))

    def _around(self, rings: _Rings, values: Values) -> Values:
        """Add up values around all rings at once."""
        tasks = [
            Task(partial(self._around_one, group, names, values))
            for group, names in rings.rings
        ]
        found: Values = {}
        for task in tasks:
            while not task.join(1.0):
                pass
            if task.error is not None:
                raise task.error
            found |= task.results[0]
        return found

    def _around_one(self, group: Group, names: Sequence[str], values: Values) -> Values:
        """Add up values around one ring, in pieces that take little memory."""
        found: Values = {}
        limit = self._place.federation.exchange.PIECE_BYTES
        piece: list[str] = []
        for name, following in zip(names, [*names[1:], None], strict=True):
            piece.append(name)
            size = sum(values[one].nbytes for one in piece)
            same = following and values[following].dtype == values[name].dtype
            if size < limit and same:
                continue
            flat = torch.cat([values[one] for one in piece])
            group.ring_all_reduce(flat)
            parts = torch.split(flat, [values[one].numel() for one in piece])
            found |= dict(zip(piece, parts, strict=True))
            piece = []
        return found

    # -- Members that join -------------------------------------------------------------

    def admit(
        self,
        order: Mapping[str, Any],
        done: int,
        kept: Callable[[str], Values],
        kinds: Sequence[str],
    ) -> None:
        """Give the state after an exchange to members that join at it; collective.

        Args:
            order: What :meth:`mean` returned.
            done: Steps done.
            kept: Puts together what this rank owns of a kind; collective in the member.
            kinds: Of state that members keep.
        """
        if "joiners" not in order:
            if self._membership is not None:
                self._membership.admit(lambda: torch.zeros(0, dtype=torch.uint8))
            return
        bits = {
            kind: {name: _bits(value) for name, value in kept(kind).items()}
            for kind in kinds
        }
        if self._membership is not None:
            joining = [
                process
                for process, (member, index) in enumerate(
                    self._place.federation.processes
                )
                if member in order["joiners"] and index == 0
            ]
            header = {**order, "joins": True, "done": done}
            self._membership.admit(lambda: _packed(header))
            task = Task(partial(self._pass_all, order, kinds, bits))
            while not task.join(0.05):
                if any(map(self._membership.is_gone, joining)):
                    break
            self._give({"do": "go on"})
        else:
            task = Task(partial(self._pass_all, order, kinds, bits))
            while self._peek_order() is None:
                time.sleep(_POLL_S)
        if not task.over or task.error is not None:
            # They ask again, or are gone.
            _LOG.warning("a member did not take its state", exc_info=task.error)

    def _pass_all(
        self,
        order: Mapping[str, Any],
        kinds: Sequence[str],
        bits: Mapping[str, Values],
    ) -> None:
        for kind in kinds:
            self._pass_bits(order, bits[kind])

    def _pass_bits(self, order: Mapping[str, Any], values: Values) -> Values:
        """Add up bits over the source and those that join, which have zeros."""
        members = tuple(sorted([order["source"], *order["joiners"]]))
        rings, name = self._joining, order["name"]
        if rings is None or rings.name != name:
            rings = self._joining = self._connect(members, name)
        return self._around(rings, values)

    # -- Orders ------------------------------------------------------------------------

    def _give(self, order: Mapping[str, Any]) -> int:
        """Write an order for the followers; return its number."""
        number, self._orders = self._orders, self._orders + 1
        if self._place.followers:
            self._own.set(f"order/{number}", json.dumps(order))
        return number

    def _next_order(self) -> dict[str, Any]:
        while (order := self._peek_order()) is None:
            time.sleep(_POLL_S)
        return order

    def _peek_order(self) -> dict[str, Any] | None:
        """Return the next order, if there is one.

        Raises:
            RankFailedError: If the leader has ended.
        """
        text = _read(self._own, f"order/{self._orders}")
        if text is not None:
            self._orders += 1
            found: dict[str, Any] = json.loads(text)
            return found
        if _read(self._store, here_key(self._place.process)) == ENDED:
            # Told late of the process before this one.
            self._store.set(here_key(self._place.process), self._token)
        if self._has_ended(self._place.leader):
            raise RankFailedError(
                f"process {self._place.leader}, which leads {self._name}, has ended; "
                f"start all processes of the member again and it joins"
            )
        return None

    def _has_ended(self, process: int) -> bool:
        """Return True if the launcher told that a process ended, some time ago."""
        if _read(self._store, here_key(process)) != ENDED:
            self._ended.pop(process, None)
            return False
        first = self._ended.setdefault(process, time.monotonic())
        return time.monotonic() - first > _ENDED_S


def _draw() -> int:
    """Draw a number that nobody else draws, above 0."""
    return 1 + secrets.randbelow(2**62)


def _read(store: Store, key: str) -> str | None:
    return str(store.get(key), "utf-8") if store.check([key]) else None


def _clone(store: Store) -> Store:
    """The same store over a connection of its own, which nobody else waits on."""
    cloned: Store = store.clone()  # type: ignore[attr-defined]
    return cloned


def _sent(rings: _Rings) -> int:
    return sum(group.sent_bytes for group, _ in rings.rings)


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.view(_BITS[value.element_size()])


def _packed(header: Mapping[str, Any]) -> torch.Tensor:
    data = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    return torch.from_numpy(data.copy())
