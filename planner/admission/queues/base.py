"""Queues as admission control sees them: hosts, entries, and what it asks of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from planner.errors import ExecutionError, MeshwrightError
from planner.schema.admission import OccupiedDevices, StateHost

__all__ = [
    "ANSWER_S",
    "PREFIX",
    "Cause",
    "Command",
    "Entry",
    "Launch",
    "NoAnswerError",
    "Queue",
    "QueueError",
    "Snapshot",
    "Status",
    "answer",
    "as_json",
    "field_of",
    "occupied_by_others",
    "read_queue",
]

#: Launches of admission control have names that begin so.
PREFIX = "mw-"
#: Time that a queue may take to answer.
ANSWER_S = 60.0

Status = Literal["pending", "running", "done", "failed"]
Cause = Literal["limit", "host"]


class QueueError(ExecutionError):
    """A queue refuses, or its answer makes no sense."""


class NoAnswerError(QueueError):
    """A queue did not answer in time, whether or not it did what it was asked.

    Args:
        who: Command or service that was asked.
        what: What it was asked.
        limit_s: Time that it had.
    """

    def __init__(self, who: str, what: str, limit_s: float) -> None:
        super().__init__(
            f"{who} did not {what} within {limit_s:g} s; see whether the queue runs, "
            f"or give it longer with --answer-s; nothing more is done till the next "
            f"look, which finds out what became of it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Something that a queue knows.

    Attributes:
        id: Identity that the queue gave it.
        name: Its name; that of a launch if it is one of ours.
        status: Status.
        devices: Host to the number of devices that it holds.
        start_s: Time at which it began to run, or None.
        until_s: Time at which the queue ends it at the latest, or None.
        cause: Cause of its end besides its command: its time ``limit``, or a ``host``
            that was lost; or None.
        kept: True if it has ended and the queue keeps it until it is stopped.
        note: Text that the queue shows for it and that the loop may replace, or None.
    """

    id: str
    name: str
    status: Status
    devices: Mapping[str, int] = field(default_factory=dict)
    start_s: float | None = None
    until_s: float | None = None
    cause: Cause | None = None
    kept: bool = False
    note: str | None = None

    @property
    def ours(self) -> bool:
        """True if admission control launched it."""
        return self.name.startswith(PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of a queue.

    Attributes:
        hosts: Hosts, with devices that cannot be used.
        entries: Entries, ended ones included as long as the queue knows them.
    """

    hosts: tuple[StateHost, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Devices for a job, to be started under a name that is used once.

    Attributes:
        name: Name of the launch.
        job: Name of the job.
        device: Device type, as the queue names it.
        devices: Host to number of devices.
        words: Words of the command.
        after: Identity of the launch before, which has to have ended; or None.
    """

    name: str
    job: str
    device: str
    devices: Mapping[str, int]
    words: tuple[str, ...]
    after: str | None = None

    @property
    def degree(self) -> int:
        """Number of devices."""
        return sum(self.devices.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of a queue, and what it reads from stdin.

    Attributes:
        words: Words.
        stdin: Text.
    """

    words: tuple[str, ...]
    stdin: str = ""


class Queue(Protocol):
    """A queue that runs launches."""

    @property
    def name(self) -> str:
        """Name of the kind of queue."""

    def read(self) -> Snapshot:
        """Return hosts and entries.

        Raises:
            QueueError: If there is no answer, or none that makes sense.
        """

    def launch(self, launch: Launch) -> str:
        """Start a launch, or find it if it was started before; return its identity.

        Raises:
            QueueError: If the queue refuses it or does not answer.
        """

    def stop(self, entry: str) -> None:
        """End an entry, so that it can save its state; nothing if it has ended.

        Raises:
            QueueError: If the queue refuses or does not answer.
        """

    def revoke(self, launch: str) -> None:
        """See to it that a launch which the queue does not know never runs.

        Queues whose names are used once need nothing for it.
        """

    def write_note(self, entry: str, text: str) -> None:
        """Replace the note of an entry; nothing if it has ended.

        Called only for entries that have a note.

        Raises:
            QueueError: If the queue refuses or does not answer.
        """

    def extend(self, entry: Entry, until_s: float) -> None:
        """Let a running entry run until a time at least; nothing if it has ended.

        Called only for entries that the queue would end before.

        Args:
            entry: The entry.
            until_s: The time.

        Raises:
            QueueError: If the queue refuses or does not answer.
        """


def answer(command: Command, timeout_s: float = ANSWER_S) -> str:
    """Run a command of a queue and return what it prints.

    Raises:
        QueueError: If it is not there, fails, or does not answer in time.
    """
    words = command.words
    shown = " ".join(words[:3])
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise QueueError(
            f"{words[0]} does not start ({error.strerror}); run this where the queue's "
            f"commands are on PATH"
        ) from error
    with process:
        try:
            said, complaint = process.communicate(command.stdin, timeout_s)
        except subprocess.TimeoutExpired as error:
            # A wrapper would leave the command behind, which would pile up.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise NoAnswerError(words[0], f"answer {shown!r}", timeout_s) from error
    if process.returncode:
        told = " ".join((complaint or said).split())[:500]
        raise QueueError(
            f"{shown} failed ({process.returncode}): {told}; it is tried again at the "
            f"next look"
        )
    return said


def as_json(text: str, where: str) -> Any:
    """Parse what a queue printed.

    Raises:
        QueueError: If it is not JSON of an object.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        shown = " ".join(text.split())[:60]
        raise QueueError(
            f"{where} answered {shown!r}, which is not JSON; nothing is done till it "
            f"answers JSON again"
        ) from error
    if not isinstance(found, dict):
        raise QueueError(f"{where} answered {type(found).__name__}, not an object")
    return found


def field_of(data: Any, where: str, *path: str) -> Any:
    """Return a field that an answer must have.

    Raises:
        QueueError: If it is not there.
    """
    found = data
    for name in path:
        if not isinstance(found, Mapping) or name not in found:
            raise QueueError(
                f"{where} answered without {'.'.join(path)}; is it another version? "
                f"nothing is done"
            )
        found = found[name]
    return found


def read_queue(queue: Queue) -> Snapshot:
    """Return the state of a queue, or refuse an answer that makes no sense.

    Raises:
        QueueError: If there is no answer, or none that makes sense.
    """
    try:
        return queue.read()
    except MeshwrightError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as no:
        raise QueueError(
            f"{queue.name} answered what makes no sense ({type(no).__name__}: {no}); "
            f"is it another version? nothing is done till it answers otherwise"
        ) from no


def occupied_by_others(
    entries: Sequence[Entry], now_s: float
) -> tuple[OccupiedDevices, ...]:
    """Devices of running entries that are not ours.

    Args:
        entries: Entries.
        now_s: Time; an entry that should have ended by now may end at any time.
    """
    return tuple(
        OccupiedDevices(
            name=f"{each.name} ({each.id})",
            devices=dict(each.devices),
            until_s=(
                None if each.until_s is None or each.until_s <= now_s else each.until_s
            ),
        )
        for each in entries
        if not each.ours and each.status == "running" and each.devices
    )
