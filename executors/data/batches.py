"""Batches: the same global batch on any mesh, of which each rank takes its slice."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)

import torch
import torch.distributed as dist

from planner.errors import ExecutionError
from planner.schema import InputSpec, Plan, Workload

__all__ = [
    "SAME_DATA",
    "Batch",
    "Data",
    "batch_checksums",
    "global_batches",
    "require_alike",
    "require_equal_batches",
    "require_inputs",
    "require_lengths",
    "require_size",
    "slice_batch",
    "synthetic_batch",
    "take_samples",
]

#: Keyword of forward to tensor, batch dimension first.
Batch = Mapping[str, torch.Tensor]
#: Global batches one after the other, or a function from the step's number to one.
Data = Iterable[Batch] | Callable[[int], Batch]

#: Remedy where ranks were given different data.
SAME_DATA = (
    "every rank must be given the same data in the same order, of which it trains on "
    "its own part: seed the sampler equally on all ranks "
    "(DataLoader(generator=torch.Generator().manual_seed(0))) and use no "
    "DistributedSampler"
)

#: Most numbers of a sample that may be sizes.
_SIZES = 256
#: Integers of an input without a bound are drawn from [0, 2): right for masks.
_DEFAULT_HIGH = 2
#: Values of a sample of floats that a checksum reads; of integers it reads all.
_CHECKED_FLOATS = 256


def synthetic_batch(
    workload: Workload, step: int, *, seed: int = 0, samples: int | None = None
) -> dict[str, torch.Tensor]:
    """Random inputs of one step: integers below ``high``, standard normal floats.

    ``position_ids`` count up. A class for each sample, too, where that is what the loss
    compares scores with.

    Args:
        workload: Its inputs' shapes are of one sample.
        step: Number of the step; the same step and seed give the same batch.
        seed: Of the generator.
        samples: Batch dimension; the global batch if None.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    count = workload.global_batch if samples is None else samples
    batch: dict[str, torch.Tensor] = {}
    for spec in workload.inputs:
        shape = (count * spec.rows, *spec.shape)
        dtype = getattr(torch, spec.dtype)
        if spec.name == "position_ids" and len(spec.shape) == 1:
            # One text a row: positions that restart would make several of it.
            batch[spec.name] = torch.arange(spec.shape[0], dtype=dtype).expand(shape)
        elif dtype.is_floating_point:
            batch[spec.name] = torch.randn(shape, generator=generator).to(dtype)
        elif dtype == torch.bool:
            batch[spec.name] = torch.ones(shape, dtype=dtype)
        else:
            high = _DEFAULT_HIGH if spec.high is None else spec.high
            drawn = torch.randint(high, shape, generator=generator).to(dtype)
            batch[spec.name] = _with_values(drawn, spec, count)
    if workload.loss == "cross_entropy" and not any(
        map(_can_be_target, batch.values())
    ):
        # Scores of classes, of which there are two at least.
        batch["labels"] = torch.randint(_DEFAULT_HIGH, (count,), generator=generator)
    return batch


def _with_values(drawn: torch.Tensor, spec: InputSpec, samples: int) -> torch.Tensor:
    """Put the known values of every sample in their places, and nowhere else."""
    flat, place = drawn.view(samples, -1), 0
    for known in {value for value, _ in spec.values if value is not None}:
        flat[flat == known] = 0
    for value, times in spec.values:
        if value is not None:
            flat[:, place : place + times] = value
        place += times
    return drawn


def _can_be_target(value: torch.Tensor) -> bool:
    return not value.is_floating_point() and value.dtype != torch.bool


def global_batches(
    workload: Workload,
    data: Data | None,
    steps: int,
    *,
    seed: int = 0,
    first: int = 0,
) -> Iterator[Batch]:
    """The global batch of each step.

    Args:
        workload: Says how many samples a step has.
        data: Where they come from; None for synthetic ones. An iterable that ends is
            begun anew. Every rank must be given the same.
        steps: Number of the step before which to end.
        seed: Of synthetic batches.
        first: Step to begin with; an iterable is read up to it and what it gave
            before is dropped.

    Raises:
        ExecutionError: If the data is empty, or a batch has another size than the
            plan's global batch.
    """
    if data is None:
        for step in range(first, steps):
            yield synthetic_batch(workload, step, seed=seed)
        return
    source = iter(()) if callable(data) else iter(data)
    for step in range(first if callable(data) else 0, steps):
        if callable(data):
            batch: Batch | None = data(step)
        else:
            batch = next(source, None)
            if batch is None:
                source = iter(data)
                batch = next(source, None)
        if not batch:
            raise ExecutionError(
                f"data gave no batch for step {step}; give an iterable of mappings "
                f"from input name to tensor, or a function of the step"
            )
        if step >= first:
            require_size(batch, workload.global_batch, workload.inputs)
            yield batch


