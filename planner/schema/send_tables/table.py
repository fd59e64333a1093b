"""Send tables: a collective as a list of messages, and the check that it is right.

A tensor is cut into chunks. In a *step* messages go out at once: each takes what its
source held when the step began, and is added to what its destination holds, or takes
its place. Ring, tree, halving, hierarchy and synthesised schedules are such tables, so
that one check, one timer (:mod:`planner.simulate.send_tables`) and one interpreter
(:mod:`executors.communication.tables`) do for all of them.

Since a step begins when the one before it has ended, no table waits for itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from planner.errors import StrategyError

__all__ = ["CollectiveKind", "Send", "SendTable"]

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]

#: Messages of the longest table.
_MOST_MESSAGES = 2**24
_SHARES_TOLERANCE = 1e-9


class Send(NamedTuple):
    """One message.

    Attributes:
        step: In which it goes out, from 0.
        source: Rank that sends.
        destination: Rank that receives.
        chunk: Chunk of the tensor, from 0.
        add: Whether the destination adds it to what it holds; else it takes its place.
    """

    step: int
    source: int
    destination: int
    chunk: int
    add: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTable:
    """Messages that carry out one collective.

    Attributes:
        collective: ``all_reduce``: each rank begins with a tensor, all end with the
            sum. ``reduce_scatter``: the owner of a chunk ends with its sum.
            ``all_gather``: the owner of a chunk begins with it, all end with all.
        ranks: That take part.
        shares: Part of the tensor that each chunk is, in its order; they add up to 1.
        owners: Rank of each chunk; empty for all_reduce.
        sends: Messages; the order within a step says nothing.

    Raises:
        StrategyError: If a number is out of range.
    """

    collective: CollectiveKind
    ranks: int
    shares: tuple[float, ...]
    owners: tuple[int, ...] = ()
    sends: tuple[Send, ...] = ()

    def __post_init__(self) -> None:
        if self.collective not in get_args(CollectiveKind):
            raise StrategyError(
                f"collective={self.collective!r}; use one of "
                f"{', '.join(get_args(CollectiveKind))}"
            )
        if self.ranks < 1:
            raise StrategyError(f"ranks={self.ranks}; use 1 or more")
        self._require_shares()
        if len(self.sends) > _MOST_MESSAGES:
            raise StrategyError(
                f"{len(self.sends):,} sends; a table has at most {_MOST_MESSAGES:,}"
            )
        ranks, chunks = self.ranks, len(self.shares)
        for send in self.sends:
            step, source, destination, chunk, _ = send
            inside = 0 <= source < ranks and 0 <= destination < ranks
            inside &= source != destination and step >= 0
            if not (inside and 0 <= chunk < chunks):
                self._require_in_range(send)

    def _require_shares(self) -> None:
        total = math.fsum(self.shares)
        if not self.shares or min(self.shares) < 0 or not math.isfinite(total):
            raise StrategyError(
                f"shares={self.shares}; give each chunk's part of the tensor, 0 or more"
            )
        if abs(total - 1) > _SHARES_TOLERANCE:
            raise StrategyError(f"shares add up to {total}, not to 1; scale them")
        wanted = 0 if self.collective == "all_reduce" else len(self.shares)
        if len(self.owners) != wanted:
            raise StrategyError(
                f"{len(self.owners)} owners of {len(self.shares)} chunks under "
                f"{self.collective}; give {wanted}"
            )
        for owner in self.owners:
            if not 0 <= owner < self.ranks:
                raise StrategyError(
                    f"owner {owner} of {self.ranks} ranks; use 0 to {self.ranks - 1}"
                )

    def _require_in_range(self, send: Send) -> None:
        for name, value, count in (
            ("source", send.source, self.ranks),
            ("destination", send.destination, self.ranks),
            ("chunk", send.chunk, len(self.shares)),
        ):
            if not 0 <= value < count:
                raise StrategyError(
                    f"{send}: {name} {value} is not one of {count}; use 0 to "
                    f"{count - 1}"
                )
        if send.step < 0 or send.source == send.destination:
            raise StrategyError(
                f"{send}: a step is 0 or more, and a rank sends to another"
            )

    @property
    def steps(self) -> int:
        """Steps until the last message has arrived."""
        return max((send.step for send in self.sends), default=-1) + 1

    def bytes_sent(self, size_bytes: float) -> list[float]:
        """Bytes that each rank sends of a tensor of so many bytes."""
        found = [0.0] * self.ranks
        for send in self.sends:
            found[send.source] += self.shares[send.chunk] * size_bytes
        return found

    def check(self) -> None:
        """Follow every message, and see that each rank ends with what it should.

        Raises:
            StrategyError: If a rank sends what it does not hold, a contribution would
                be counted twice, a rank gets a chunk twice in a step where one takes
                the other's place, or at the end a chunk is incomplete. The first
                such message or rank is named.
        """
        held = self._begin()
        for step, sends in self._by_step():
            before = dict(held)
            for send in sends:
                moved = before.get((send.source, send.chunk), 0)
                if not moved:
                    raise StrategyError(
                        f"step {step}: rank {send.source} sends chunk {send.chunk}, "
                        f"of which it holds nothing; send it there first"
                    )
                key = (send.destination, send.chunk)
                if not send.add:
                    self._require_alone(sends, send)
                    held[key] = moved
                elif held.get(key, 0) & moved:
                    raise StrategyError(
                        f"step {step}: rank {send.destination} would count ranks "
                        f"{_members(held[key] & moved)} twice in chunk {send.chunk}; "
                        f"add each contribution once"
                    )
                else:
                    held[key] = held.get(key, 0) | moved
        self._require_complete(held)

    def _begin(self) -> dict[tuple[int, int], int]:
        """Contributions, as bits, that each rank holds of each chunk."""
        chunks = range(len(self.shares))
        if self.collective == "all_gather":
            return {(owner, chunk): 1 for chunk, owner in enumerate(self.owners)}
        return {(rank, c): 1 << rank for rank in range(self.ranks) for c in chunks}

    def _by_step(self) -> list[tuple[int, list[Send]]]:
        found: dict[int, list[Send]] = {}
        for send in self.sends:
            found.setdefault(send.step, []).append(send)
        return sorted(found.items())

    @staticmethod
    def _require_alone(sends: Sequence[Send], send: Send) -> None:
        target = (send.destination, send.chunk)
        if sum((one.destination, one.chunk) == target for one in sends) > 1:
            raise StrategyError(
                f"step {send.step}: rank {send.destination} gets chunk {send.chunk} "
                f"twice, and one takes the other's place; use two steps, or add"
            )

    def _require_complete(self, held: dict[tuple[int, int], int]) -> None:
        whole = 1 if self.collective == "all_gather" else (1 << self.ranks) - 1
        for chunk, share in enumerate(self.shares):
            if not share:
                continue
            wanted = range(self.ranks)
            if self.collective == "reduce_scatter":
                wanted = range(self.owners[chunk], self.owners[chunk] + 1)
            for rank in wanted:
                missing = whole & ~held.get((rank, chunk), 0)
                if missing:
                    lacks = (
                        "the chunk"
                        if self.collective == "all_gather"
                        else f"what ranks {_members(missing)} gave"
                    )
                    raise StrategyError(
                        f"at the end rank {rank} lacks {lacks} of chunk {chunk}; "
                        f"add the messages that bring it"
                    )

    def to_json(self) -> str:
        """Text that :meth:`from_json` reads: sends are rows of five numbers."""
        document: dict[str, Any] = {
            "collective": self.collective,
            "ranks": self.ranks,
            "shares": list(self.shares),
            "owners": list(self.owners),
            "sends": [
                [s.step, s.source, s.destination, s.chunk, int(s.add)]
                for s in self.sends
            ],
        }
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str) -> SendTable:
        """Read and check a table.

        Raises:
            StrategyError: If a key is missing, a row has not five whole numbers, or
                the table is wrong: see :meth:`check`.
        """
        try:
            document = json.loads(text)
            made = cls(
                collective=document["collective"],
                ranks=int(document["ranks"]),
                shares=tuple(float(share) for share in document["shares"]),
                owners=tuple(int(owner) for owner in document["owners"]),
                sends=tuple(_send_of(row) for row in document["sends"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StrategyError(
                f"not a send table: {error}; it has collective, ranks, shares, owners "
                f"and sends, rows of step, source, destination, chunk and 0 or 1"
            ) from error
        made.check()
        return made


def _send_of(row: Sequence[int]) -> Send:
    step, source, destination, chunk, add = row
    if any(type(value) is not int for value in row) or add not in {0, 1}:
        raise ValueError(f"row {list(row)}")
    return Send(step, source, destination, chunk, bool(add))


def _members(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
