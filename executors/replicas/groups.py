"""Groups of replicas that need no larger group, and work that may be left behind."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["Group", "Task"]

_Result = TypeVar("_Result")
#: State is sent in pieces of so many bytes.
_PIECE_BYTES = 25 * 2**20


class Group:
    """Some replicas, connected by gloo.

    Unlike groups of ``torch.distributed.new_group`` it needs no larger group that all
    members belong to. Seen to work on torch 2.13.

    Args:
        store: For its members alone.
        index: Place of this process among them.
        size: Number of members; a group of one sends nothing.
        timeout_s: Longest that an operation may take, in seconds.
    """

    def __init__(self, store: Store, index: int, size: int, timeout_s: float) -> None:
        self.index, self.size = index, size
        #: Bytes that :meth:`ring_all_reduce` has sent.
        self.sent_bytes = 0
        # torch's stubs do not list what a backend can do.
        self._backend: Any = None
        if size > 1:
            timeout = datetime.timedelta(seconds=timeout_s)
            self._backend = dist.ProcessGroupGloo(store, index, size, timeout)

    def all_reduce(self, values: torch.Tensor) -> None:
        """Add up values of all members, in place.

        Args:
            values: On the CPU; equal shapes on all members.
        """
        if self._backend is not None:
            self._backend.allreduce([values]).wait()

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all members, in their order.

        Args:
            values: On the CPU. Shape [n, ...].

        Returns:
            Shape [size * n, ...].
        """
        if self._backend is None:
            return values
        every = values.new_empty(self.size * len(values), *values.shape[1:])
        self._backend.allgather([list(every.chunk(self.size))], [values]).wait()
        return every

    def ring_all_reduce(self, values: torch.Tensor) -> None:
        """Add up values of all members around a ring, in place; equal bits on all.

        Each member sends 2 (C - 1)/C of its bytes to the next of C, as parts of equal
        size, give or take one value. A part is added up in the order of members from
        the one behind its own on, and its bits then travel on.

        Args:
            values: On the CPU; equal shapes on all members. Shape [n].
        """
        parts = values.tensor_split(self.size)
        for turn in range(2 * (self.size - 1)):
            sent = parts[(self.index - turn) % self.size]
            part = parts[(self.index - turn - 1) % self.size]
            adds = turn < self.size - 1
            received = torch.empty_like(part) if adds else part
            self._pass_on(sent, received)
            if adds:
                part += received

    def _pass_on(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Send values to the next member while those of the one before come in."""
        assert self._backend is not None
        works = []
        if sent.numel():
            following = (self.index + 1) % self.size
            works.append(self._backend.send([sent], following, 0))
            self.sent_bytes += sent.nbytes
        if received.numel():
            before = (self.index - 1) % self.size
            works.append(self._backend.recv([received], before, 0))
        for work in works:
            work.wait()

    def send(self, values: torch.Tensor) -> None:
        """Send bytes from the first of two members to the second.

        Args:
            values: Of dtype uint8, on the CPU. Shape [n].
        """
        assert self._backend is not None
        for part in (torch.tensor([len(values)]), *torch.split(values, _PIECE_BYTES)):
            self._backend.send([part], 1, 0).wait()

    def receive(self) -> torch.Tensor:
        """Return what the first of two members sends."""
        assert self._backend is not None
        length = torch.zeros(1, dtype=torch.int64)
        self._backend.recv([length], 0, 0).wait()
        values = torch.empty(int(length), dtype=torch.uint8)
        for part in torch.split(values, _PIECE_BYTES):
            self._backend.recv([part], 0, 0).wait()
        return values


class Task(Generic[_Result]):
    """A function that is called in a thread, which may be left behind.

    Nothing interrupts an operation of gloo whose peer hangs, and its group cannot be
    destroyed before it has timed out.
    """

    def __init__(self, work: Callable[[], _Result]) -> None:
        self.results: list[_Result] = []
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._call, name="replicas", daemon=True)
        self._thread.start()

    def _call(self) -> None:
        try:
            self.results.append(self._work())
        except Exception as error:  # raised again, or told, by whoever waits
            self.error = error

    @property
    def over(self) -> bool:
        """True if the function has returned or raised."""
        return not self._thread.is_alive()

    def join(self, seconds: float) -> bool:
        """Wait so long at most; True if it is over."""
        self._thread.join(seconds)
        return self.over