def require_size(batch: Batch, expected: int, inputs: Iterable[InputSpec] = ()) -> None:
    """Refuse a batch of another size than the plan's, or shared out unevenly.

    Of every tensor each sample owns as many consecutive rows. What the plan does not
    name has one row a sample, or as many as something that it names.

    Args:
        batch: All samples of a step, or a part of them.
        expected: Samples there should be.
        inputs: Say how many rows of each a sample fills.

    Raises:
        ExecutionError: If a tensor has another number of rows, or samples have rows of
            their pictures that differ in number.
    """
    specs = {spec.name: spec for spec in inputs}
    known = {1, *(spec.rows for spec in specs.values())}
    for name, value in batch.items():
        found = value.shape[0] if value.ndim else 0
        allowed = {specs[name].rows} if name in specs else known
        if found in {expected * each for each in allowed}:
            continue
        each = max(allowed)
        if each > 1:
            raise ExecutionError(
                f"data gives {found} rows in {name!r}, the plan trains "
                f"global_batch={expected} samples of {each} rows a step, each of which "
                f"owns consecutive ones; give {expected * each}, or plan with example "
                f"inputs of yours"
            )
        remedy = f"batch the data by {expected} or plan for {found}"
        if found and not found % expected:
            remedy += (
                f"; if a sample owns {found // expected} rows, plan with example "
                f"inputs that say so: first one with a row a sample"
            )
        raise ExecutionError(
            f"data gives {found} samples in {name!r}, the plan trains "
            f"global_batch={expected} a step; {remedy}"
        )
    _require_even(batch, expected, specs)


def _require_even(batch: Batch, samples: int, specs: Mapping[str, InputSpec]) -> None:
    """Refuse samples that own unequal numbers of rows, although their sum is right.

    Raises:
        ExecutionError: Naming the tensor that says whose rows are whose.
    """
    for name, spec in specs.items():
        value = batch.get(name)
        if value is None:
            continue
        sized = _sized_by(spec, specs.values())
        if sized is not None:
            sizes = value.reshape(samples, spec.rows, -1).prod(2).sum(1)
            _refuse_uneven(sizes, name, f"rows of {sized!r}")
        marks = {mark for mark, _ in spec.values}
        if None in marks:
            for mark in sorted(mark for mark in marks if mark is not None):
                marked = (value == mark).reshape(samples, -1).sum(1)
                _refuse_uneven(marked, name, f"tokens {mark}")


def _sized_by(spec: InputSpec, others: Iterable[InputSpec]) -> str | None:
    """Return the input whose rows the values of another count: t * h * w of a grid."""
    values = [value for value, times in spec.values for _ in range(min(times, _SIZES))]
    if not values or None in values or len(values) % spec.rows or len(values) > _SIZES:
        return None
    width = len(values) // spec.rows
    sizes = [value or 0 for value in values]
    rows = sum(math.prod(sizes[at : at + width]) for at in range(0, len(sizes), width))
    found = (one.name for one in others if one.rows == rows > 1)
    return next(found, None)


def _refuse_uneven(owned: torch.Tensor, name: str, what: str) -> None:
    few, many = int(owned.min()), int(owned.max())
    if few != many:
        raise ExecutionError(
            f"{name!r} says that samples have {few} to {many} {what}; ranks and "
            f"microbatches divide a batch by rows, of which each sample must own as "
            f"many: give every sample as many pictures, of one size"
        )


