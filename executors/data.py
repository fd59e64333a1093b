"""Batches: the same global batch on any mesh, of which each rank takes its slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from planner.errors import ExecutionError
from planner.schema import Workload

__all__ = ["Batch", "Data", "global_batches", "slice_batch", "synthetic_batch"]

#: Keyword of forward to tensor, batch dimension first.
Batch = Mapping[str, torch.Tensor]
#: Global batches one after the other, or a function from the step's number to one.
Data = Iterable[Batch] | Callable[[int], Batch]

#: Integers of an input without a bound are drawn from [0, 2): right for masks.
_DEFAULT_HIGH = 2


def synthetic_batch(
    workload: Workload, step: int, *, seed: int = 0, samples: int | None = None
) -> dict[str, torch.Tensor]:
    """Random inputs of one step: integers below ``high``, standard normal floats.

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
        shape = (count, *spec.shape)
        dtype = getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            batch[spec.name] = torch.randn(shape, generator=generator).to(dtype)
        elif dtype == torch.bool:
            batch[spec.name] = torch.ones(shape, dtype=dtype)
        else:
            high = _DEFAULT_HIGH if spec.high is None else spec.high
            batch[spec.name] = torch.randint(high, shape, generator=generator).to(dtype)
    return batch


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
            _check_size(batch, workload.global_batch)
            yield batch


def _check_size(batch: Batch, expected: int) -> None:
    for name, value in batch.items():
        if value.shape[0] != expected:
            raise ExecutionError(
                f"data gives {value.shape[0]} samples in {name!r}, the plan trains "
                f"global_batch={expected} a step; batch the data by {expected} or plan "
                f"for {value.shape[0]}"
            )


def slice_batch(
    batch: Batch, index: int, count: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Slice ``index`` of ``count`` equal ones, on the device."""
    return {name: value.chunk(count)[index].to(device) for name, value in batch.items()}
