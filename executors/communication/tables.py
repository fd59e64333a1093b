"""Runs send tables: a sum over ranks by messages between two of them at a time.

Every rank goes through the steps of a table that it takes part in, each of which is one
batch of sends and receives. See :mod:`planner.schema.send_tables`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from executors.communication.buckets import Bucket, PlainExchange
from planner.errors import ExecutionError
from planner.schema.send_tables import Send, SendTable

__all__ = ["ShardSums", "TableExchange", "TableSum"]

#: Peer, whether this rank receives, whether it adds, first and last chunk.
_Move = tuple[int, bool, bool, int, int]


def _moves(sends: Sequence[Send], rank: int) -> list[_Move]:
    """Return a rank's messages in a step; neighbouring chunks go together."""
    found: list[_Move] = []
    ordered = sorted(sends, key=lambda s: (s.source, s.destination, s.add, s.chunk))
    for send in ordered:
        if rank not in {send.source, send.destination}:
            continue
        receives = send.destination == rank
        peer = send.source if receives else send.destination
        if found and found[-1][:3] == (peer, receives, send.add):
            first, last = found[-1][3:]
            if send.chunk == last + 1:
                found[-1] = (peer, receives, send.add, first, send.chunk)
                continue
        found.append((peer, receives, send.add, send.chunk, send.chunk))
    return found


class TableSum:
    """One rank's part in an all-reduce by a table, which may be run many times.

    Args:
        table: An all-reduce. It is checked.
        group: Ranks; as many as the table has.

    Raises:
        ExecutionError: If the table is of another collective or number of ranks.
        StrategyError: If it is wrong: see :meth:`planner.schema.send_tables.SendTable.
            check`.
    """

    def __init__(self, table: SendTable, group: dist.ProcessGroup) -> None:
        if table.collective != "all_reduce" or table.ranks != group.size():
            raise ExecutionError(
                f"a table of {table.collective} over {table.ranks} ranks for a sum "
                f"over {group.size()}; give an all_reduce over as many"
            )
        table.check()
        self._group, self._shares = group, table.shares
        rank = group.rank()
        by_step: dict[int, list[Send]] = {}
        for send in table.sends:
            by_step.setdefault(send.step, []).append(send)
        steps = (_moves(by_step[step], rank) for step in sorted(by_step))
        self._steps = [moves for moves in steps if moves]

    def bounds(self, elements: int) -> list[int]:
        """First element of each chunk of a tensor, and the number of elements."""
        ends = itertools.accumulate(self._shares)
        return [0, *(round(end * elements) for end in ends)]

    def rounds(self, flat: torch.Tensor) -> Iterator[None]:
        """Sum a tensor over all ranks in place, yielding while messages travel.

        Args:
            flat: Contiguous, of one dimension; equally long on all ranks.
        """
        bounds = self.bounds(flat.numel())
        for moves in self._steps:
            operations, received = [], []
            for peer, receives, add, first, last in moves:
                part = flat[bounds[first] : bounds[last + 1]]
                if not part.numel():
                    continue
                if receives:
                    # Not in place: a part that is sent in the same step must not
                    # change before it has left.
                    buffer = torch.empty_like(part)
                    received.append((part, buffer, add))
                    part = buffer
                operations.append(
                    dist.P2POp(
                        dist.irecv if receives else dist.isend,
                        part,
                        group=self._group,
                        group_peer=peer,
                    )
                )
            if not operations:
                continue
            works = dist.batch_isend_irecv(operations)
            yield
            for work in works:
                work.wait()
            for part, buffer, add in received:
                if add:
                    part.add_(buffer)
                else:
                    part.copy_(buffer)

    def run(self, flat: torch.Tensor) -> None:
        """Sum a tensor over all ranks in place; collective.

        Args:
            flat: As :meth:`rounds`.
        """
        for _ in self.rounds(flat):
            pass


class TableExchange(PlainExchange):
    """Means of whole gradients, by a table.

    Args:
        table: An all-reduce over the replicas.
    """

    def __init__(self, table: SendTable) -> None:
        self._table = table

    def prepare(self, buckets: Sequence[Bucket], group: dist.ProcessGroup) -> None:
        """Find this rank's part of the table."""
        super().prepare(buckets, group)
        self._sum = TableSum(self._table, group)

    def run(self, bucket: Bucket) -> Iterator[None]:
        """See :meth:`executors.communication.buckets.Exchange.run`."""
        bucket.flat.div_(self._group.size())
        yield from self._sum.rounds(bucket.flat)

    def restored(self, state: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: nothing is kept."""


class ShardSums:
    """Means over replicas of gradients that ``fully_shard`` has reduced to shards.

    Each of its modules calls a hook with a reduced shard: in a step's last backward the
    hook averages it over the replicas by a table. Those of earlier backwards, which
    ``fully_shard`` adds up, are taken along.

    Args:
        table: An all-reduce over the replicas.
        group: Replicas of this rank's shard.

    Raises:
        ExecutionError: As :class:`TableSum`.
        StrategyError: The same.
    """

    def __init__(self, table: SendTable, group: dist.ProcessGroup) -> None:
        self._sum, self._copies = TableSum(table, group), group.size()
        self._last = True
        self._earlier: dict[int, torch.Tensor] = {}
        self._modules = 0

    def attach(self, module: FSDPModule) -> None:
        """Average what a module reduces; its mesh has no replicas of its own."""
        index = self._modules
        self._modules += 1
        module.set_all_reduce_hook(lambda reduced: self._reduced(index, reduced))

    def expect(self, last: bool) -> None:
        """Set whether the next backward is the last of the step."""
        if last != self._last and not last:
            self._earlier.clear()
        self._last = last

    def _reduced(self, index: int, reduced: torch.Tensor) -> None:
        """Average a module's shard, which is divided by the number of shards already.

        A gradient of an earlier backward is a view of what was reduced then, and gets
        later ones added: its sum moves into the last one's.
        """
        earlier = self._earlier.get(index)
        if not self._last:
            self._earlier.setdefault(index, reduced)
            return
        if earlier is not None:
            if earlier.numel() != reduced.numel():
                raise ExecutionError(
                    f"a backward reduced {reduced.numel()} gradients of a unit, one "
                    f"before it in the same step {earlier.numel()}; use a loss that "
                    f"depends on the same parameters in each microbatch, or "
                    f"communication.replicas.algorithm=library"
                )
            reduced.add_(earlier)
            earlier.zero_()
            del self._earlier[index]
        # Divided first, so that no sum overflows where the mean would not.
        reduced.div_(self._copies)
        self._sum.run(reduced)

    def finish(self) -> None:
        """End a step's backward.

        Raises:
            ExecutionError: If a unit got gradients in the step, but none in its last
                backward, which would have to average them.
        """
        if self._earlier:
            self._earlier.clear()
            raise ExecutionError(
                "a unit got gradients in a microbatch, but none in the step's last "
                "one, which averages them over replicas; use a loss that depends on "
                "the same parameters in each, or communication.replicas.algorithm="
                "library"
            )
