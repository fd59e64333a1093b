"""Sums of buckets that go on beside the next forward, and updates bucket by bucket.

The optimizer updates the weights of a bucket when its sum has arrived, and in the next
forward a unit of the model waits for the buckets that hold its weights, and no others.
Every sum and every update is the one that would have been made between the steps, so
that no number changes.

Sources: Jayarajan et al. 2019 (P3, arXiv:1905.03960); Peng et al. 2019 (ByteScheduler,
SOSP).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "BackgroundSums",
    "BucketUpdates",
    "EarlyReads",
    "SumsOfBucket",
    "begin_sums",
    "sum_sequence",
]


class SumsOfBucket(Protocol):
    """Runs the sum of one bucket to its end."""

    def __call__(self, index: int) -> None:
        """Sum the bucket of a number, in place; collective."""


class BackgroundSums(Protocol):
    """Sums of a step's buckets, one after the other in an order that ranks share."""

    def filled(self, index: int) -> None:
        """Tell that backward has filled a bucket."""

    def begun(self) -> int:
        """Return how many sums had begun when backward ended; called there."""

    def wait(self, index: int) -> None:
        """Wait until the sum of a bucket has arrived."""


def sum_sequence(
    filled: Sequence[int], wanted: Sequence[int], early: int
) -> tuple[int, ...]:
    """Order in which buckets are summed, the same on all ranks.

    Those that are summed beside backward are spread evenly over the order in which it
    fills them. So are then those that are left over the next forward, which takes them
    in the order in which it wants them.

    Args:
        filled: Buckets in the order in which backward fills them.
        wanted: The same in the order in which forward wants them.
        early: How many are summed beside backward.
    """
    count = len(filled)
    early = min(early, count)
    first = [filled[place * count // early] for place in range(early)]
    return (*first, *(index for index in wanted if index not in first))


def begin_sums(
    run: SumsOfBucket, sequence: Sequence[int], device: torch.device
) -> BackgroundSums:
    """Begin the sums of a step's buckets, none of which is full yet.

    Args:
        run: Sums one of them.
        sequence: Order of the sums, equal on all ranks.
        device: Of the buckets.
    """
    if device.type == "cuda":
        return _StreamSums(run, sequence, device)
    return _ThreadSums(run, sequence)


class _ThreadSums:
    """Sums in a thread: gloo's messages go on while somebody waits for them."""

    def __init__(self, run: SumsOfBucket, sequence: Sequence[int]) -> None:
        self._turn = threading.Condition()
        self._full: set[int] = set()
        self._summed: set[int] = set()
        self._begun = 0
        self._error: BaseException | None = None
        work = threading.Thread(target=self._work, args=(run, sequence), daemon=True)
        work.start()

    def _work(self, run: SumsOfBucket, sequence: Sequence[int]) -> None:
        try:
            for index in sequence:
                with self._turn:
                    while index not in self._full:
                        self._turn.wait()
                    self._begun += 1
                run(index)
                with self._turn:
                    self._summed.add(index)
                    self._turn.notify_all()
        except BaseException as error:
            # Raised again by whoever waits for a sum.
            with self._turn:
                self._error = error
                self._turn.notify_all()

    def filled(self, index: int) -> None:
        """See :meth:`BackgroundSums.filled`."""
        with self._turn:
            self._full.add(index)
            self._turn.notify_all()

    def begun(self) -> int:
        """See :meth:`BackgroundSums.begun`."""
        with self._turn:
            return self._begun

    def wait(self, index: int) -> None:
        """See :meth:`BackgroundSums.wait`."""
        with self._turn:
            while index not in self._summed:
                if self._error is not None:
                    raise self._error
                self._turn.wait()


class _StreamSums:
    """Sums on a stream of their own, which the device runs beside a forward."""

    def __init__(
        self, run: SumsOfBucket, sequence: Sequence[int], device: torch.device
    ) -> None:
        self._run, self._left, self._device = run, list(sequence), device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._full: set[int] = set()
        self._ends: dict[int, torch.cuda.Event] = {}

    def filled(self, index: int) -> None:
        """See :meth:`BackgroundSums.filled`."""
        self._full.add(index)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        while self._left and self._left[0] in self._full:
            following = self._left.pop(0)
            with torch.cuda.stream(self._stream):
                self._run(following)
                self._ends[following] = self._stream.record_event()

    def begun(self) -> int:
        """See :meth:`BackgroundSums.begun`."""
        torch.cuda.current_stream(self._device).synchronize()
        events = self._ends.values()
        ended = sum(bool(one.query()) for one in events)  # type: ignore[no-untyped-call]
        return min(ended + 1, len(self._ends))

    def wait(self, index: int) -> None:
        """See :meth:`BackgroundSums.wait`."""
        torch.cuda.current_stream(self._device).wait_event(self._ends[index])


class BucketUpdates:
    """One step of an optimizer, taken for the parameters of one bucket after another.

    The settings are those of the moment at which it is made: a schedule may set the
    learning rate of the next step while updates are still to come.

    Args:
        optimizer: Updates each parameter by its own gradient and state alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Update some parameters, which have their gradients."""
        chosen = {id(parameter) for parameter in parameters}
        groups: list[dict[str, Any]] = []
        for group in self._groups:
            kept = [one for one in group["params"] if id(one) in chosen]
            if kept:
                groups.append({**group, "params": kept})
        whole = self._optimizer.param_groups
        self._optimizer.param_groups = groups
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = whole


class EarlyReads(TorchFunctionMode):
    """Notes parameters that a forward reads before the unit that holds them.

    Args:
        places: Bucket of each parameter, by its id.
        wanted: Buckets that the forward has waited for so far; grows meanwhile.

    Attributes:
        early: Buckets of parameters that were read while not among them.
    """

    def __init__(self, places: Mapping[int, int], wanted: Sequence[int]) -> None:
        super().__init__()
        self._places, self._wanted = places, wanted
        self.early: set[int] = set()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at what a function of torch is given, then call it."""
        for one in tree_leaves((args, kwargs)):
            bucket = (
                self._places.get(id(one)) if isinstance(one, nn.Parameter) else None
            )
            if bucket is not None and bucket not in self._wanted:
                self.early.add(bucket)
        return func(*args, **(kwargs or {}))
