"""A thread that reads the next batches while the last one is trained on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from executors.data.batches import Batch
from executors.data.data_source import DataSource
from executors.data.parts import BatchPart

__all__ = ["Prefetched"]

#: Batches that are ready before they are asked for.
_DEPTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A batch, the position behind it, or the error in place of both."""

    batch: Batch | BatchPart | None = None
    state: dict[str, Any] | None = None
    error: BaseException | None = None


class Prefetched(DataSource):
    """A source that is read ahead of, in a thread.

    Positions are those of the batches that were given, not of those that were read. The
    source must draw no random numbers of torch's own generator.

    Args:
        source: Read by the thread alone while that runs.
        pin_memory: Put batches into memory that a GPU copies from at once.
        depth: Batches to read ahead.
    """

    def __init__(
        self, source: DataSource, *, pin_memory: bool = False, depth: int = _DEPTH
    ) -> None:
        self._source, self._pin, self._depth = source, pin_memory, depth
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._ready: queue.Queue[_Ready] = queue.Queue(depth)
        self._next = 0
        self._state = source.state_dict()

    def batch(self, step: int) -> Batch | BatchPart:
        """Give the batch of a step; begin anew there if it is not the next."""
        if self._thread is None or step != self._next:
            self._end_thread()
            self._start(step)
        ready = self._ready.get()
        if ready.error is not None:
            self.close()
            raise ready.error
        assert ready.batch is not None
        assert ready.state is not None
        self._state, self._next = ready.state, step + 1
        return ready.batch

    def _start(self, step: int) -> None:
        self._stop, self._ready = threading.Event(), queue.Queue(self._depth)
        self._thread = threading.Thread(
            target=self._read, args=(step, self._stop, self._ready), daemon=True
        )
        self._thread.start()

    def _read(
        self, step: int, stop: threading.Event, ready: queue.Queue[_Ready]
    ) -> None:
        while not stop.is_set():
            try:
                batch = self._source.batch(step)
                batch = self._pinned(batch) if self._pin else batch
                found = _Ready(batch=batch, state=self._source.state_dict())
            except BaseException as error:
                found = _Ready(error=error)
            while not stop.is_set():
                try:
                    ready.put(found, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if found.error is not None:
                return
            step += 1

    @staticmethod
    def _pinned(batch: Batch | BatchPart) -> Batch | BatchPart:
        if isinstance(batch, BatchPart):
            values = {name: v.pin_memory() for name, v in batch.values.items()}
            return replace(batch, values=values)
        return {name: value.pin_memory() for name, value in batch.items()}

    def state_dict(self) -> dict[str, Any]:
        """Position behind the last batch that was given."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        self._end_thread()
        self._source.load_state_dict(state)
        self._state = dict(state)

    def close(self) -> None:
        """End the thread, and what the source has open."""
        self._end_thread()
        self._source.close()

    def _end_thread(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
