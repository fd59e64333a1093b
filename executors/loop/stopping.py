"""Signals that end a run behind a step, and the agreement of all ranks on that step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence, Set
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from planner.errors import ExecutionError

__all__ = ["StopSignals", "agree_on_stop", "signal_numbers"]


def signal_numbers(names: Sequence[str]) -> tuple[signal.Signals, ...]:
    """Signals by their names, each once.

    Args:
        names: With or without ``SIG``.

    Raises:
        ExecutionError: If there is no such signal, or no process can handle it.
    """
    found: list[signal.Signals] = []
    for name in names:
        full = f"SIG{name.upper().removeprefix('SIG')}"
        one = signal.Signals.__members__.get(full)
        if one is None or one in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT):
            raise ExecutionError(
                f"signal {name!r} cannot end a run behind a step; name another, such "
                f"as TERM, USR1 or USR2"
            )
        if one not in found:
            found.append(one)
    return tuple(found)


class StopSignals:
    """A context that remembers a signal in place of dying of it.

    In the block the signals are held back from this thread, and so from processes that
    it starts: where a whole job is sent one, workers that load data go on. Does nothing
    outside the main thread, where Python takes no signals.

    Args:
        signals: Which.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._signals = frozenset(signals)
        self._before: list[tuple[signal.Signals, Any]] = []
        self._mask: Set[signal.Signals | int] = frozenset()
        self._received: str | None = None

    def received(self) -> str | None:
        """Name of the first signal that came; None while none has."""
        if self._before and self._received is None:
            pending = sorted(self._signals & signal.sigpending())
            if pending:
                self._received = signal.Signals(pending[0]).name
        return self._received

    def _remember(self, number: int, _: FrameType | None) -> None:
        # It came to a thread that was there before the block.
        self._received = self._received or signal.Signals(number).name

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
            for number in self._signals:
                before = signal.signal(number, self._remember)
                self._before.append((number, before or signal.SIG_DFL))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._before:
            return
        # One that is still held back would end the process now.
        while self._signals & signal.sigpending():
            signal.sigwait(self._signals & signal.sigpending())
        for number, before in self._before:
            signal.signal(number, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


def agree_on_stop(reason: str | None, device: torch.device) -> str | None:
    """Reason to end the run that any rank has; collective over all of them.

    One all-reduce of 4 bytes while there is none.

    Args:
        reason: Of this rank; None to go on.
        device: Of this process.

    Returns:
        Reason of the first rank that has one, the same on all ranks.
    """
    found = torch.tensor([int(reason is not None)], dtype=torch.int32, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if not found.item():
        return None
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, reason)
    return next(one for one in everyone if one is not None)
