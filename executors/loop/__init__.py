"""The loop of a run: steps, evaluations, checkpoints, callbacks, and early ends."""

from __future__ import annotations

from executors.loop.callbacks import (
    Callback,
    LoopState,
    StepReport,
    TrainedMember,
)
from executors.loop.loggers import LOGGERS, make_logger
from executors.loop.loop import Loop
from executors.loop.profiling import ProfilerTrace
from executors.loop.stopping import StopSignals, signal_numbers

__all__ = [
    "LOGGERS",
    "Callback",
    "Loop",
    "LoopState",
    "ProfilerTrace",
    "StepReport",
    "StopSignals",
    "TrainedMember",
    "make_logger",
    "signal_numbers",
]
