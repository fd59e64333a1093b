"""A DataLoader of global batches, of each of which a rank reads its samples alone."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from executors.data.data_source import DataSource
from executors.data.parts import BatchPart, Part
from executors.data.samples import (
    require_batch,
    require_kind,
    require_rows,
    require_same,
)
from planner.errors import ExecutionError

__all__ = ["LoaderSource"]


class _PartSampler:
    """This rank's part of what a batch sampler draws.

    Attributes:
        skip: Batches that are drawn and passed over.
        drawn: Of the batches that were drawn, in order: checksum of the numbers of
            their samples, and how many.
    """

    def __init__(self, sampler: Iterable[list[Any]], part: Part) -> None:
        self._sampler, self._part = sampler, part
        self.skip = 0
        self.drawn: deque[tuple[int, int]] = deque()

    def __iter__(self) -> _PartIterator:
        return _PartIterator(self, iter(self._sampler))

    def own(self, numbers: Sequence[Any]) -> list[Any]:
        """This rank's samples of a batch.

        Raises:
            ExecutionError: If it has another size than the plan's.
        """
        part, each = self._part, self.each(len(numbers))
        self.drawn.append((zlib.crc32(repr(list(numbers)).encode()), len(numbers)))
        return list(numbers)[part.start // each : part.stop // each]

    def each(self, given: int) -> int:
        """Samples of the plan that one of the loader must be, if it gives so many.

        Raises:
            ExecutionError: If that is no whole number, or the plan would cut one.
        """
        whole, part = self._part.whole, self._part
        each = whole // given if given else 0
        if not each or whole % given:
            raise self.wrong_size(given)
        if part.microbatch % each or part.start % each or part.stop % each:
            raise ExecutionError(
                f"the DataLoader gives {given} samples, each of which would be {each} "
                f"of the plan's global_batch={whole}, and microbatch_size="
                f"{part.microbatch} would cut one; plan with --pin "
                f"microbatch_size={each}, or a multiple of it, or use "
                f"batch_size={whole} and drop_last=True"
            )
        return each

    def wrong_size(self, given: int) -> ExecutionError:
        """Error for batches of another size than the plan's."""
        whole = self._part.whole
        return ExecutionError(
            f"the DataLoader gives {given} samples, the plan trains global_batch="
            f"{whole} a step; use batch_size={whole} and drop_last=True, or plan for "
            f"{given}"
        )

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]


class _PartIterator:
    """Iterator of a :class:`_PartSampler`, whose state torchdata's loaders keep."""

    def __init__(self, sampler: _PartSampler, numbers: Iterator[Any]) -> None:
        self._sampler, self._numbers, self._taken = sampler, numbers, 0

    def __iter__(self) -> _PartIterator:
        return self

    def __next__(self) -> list[Any]:
        while self._sampler.skip:
            next(self._numbers)
            self._sampler.skip -= 1
        self._taken += 1
        return self._sampler.own(next(self._numbers))

    def state_dict(self) -> dict[str, Any]:
        """State of the sampler's own iterator, or how many batches it gave."""
        if hasattr(self._numbers, "state_dict"):
            return {"numbers": self._numbers.state_dict()}
        return {"taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind what was given."""
        if "numbers" in state:
            self._numbers.load_state_dict(state["numbers"])  # type: ignore[attr-defined]
            return
        self._taken = state["taken"]
        for _ in range(self._taken):
            next(self._numbers)


class LoaderSource(DataSource):
    """A loader of global batches, of each of which this rank reads its samples."""

    def __init__(
        self, loader: DataLoader[Any], part: Part, *, pin_memory: bool
    ) -> None:
        if isinstance(loader.sampler, DistributedSampler):
            raise ExecutionError(
                f"the DataLoader has a DistributedSampler, but every rank takes its "
                f"own part of the plan's global_batch={part.whole} here: leave "
                f"sampler= out, and use batch_size={part.whole}"
            )
        self._part = part
        self._sampler = _PartSampler(loader.batch_sampler, part)  # type: ignore[arg-type]
        self._stateful = hasattr(loader, "state_dict")
        options: dict[str, Any] = {
            "num_workers": loader.num_workers,
            "collate_fn": loader.collate_fn,
            "pin_memory": loader.pin_memory or pin_memory,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            # torchdata restores the sampler's generator before a pass, and draws of the
            # loader's after: if they were one, the next pass would differ.
            "generator": torch.Generator().manual_seed(part.index)
            if self._stateful
            else loader.generator,
        }
        if loader.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
            options["persistent_workers"] = loader.persistent_workers
        if self._stateful:
            options["snapshot_every_n_steps"] = loader.snapshot_every_n_steps  # type: ignore[attr-defined]
        self._loader: Any = type(loader)(
            loader.dataset,
            batch_sampler=self._sampler,
            **options,
        )
        self._batches: Iterator[Any] | None = None
        self._next = 0

    def _skip_to(self, step: int) -> None:
        """Begin anew, and pass over the batches before a step."""
        self._sampler.drawn.clear()
        self._sampler.skip, self._next, self._batches = step, step, None

    def batch(self, step: int) -> BatchPart:
        """This rank's part of a step's batch; see :class:`DataSource`."""
        if step != self._next:
            self._skip_to(step)
        values, passes = None, 0
        while values is None:
            before = self._sampler.skip
            if self._batches is None:
                self._batches = iter(self._loader)
                passes += 1
            values = next(self._batches, None)
            if values is None:
                self._batches = None
                if passes > 1 and self._sampler.skip == before:
                    raise ExecutionError(
                        f"the DataLoader gave no batch for step {step}; it needs "
                        f"{self._part.whole} samples at least"
                    )
        self._next = step + 1
        shared, given = self._sampler.drawn.popleft()
        part = BatchPart(values=require_batch(values, step), shared=shared)
        try:
            return require_rows(part, self._part)
        except ExecutionError as error:
            if given == self._part.whole:
                raise
            # One sample of the loader is one of the plan after all.
            raise self._sampler.wrong_size(given) from error

    def state_dict(self) -> dict[str, Any]:
        """Batches drawn, and the loader's own state where it keeps one."""
        state: dict[str, Any] = {
            "kind": "loader",
            "step": self._next,
            "batch": self._part.whole,
        }
        if self._stateful:
            state["loader"] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batches drawn."""
        require_kind(state, "loader")
        require_same(
            "the DataLoader", "samples a batch", self._part.whole, state["batch"]
        )
        if self._stateful and "loader" in state:
            self._skip_to(0)
            self._loader.load_state_dict(state["loader"])
            self._next = state["step"]

    def close(self) -> None:
        """End the loader's workers."""
        self._batches = None