def slice_batch(
    batch: Batch, index: int, count: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Slice ``index`` of ``count`` equal ones, on the device.

    Raises:
        ExecutionError: If a tensor cannot be divided equally.
    """
    for name, value in batch.items():
        if value.shape[0] % count:
            raise ExecutionError(
                f"{name!r} has {value.shape[0]} rows, which {count} parts of a batch "
                f"cannot share equally; give every sample as many rows"
            )
    return {name: value.chunk(count)[index].to(device) for name, value in batch.items()}


def take_samples(batch: Batch, samples: slice, whole: int) -> dict[str, torch.Tensor]:
    """Take consecutive samples out of a batch of ``whole``, with all rows of each."""
    return {
        name: value[
            samples.start * (len(value) // whole) : samples.stop * (len(value) // whole)
        ]
        for name, value in batch.items()
    }


def require_equal_batches(batch: Batch, step: int, device: torch.device) -> None:
    """Refuse a step whose batch differs between ranks; collective over all of them.

    Every rank takes its slice of what it was given, and the stages of a pipeline take
    inputs and targets from different ranks: with unequal batches a model is trained on
    other samples' targets. Checksums are compared in one all-reduce of 16 bytes.

    Args:
        batch: Global batch of this rank.
        step: Number of the step, from 0, for the message.
        device: Device of this process.

    Raises:
        ExecutionError: On every rank, naming an input and the ranks that differ.
    """
    sums = batch_checksums(batch)
    whole = zlib.crc32(repr(sums).encode())
    bounds = torch.tensor([whole, -whole], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    highest, lowest = bounds.tolist()
    if highest == -lowest:
        return
    everyone: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, sums)
    for name in sorted(set().union(*everyone)):
        require_alike([one.get(name) for one in everyone], repr(name), step)


def require_alike(
    values: Sequence[Hashable], what: str, step: int, *, verb: str = "differs"
) -> None:
    """Refuse data that differs between ranks.

    Args:
        values: Checksum of each rank.
        what: That they are of, for the message.
        step: Number of the step, from 0, for the message.
        verb: Of the message.

    Raises:
        ExecutionError: Naming the ranks that differ from most, and the remedy.
    """
    counts = Counter(values)
    # Of equally frequent values, rank 0 has the usual one.
    usual = max(counts, key=lambda value: (counts[value], value == values[0]))
    others = [str(rank) for rank, value in enumerate(values) if value != usual]
    if others:
        raise ExecutionError(
            f"{what} of step {step + 1} {verb} between ranks: "
            f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(others)} had "
            f"others than rank {values.index(usual)}; {SAME_DATA}"
        )


def batch_checksums(batch: Batch) -> dict[str, int]:
    """Checksum of each tensor of a batch, by name."""
    return {name: _checksum(name, value) for name, value in sorted(batch.items())}


def _checksum(name: str, value: torch.Tensor) -> int:
    """Checksum of a tensor's name, shape, dtype and values, or some of its floats."""
    start = zlib.crc32(f"{name} {tuple(value.shape)} {value.dtype}".encode())
    value = value.detach()
    if value.is_floating_point() and value.ndim > 1 and value.numel():
        rows = value.flatten(1)
        value = rows[:, :: max(1, rows.shape[1] // _CHECKED_FLOATS)]
    data = value.cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(data.numpy().data, start)


def require_lengths(batch: Batch, plan: Plan) -> None:
    """Refuse samples of other shapes than those planned, where a plan depends on them.

    Stages of a pipeline exchange messages of the planned size, and each cp rank takes
    its tokens by their planned positions.

    Args:
        batch: What a step is given.
        plan: Names its inputs and their shapes.

    Raises:
        ExecutionError: If an input, or ``labels``, has another shape than planned.
    """
    mesh, length = plan.strategy.mesh, plan.workload.seq_len
    axis = "pp" if mesh.pp > 1 else "cp"
    if mesh.pp == 1 and mesh.cp == 1:
        return
    planned = {spec.name: tuple(spec.shape) for spec in plan.workload.inputs}
    labels = batch.get("labels")
    if labels is not None and labels.ndim > 1 and length is not None:
        planned.setdefault("labels", (length, *labels.shape[2:]))
    sizes = plan.model.spatial_sizes if plan.strategy.spatial else None
    for name, shape in planned.items():
        if shape[1:] == sizes:
            # Ranks may be given their shards.
            continue
        found = tuple(batch[name].shape[1:]) if name in batch else shape
        if found != shape:
            raise ExecutionError(
                f"{name!r} has samples of shape {found}, the plan is for {shape} with "
                f"{axis}={getattr(mesh, axis)}, which needs that shape in every step; "
                f"pad or cut the data to it, or plan for {found}"
            )


def require_inputs(
    batch: Batch, workload: Workload, accepted: Iterable[str] = ()
) -> None:
    """Refuse a batch with keys that would not be used, or without some that are.

    Args:
        batch: What a step is given.
        workload: Names the inputs that the plan was made for.
        accepted: Further inputs that forward can be given.

    Raises:
        ExecutionError: Naming the key, the inputs of the plan, and the remedy.
    """
    named = [spec.name for spec in workload.inputs]
    if not named:
        return
    reads = f"the plan's model reads {', '.join(named)}"
    missing = next((name for name in named if name not in batch), None)
    if missing is not None:
        raise ExecutionError(
            f"the batch has {', '.join(batch)} and no {missing!r}; {reads}: add "
            f"{missing!r} to data, or plan with example_inputs that lack it"
        )
    used = {*named, *accepted}
    if workload.loss == "cross_entropy":
        used.add("labels")
    unused = next((name for name in batch if name not in used), None)
    if unused is not None:
        raise ExecutionError(
            f"the batch has {unused!r}, which would not be used; {reads}: plan with "
            f"example_inputs that have {unused!r}, or leave it out of data"
        )
