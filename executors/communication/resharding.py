"""Runs a resharding: parts of a tensor travel from one mesh to another, in order.

Each unit task is a chain from its sender through its receivers, host by host, along
which a part is passed on in pieces: a pipelined broadcast by sends and receives. A part
enters each host once. See :mod:`planner.schema.resharding`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from planner.errors import ExecutionError
from planner.schema.resharding import Box, Hop, Resharding, hops_of

__all__ = ["GroupWire", "Resharder", "Wire"]

#: Bytes of the pieces in which parts are passed on. Assumption: enough to fill a link,
#: few enough that the second hop begins soon.
_PIECE_BYTES = 2**20


class Wire(Protocol):
    """Sends and receives between the ranks of two meshes."""

    def send(self, tensor: torch.Tensor, rank: int) -> Any:
        """Begin to send to a rank; returns what ``wait`` is called on, or None."""

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Fill a tensor with what a rank sends next."""


class GroupWire:
    """Sends and receives of ``torch.distributed``.

    Args:
        group: Group that both meshes are in; None for the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def send(self, tensor: torch.Tensor, rank: int) -> Any:
        """Begin to send to a rank of the group."""
        return dist.isend(tensor, group=self._group, group_dst=rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Receive from a rank of the group."""
        dist.recv(tensor, group=self._group, group_src=rank)


class Resharder:
    """The part of one rank in a resharding, which may be run many times.

    Args:
        resharding: Transfers in order.
        source_ranks: Rank of each device of the source mesh.
        destination_ranks: Rank of each device of the destination mesh; none is a rank
            of the source, too.
        rank: This process's.
        wire: How ranks send.

    Attributes:
        bytes_across_hosts: Sent by this rank to other hosts in all runs.
        bytes_within_hosts: Sent by this rank to its own host in all runs.

    Raises:
        ExecutionError: If the numbers of ranks are not those of the meshes, or a rank
            is named twice.
    """

    def __init__(
        self,
        resharding: Resharding,
        source_ranks: Sequence[int],
        destination_ranks: Sequence[int],
        *,
        rank: int,
        wire: Wire,
    ) -> None:
        for name, ranks, mesh in (
            ("source", source_ranks, resharding.source),
            ("destination", destination_ranks, resharding.destination),
        ):
            if len(ranks) != mesh.num_devices:
                raise ExecutionError(
                    f"{len(ranks)} {name}_ranks for a mesh of {mesh.num_devices} "
                    f"devices; give one for each"
                )
        every = [*source_ranks, *destination_ranks]
        if len(set(every)) < len(every):
            raise ExecutionError(
                f"source_ranks={list(source_ranks)} and destination_ranks="
                f"{list(destination_ranks)} name a rank twice; use other ranks for "
                f"each device of both meshes"
            )
        self._resharding, self._wire = resharding, wire
        self._source, self._destination = list(source_ranks), list(destination_ranks)
        shape = resharding.shape
        self._held: Box | None = None
        self._wanted: Box | None = None
        if rank in self._source:
            device = self._source.index(rank)
            self._held = resharding.source.tile(device, shape)
        elif rank in self._destination:
            device = self._destination.index(rank)
            self._wanted = resharding.destination.tile(device, shape)
        self._steps = list(self._own_steps(rank))
        self.bytes_across_hosts = self.bytes_within_hosts = 0

    def _own_steps(self, rank: int) -> Iterator[tuple[Box, int | None, Hop | None]]:
        """Yield what this rank does in each transfer that it takes part in.

        The part, the rank before in the chain and the hop to the next, if any.
        """
        for transfer in self._resharding.transfers:
            before = after = None
            for hop in hops_of(transfer, self._resharding.destination):
                if self._sender(hop) == rank:
                    after = hop
                if self._destination[hop.receiver] == rank:
                    before = self._sender(hop)
            if before is not None or after is not None:
                yield transfer.task.box, before, after

    def _sender(self, hop: Hop) -> int:
        return (self._source if hop.first else self._destination)[hop.sender]

    def run(
        self,
        local: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor | None:
        """Send and receive; all ranks of both meshes call it.

        Args:
            local: This rank's tile on the source mesh; None on other ranks.
            dtype: Of the tensor, on the destination mesh.
            device: On which that tile is made.
        Returns:
            This rank's tile on the destination mesh; None on other ranks.
        Raises:
            ExecutionError: If the tile is missing or has another shape.
        """
        origin, tile = self._wanted, None
        if self._wanted is not None:
            tile = torch.empty(_shape(self._wanted), dtype=dtype, device=device)
        elif self._held is not None:
            origin, tile = self._held, local
            if local is None or tuple(local.shape) != _shape(self._held):
                given = None if local is None else tuple(local.shape)
                raise ExecutionError(
                    f"a tile of shape {given} for a rank that holds "
                    f"{_shape(self._held)} of {self._resharding.shape}; give that part"
                )
        if tile is None or origin is None:
            return None
        sent: list[Any] = []
        for box, before, after in self._steps:
            part = tile[_slices(box, origin)]
            flat = part.contiguous().view(-1)
            if before is not None:
                flat = torch.empty_like(flat)
            self._pass_on(flat, before, after, sent)
            if before is not None:
                part.copy_(flat.view(part.shape))
        for work, _ in sent:
            if work is not None:
                work.wait()
        return tile if self._wanted is not None else None

    def _pass_on(
        self, flat: torch.Tensor, before: int | None, after: Hop | None, sent: list[Any]
    ) -> None:
        """Receive a part piece by piece, and send each on at once."""
        elements = max(1, _PIECE_BYTES // flat.element_size())
        for piece in torch.split(flat, elements):
            if before is not None:
                self._wire.receive(piece, before)
            if after is None:
                continue
            # Kept until it has left: the buffer may not be freed before.
            rank = self._destination[after.receiver]
            sent.append((self._wire.send(piece, rank), piece))
            size = piece.numel() * piece.element_size()
            if after.crosses:
                self.bytes_across_hosts += size
            else:
                self.bytes_within_hosts += size


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _slices(box: Box, origin: Box) -> tuple[slice, ...]:
    """Part of the whole tensor as part of a tile."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(box, origin, strict=True)
    )
