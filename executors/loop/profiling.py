"""Traces of some steps by torch's profiler, one file a rank."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from executors.loop.callbacks import Callback, LoopState, StepReport
from planner.errors import ExecutionError

__all__ = ["ProfilerTrace", "steps_to_profile"]

_STEPS = re.compile(r"(\d+)(?::(\d+))?")


def steps_to_profile(text: str) -> tuple[int, int]:
    """First and last of the steps that ``5:8``, or ``5``, names; from 1.

    Raises:
        ExecutionError: If the text names none.
    """
    found = _STEPS.fullmatch(text)
    first = int(found[1]) if found else 0
    last = int(found[2] or first) if found else 0
    if not 1 <= first <= last:
        raise ExecutionError(
            f"profile={text!r} names no steps; give the first and the last, counted "
            f"from 1: 5:8"
        )
    return first, last


class ProfilerTrace(Callback):
    """Writes a Chrome trace of some steps on each rank, ``rank-0-steps-5-8.json``.

    Open it at https://ui.perfetto.dev. Steps that are profiled are slower.

    Args:
        steps: As for :func:`steps_to_profile`.
        folder: For the traces; made if need be.

    Raises:
        ExecutionError: If the steps are none, or a trace cannot be written.
    """

    reads_weights = False

    def __init__(self, steps: str, folder: str | os.PathLike[str]) -> None:
        self._first, self._last = steps_to_profile(steps)
        self._folder = Path(folder)
        self._profiler: Any = None

    def on_start(self, state: LoopState) -> None:
        """Start if the first step is to be profiled."""
        if self._first > state.steps or self._last <= state.first:
            raise ExecutionError(
                f"profile={self._first}:{self._last}, but the run does steps "
                f"{state.first + 1} to {state.steps}; name some of these"
            )
        self._start_if_due(state.first, state)

    def _start_if_due(self, done: int, state: LoopState) -> None:
        if self._profiler is not None or not self._first <= done + 1 <= self._last:
            return
        activities = [ProfilerActivity.CPU]
        if state.prepared.trainer.place.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def on_step(self, state: LoopState, report: StepReport) -> None:
        """Start before the first step, and write the trace after the last."""
        done = report.step + 1
        if self._profiler is None:
            self._start_if_due(done, state)
        elif done >= self._last:
            self._write(state)

    def on_end(self, state: LoopState, error: BaseException | None) -> None:
        """Write what there is of a run that ends before."""
        if self._profiler is not None:
            self._write(state)

    def _write(self, state: LoopState) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        rank = state.prepared.trainer.place.rank
        name = f"rank-{rank}-steps-{self._first}-{self._last}.json"
        half = self._folder / f".{name}.tmp"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(half))
            half.replace(self._folder / name)
        except OSError as error:
            raise ExecutionError(
                f"cannot write a trace to {self._folder}: {error.strerror}; name "
                f"another folder"
            ) from error
