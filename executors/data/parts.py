"""Parts of a global batch: which samples a process reads, and what ranks agree on.

Ranks of one data-parallel coordinate, whatever their place along pp, cp and tp, read
the same samples; others read theirs. A rank knows its own samples alone, so that what
a step needs of all of them (labels that count, equality) is exchanged in one message
of 56 bytes a coordinate.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from executors.data.batches import (
    SAME_DATA,
    Batch,
    batch_checksums,
    require_alike,
)
from planner.errors import ExecutionError
from planner.schema import InputSpec

__all__ = ["BatchPart", "Part", "agree_on_parts", "gather_batch"]

#: Entry of the table of a coordinate that took no part.
_ABSENT = torch.iinfo(torch.int64).min


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Samples of every global batch that one process reads.

    Attributes:
        start: First of them in the global batch.
        stop: One behind the last.
        whole: Samples of the global batch.
        index: Data-parallel coordinate of the process, in a plan.
        count: Number of coordinates.
        microbatch: Samples that are computed together.
        inputs: Inputs of the plan, which say how many rows of each a sample owns.
        regions: Inputs of which the process has a shard of every sample, and where it
            lies along each spatial dimension.
    """

    start: int
    stop: int
    whole: int
    index: int = 0
    count: int = 1
    microbatch: int = 1
    inputs: tuple[InputSpec, ...] = ()
    regions: Mapping[str, tuple[slice, ...]] = field(default_factory=dict)

    @property
    def samples(self) -> slice:
        """The samples as a slice of a global batch."""
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPart:
    """The samples of a global batch that this process trains on.

    Attributes:
        values: Keyword of forward to tensor, batch dimension first, on the CPU.
        shared: Checksum of what every rank must see alike, such as the numbers of all
            samples of the global batch.
    """

    values: Batch
    shared: int = 0


def agree_on_parts(
    batch: BatchPart,
    facts: Sequence[int],
    part: Part,
    groups: Sequence[dist.ProcessGroup | None],
    device: torch.device,
    *,
    step: int,
) -> list[list[int]]:
    """Exchange what each coordinate knows of its samples; collective over the groups.

    Args:
        batch: Of this rank.
        facts: Integers that are equal on the ranks of a coordinate.
        part: Samples of this rank.
        groups: Ranks that agree, one group after the other; None is all of them, where
            it is also checked that ranks were given what they should.
        device: Of this process.
        step: Number of the step, from 0, for the message.

    Returns:
        Facts of each coordinate, empty for those that took no part.

    Raises:
        ExecutionError: On every rank, if ranks of one coordinate have other samples, or
            ranks see data in another order.
    """
    sums = batch_checksums(batch.values)
    own = zlib.crc32(repr(sums).encode())
    row = [own, -own, batch.shared, -batch.shared, *facts]
    table = torch.full((part.count, len(row)), _ABSENT, dtype=torch.int64)
    table[part.index] = torch.tensor(row)
    table = table.to(device)
    for group in groups:
        dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    rows = table.tolist()
    if None in groups:
        present = [entry for entry in rows if entry[0] != _ABSENT]
        alike = all(entry[0] == -entry[1] for entry in present)
        orders = {entry[2] for entry in present} | {-entry[3] for entry in present}
        if not alike or len(orders) > 1:
            _refuse(sums, batch.shared, part.index, step)
    return [entry[4:] if entry[0] != _ABSENT else [] for entry in rows]


def _refuse(sums: Mapping[str, int], shared: int, index: int, step: int) -> None:
    """Say which ranks were given other data than they should; collective.

    Raises:
        ExecutionError: Always.
    """
    everyone: list[tuple[int, int, Mapping[str, int]]] = [
        (0, 0, {}) for _ in range(dist.get_world_size())
    ]
    dist.all_gather_object(everyone, (index, shared, sums))
    orders = [one[1] for one in everyone]
    require_alike(orders, "samples", step, verb="differ")
    for rank, (coordinate, _, found) in enumerate(everyone):
        first = next(n for n, one in enumerate(everyone) if one[0] == coordinate)
        wanted = everyone[first][2]
        name = next(
            (n for n in sorted({*found, *wanted}) if found.get(n) != wanted.get(n)),
            None,
        )
        if name is not None:
            raise ExecutionError(
                f"{name!r} of step {step + 1} differs between ranks {first} and "
                f"{rank}, which train on the same samples; {SAME_DATA}"
            )
    raise ExecutionError(f"data of step {step + 1} differs between ranks; {SAME_DATA}")


def gather_batch(batch: BatchPart, part: Part) -> dict[str, torch.Tensor]:
    """Put a global batch together of its parts; collective over all ranks.

    Args:
        batch: Of this rank.
        part: Its samples.

    Raises:
        ExecutionError: If it has shards of them.
    """
    if part.regions:
        name = next(iter(part.regions))
        raise ExecutionError(
            f"each rank has a shard of {name!r}, and the whole is wanted, to check the "
            f"first step against one process; leave check_first_step out, or give "
            f"global batches"
        )
    everyone: list[tuple[int, Batch]] = [(0, {})] * dist.get_world_size()
    dist.all_gather_object(everyone, (part.index, dict(batch.values)))
    by_index = dict(sorted(everyone, key=lambda one: one[0]))
    names = next(iter(by_index.values()))
    return {name: torch.cat([one[name] for one in by_index.values()]) for name in names}
