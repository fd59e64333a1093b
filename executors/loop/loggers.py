"""Loggers: callbacks that write the numbers of a run, on one process."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from executors.loop.callbacks import Callback, LoopState, StepReport
from executors.loop.metrics import predicted_metrics, step_metrics
from planner.errors import ExecutionError, UnknownNameError
from planner.schema.base import spell_non_finite

__all__ = ["LOGGERS", "JsonLines", "TensorBoard", "WeightsAndBiases", "make_logger"]


class _Logger(Callback):
    """Writes metrics on the process that leads."""

    needs_grad_norm = True
    reads_weights = False

    def open(self, state: LoopState) -> None:
        """Open what is written to; on the process that leads alone."""

    def write(self, event: str, done: int, values: Mapping[str, Any]) -> None:
        """Write numbers.

        Args:
            event: ``step``, ``evaluate`` or ``save``.
            done: Steps done.
            values: By name.
        """

    def close(self) -> None:
        """Close what was opened."""

    def on_start(self, state: LoopState) -> None:
        """See :meth:`Callback.on_start`."""
        if state.leads:
            self.open(state)

    def on_step(self, state: LoopState, report: StepReport) -> None:
        """See :meth:`Callback.on_step`."""
        if state.leads:
            prepared = state.prepared
            device = prepared.trainer.place.device
            values: dict[str, Any] = dict(step_metrics(prepared.plan, report, device))
            if report.skipped:
                values["skipped"] = 1
            self.write("step", report.step + 1, values)

    def on_evaluate(self, state: LoopState, done: int, loss: float) -> None:
        """See :meth:`Callback.on_evaluate`."""
        if state.leads:
            self.write("evaluate", done, {"eval_loss": loss})

    def on_end(self, state: LoopState, error: BaseException | None) -> None:
        """See :meth:`Callback.on_end`."""
        if state.leads:
            self.close()


class JsonLines(_Logger):
    """Appends a line of JSON for the start, each step, evaluation and checkpoint.

    The first line has what the plan predicts, under ``predicted``.

    Args:
        file: Its folder is made if need be.

    Raises:
        ExecutionError: When the run starts, if it cannot be written.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self._file = Path(file)
        self._stream: IO[str] | None = None

    def open(self, state: LoopState) -> None:
        """Append to the file, and write the first line."""
        plan = state.prepared.plan
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # Line by line, so that what a killed run did is there.
            self._stream = self._file.open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            raise ExecutionError(
                f"cannot write the log {self._file}: {error.strerror}; name another "
                f"file"
            ) from error
        about = {
            "model": plan.model.name,
            "plan": plan.strategy.label(),
            "steps": state.steps,
            "time": time.time(),
            "predicted": predicted_metrics(plan),
        }
        self.write("start", state.first, about)

    def write(self, event: str, done: int, values: Mapping[str, Any]) -> None:
        """Write one line."""
        if self._stream is not None:
            line = {"event": event, "step": done, **values}
            self._stream.write(json.dumps(spell_non_finite(line)) + "\n")

    def on_save(self, state: LoopState, folder: Path) -> None:
        """See :meth:`Callback.on_save`."""
        if state.leads:
            self.write("save", state.prepared.done, {"folder": str(folder)})

    def on_end(self, state: LoopState, error: BaseException | None) -> None:
        """Write why the run ended, and close the file."""
        why = {"error": str(error)} if error is not None else {"stopped": state.reason}
        if state.leads:
            self.write("end", state.prepared.done, why)
        super().on_end(state, error)

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class TensorBoard(_Logger):
    """Writes scalars for TensorBoard, predictions under ``predicted``.

    Steps of a folder's earlier run from where this one goes on are hidden.

    Args:
        folder: For event files.

    Raises:
        ExecutionError: If tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(folder)
        self._writer: Any = None
        try:
            self._module: Any = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise ExecutionError(
                f"the log {self._folder} needs tensorboard, which is not installed: "
                f"pip install tensorboard"
            ) from error

    def open(self, state: LoopState) -> None:
        """Make the writer, and write what the plan predicts."""
        self._writer = self._module.SummaryWriter(
            self._folder, purge_step=state.first + 1 if state.first else None
        )
        predicted = predicted_metrics(state.prepared.plan)
        self.write(
            "start",
            state.first,
            {f"predicted/{name}": value for name, value in predicted.items()},
        )

    def write(self, event: str, done: int, values: Mapping[str, Any]) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, done)
        if event != "step":
            self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases(_Logger):
    """Logs to Weights & Biases; ``WANDB_MODE=offline`` keeps the log on this machine.

    Args:
        project: Its name there.

    Raises:
        ExecutionError: If wandb is not installed.
    """

    def __init__(self, project: str) -> None:
        self._project = project
        self._run: Any = None
        try:
            self._module: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise ExecutionError(
                f"the log of project {project!r} needs wandb, which is not installed: "
                f"pip install wandb"
            ) from error

    def open(self, state: LoopState) -> None:
        """Begin a run of the project, whose configuration has the prediction."""
        plan = state.prepared.plan
        self._run = self._module.init(
            project=self._project,
            config={
                "model": plan.model.name,
                "plan": plan.strategy.label(),
                "steps": state.steps,
                "first_step": state.first,
                "predicted": predicted_metrics(plan),
            },
        )

    def write(self, event: str, done: int, values: Mapping[str, Any]) -> None:
        """Log numbers of a step."""
        del event
        self._run.log(dict(values), step=done)

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


#: Makes a logger of what the command line is given: a file, folder or project.
LOGGERS: Mapping[str, Callable[[str], Callback]] = {
    "json": JsonLines,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def make_logger(name: str, target: str) -> Callback:
    """Make a logger by its name.

    Args:
        name: One of :data:`LOGGERS`.
        target: File, folder or project.

    Raises:
        UnknownNameError: If there is no such logger.
        ExecutionError: If its library is not installed.
    """
    if name not in LOGGERS:
        raise UnknownNameError("logger", name, LOGGERS)
    return LOGGERS[name](target)
