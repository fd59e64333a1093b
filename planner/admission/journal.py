"""Journal of an operator's loop: what was asked, decided, intended and done.

It is an SQLite database. Every step that changes a queue is written down before it is
taken, and its outcome after, so that a loop that is killed between the two finds out.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from planner.errors import ExecutionError, MeshwrightError
from planner.schema.admission import JobRequest, Reservation

__all__ = ["Journal", "JournalError", "JournalJob", "JournalLaunch"]

_VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
    name TEXT PRIMARY KEY, request TEXT NOT NULL, status TEXT NOT NULL,
    promised INTEGER NOT NULL DEFAULT 0, left REAL NOT NULL, left_at REAL NOT NULL,
    started INTEGER NOT NULL DEFAULT 0, failures INTEGER NOT NULL DEFAULT 0,
    launches INTEGER NOT NULL DEFAULT 0, reason TEXT NOT NULL DEFAULT '',
    cause TEXT NOT NULL DEFAULT '',
    broken TEXT NOT NULL DEFAULT '', ended_s REAL
);
CREATE TABLE IF NOT EXISTS launches (
    name TEXT PRIMARY KEY, job TEXT NOT NULL, status TEXT NOT NULL, queue_id TEXT,
    device TEXT NOT NULL, devices TEXT NOT NULL, words TEXT NOT NULL, after TEXT,
    rate REAL NOT NULL, stall_s REAL NOT NULL, at_s REAL NOT NULL,
    start_s REAL, end_s REAL, missing INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, kind TEXT NOT NULL,
    job TEXT NOT NULL DEFAULT '', text TEXT NOT NULL DEFAULT ''
);
"""

#: Tables, without those that SQLite keeps for itself.
_NAMES = "SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite%'"
_JOB = ("submitted", "declined", "active", "done", "failed", "cancelled")
_LAUNCH = ("intended", "launched", "stopping", "ended")


class JournalError(ExecutionError):
    """A journal is damaged, in use, of another queue, or contradicts its queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalJob:
    """A job.

    Attributes:
        name: Name.
        request: What was asked.
        status: ``submitted``, ``declined``, ``active``, ``done``, ``failed`` or
            ``cancelled``.
        promised: Whether it is promised its deadline.
        left: Iterations left at ``left_at``.
        left_at: Time at which so many were left.
        started: Whether it has run.
        failures: Launches that failed.
        launches: Launches.
        reason: Reason of the last decision.
        cause: For a job that was declined, the cause: that of the decision, or
            ``input``.
        broken: Reason for which its promise cannot be kept, or nothing.
        ended_s: Time of its end.
    """

    name: str
    request: JobRequest
    status: str
    promised: bool
    left: float
    left_at: float
    started: bool
    failures: int
    launches: int
    reason: str
    cause: str
    broken: str
    ended_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLaunch:
    """A launch.

    Attributes:
        name: Name, used once.
        job: Job.
        status: ``intended``, ``launched``, ``stopping`` or ``ended``.
        queue_id: Identity that the queue gave it, or None.
        device: Device type.
        devices: Host to number of devices.
        words: Words of the command.
        after: Identity of the launch before.
        rate: Iterations per second.
        stall_s: Time at its start without progress.
        at_s: Time at which it was intended.
        start_s: Time at which the queue started it, or None.
        end_s: Time at which it was seen to have ended, or None.
        missing: Times in a row that the queue did not know it.
    """

    name: str
    job: str
    status: str
    queue_id: str | None
    device: str
    devices: dict[str, int]
    words: tuple[str, ...]
    after: str | None
    rate: float
    stall_s: float
    at_s: float
    start_s: float | None
    end_s: float | None
    missing: int


class Journal:
    """A journal in a folder, held by one process at a time.

    Args:
        folder: Folder; made if it is missing.
        queue: Kind of queue; None to read a journal whatever its queue.

    Raises:
        JournalError: If it is damaged, held by another process, or of another queue.
    """

    def __init__(self, folder: str | os.PathLike[str], queue: str | None) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "journal.sqlite"
        self._lock = threading.RLock()
        self._held: IO[str] | None = None
        self._base: sqlite3.Connection | None = None
        if queue is None and not self.path.is_file():
            raise JournalError(
                f"{self.folder} has no journal; name the folder that meshwright serve "
                f"was given"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if queue is not None:
                self._hold()
            self._open(queue)
        except JournalError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise JournalError(
                f"cannot write a journal in {self.folder}: {error.strerror}; choose "
                f"another folder"
            ) from error
        except sqlite3.Error as error:
            self.close()
            raise JournalError(
                f"journal {self.path} is damaged or no journal ({error}); restore it "
                f"from a copy. To start a new one, first end all mw-… jobs of the queue"
            ) from error

    def _hold(self) -> None:
        self._held = (self.folder / "lock").open("a")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JournalError(
                f"another meshwright serve holds the journal {self.path}; end it first"
            ) from error

    def _open(self, queue: str | None) -> None:
        base = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, timeout=10.0
        )
        self._base = base
        base.row_factory = sqlite3.Row
        (found,) = base.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        (version,) = base.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            raise JournalError(
                f"journal {self.path} has version {version}, newer than {_VERSION}; "
                f"upgrade meshwright"
            )
        if queue is None:
            return
        # One file, which network file systems can have, too.
        base.execute("PRAGMA journal_mode=DELETE")
        base.execute("PRAGMA synchronous=FULL")
        assert self._held is not None
        known = base.execute("SELECT 1 FROM sqlite_master WHERE name='meta'").fetchone()
        if known is None and self._held.tell():
            raise sqlite3.DatabaseError("its tables are gone")
        if known is not None:
            _require_tables(base)
        base.executescript(f"BEGIN IMMEDIATE; {_TABLES} COMMIT;")
        if not self._held.tell():
            self._held.write("A journal was made here.\n")
            self._held.flush()
        base.execute(f"PRAGMA user_version={_VERSION}")
        base.execute("INSERT OR IGNORE INTO meta VALUES ('queue', ?)", (queue,))
        (kept,) = base.execute("SELECT value FROM meta WHERE key='queue'").fetchone()
        if kept != queue:
            raise JournalError(
                f"journal {self.path} is of the queue {kept}, not of {queue}; give "
                f"--queue {kept}, or another folder"
            )
        self._require_sense()

    def _require_sense(self) -> None:
        """Refuse rows that contradict each other before the queue is asked anything."""
        jobs = {job.name for job in self.jobs()}
        for launch in self.launches():
            if launch.job not in jobs:
                raise sqlite3.DatabaseError(
                    f"{launch.name} is of job {launch.job}, which it does not have"
                )
        self.reservations()

    def close(self) -> None:
        """Close it, and let another process have it."""
        if self._base is not None:
            self._base.close()
        if self._held is not None:
            self._held.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Write all that happens inside, or nothing."""
        with self._lock:
            self._run("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._run("ROLLBACK")
                raise
            self._run("COMMIT")

    def event(self, at_s: float, kind: str, job: str = "", text: str = "") -> None:
        """Write that something happened."""
        self._run(
            "INSERT INTO events (at_s, kind, job, text) VALUES (?, ?, ?, ?)",
            (at_s, kind, job, text),
        )

    def events(self, last: int | None = None) -> list[dict[str, Any]]:
        """Return events, the first first; or only the last of them."""
        limit = -1 if last is None else last
        rows = self._run("SELECT * FROM events ORDER BY id DESC LIMIT ?", (limit,))
        return [dict(row) for row in reversed(rows)]

    def submit(self, request: JobRequest, at_s: float) -> bool:
        """Write that a job was submitted; return False if it was so before.

        Raises:
            JournalError: If another job has its name.
        """
        with self.transaction():
            known = self.job(request.name)
            if known is not None:
                if known.request == request:
                    return False
                raise JournalError(
                    f"job {request.name} was submitted with other values; give the "
                    f"new one another name"
                )
            self._run(
                "INSERT INTO jobs (name, request, status, left, left_at) "
                "VALUES (?, ?, 'submitted', ?, ?)",
                (request.name, request.to_json(), request.iterations, at_s),
            )
            self.event(at_s, "submitted", request.name)
        return True

    def job(self, name: str) -> JournalJob | None:
        """Return a job; None if there is none of that name."""
        rows = self._run("SELECT * FROM jobs WHERE name=?", (name,))
        return self._job(rows[0]) if rows else None

    def jobs(self, *status: str) -> list[JournalJob]:
        """Return jobs of some statuses, or all, in the order of submission."""
        return [self._job(row) for row in self._rows("jobs", status)]

    def set_job(self, name: str, **values: Any) -> None:
        """Change columns of a job."""
        self._set("jobs", name, values)

    def intend(self, launch: JournalLaunch) -> None:
        """Write a launch that is about to be made."""
        self._run(
            "INSERT INTO launches (name, job, status, device, devices, words, after, "
            "rate, stall_s, at_s) VALUES (?, ?, 'intended', ?, ?, ?, ?, ?, ?, ?)",
            (
                *(launch.name, launch.job, launch.device, json.dumps(launch.devices)),
                *(json.dumps(launch.words), launch.after, launch.rate),
                *(launch.stall_s, launch.at_s),
            ),
        )

    def launches(self, *status: str) -> list[JournalLaunch]:
        """Return launches of some statuses, or all, in order."""
        return [self._launch(row) for row in self._rows("launches", status)]

    def set_launch(self, name: str, **values: Any) -> None:
        """Change columns of a launch."""
        self._set("launches", name, values)

    def keep_reservations(self, reservations: tuple[Reservation, ...]) -> None:
        """Write what the last decision reserved."""
        text = json.dumps([each.to_data() for each in reservations])
        self._run("INSERT OR REPLACE INTO meta VALUES ('reservations', ?)", (text,))

    def reservations(self) -> tuple[Reservation, ...]:
        """Return what the last decision reserved."""
        rows = self._run("SELECT value FROM meta WHERE key='reservations'")
        with self._making_sense("what was reserved"):
            found = json.loads(rows[0][0]) if rows else []
            return tuple(Reservation.from_data(each) for each in found)

    def keep_devices(self, usable: int, at_s: float) -> None:
        """Write how many devices jobs may have, if it has changed."""
        rows = self._run(
            "SELECT text FROM events WHERE kind='devices' ORDER BY id DESC LIMIT 1"
        )
        if not rows or rows[0][0] != str(usable):
            self.event(at_s, "devices", text=str(usable))

    def _rows(self, table: str, status: tuple[str, ...]) -> list[sqlite3.Row]:
        """Return rows of some statuses, or all."""
        marks = ", ".join("?" * len(status))
        where = f" WHERE status IN ({marks})" if status else ""
        return self._run(f"SELECT * FROM {table}{where} ORDER BY rowid", status)  # noqa: S608

    def _set(self, table: str, name: str, values: dict[str, Any]) -> None:
        columns = ", ".join(f"{column}=?" for column in values)
        # Names of tables and columns are written in this package.
        self._run(
            f"UPDATE {table} SET {columns} WHERE name=?",  # noqa: S608
            (*values.values(), name),
        )

    def _run(self, words: str, values: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        with self._lock:
            assert self._base is not None
            try:
                return self._base.execute(words, values).fetchall()
            except sqlite3.Error as error:
                raise JournalError(
                    f"journal {self.path} cannot be used: {error}; see whether the "
                    f"disk is full"
                ) from error

    def _job(self, row: sqlite3.Row) -> JournalJob:
        data = dict(row)
        with self._making_sense(f"job {data['name']}"):
            request = JobRequest.from_json(data.pop("request"))
            data |= {"promised": bool(row["promised"]), "started": bool(row["started"])}
            found = JournalJob(request=request, **data)
            if found.status not in _JOB or not 0.0 <= found.left <= request.iterations:
                raise ValueError(f"status {found.status}, {found.left} iterations left")
            return found

    def _launch(self, row: sqlite3.Row) -> JournalLaunch:
        data = dict(row)
        with self._making_sense(f"launch {data['name']}"):
            data |= {
                "devices": dict(json.loads(row["devices"])),
                "words": tuple(json.loads(row["words"])),
            }
            found = JournalLaunch(**data)
            counts = found.devices.values()
            if found.status not in _LAUNCH or not all(
                isinstance(count, int) for count in counts
            ):
                raise ValueError(f"status {found.status}, devices {found.devices}")
            return found

    @contextlib.contextmanager
    def _making_sense(self, what: str) -> Iterator[None]:
        try:
            yield
        except (MeshwrightError, TypeError, ValueError) as error:
            raise JournalError(
                f"journal {self.path} is damaged: {what} makes no sense ({error}); "
                f"restore it from a copy"
            ) from error


def _require_tables(base: sqlite3.Connection) -> None:
    """Refuse a journal that has other tables or columns than were made."""
    with contextlib.closing(sqlite3.connect(":memory:")) as made:
        made.executescript(_TABLES)
        for (table,) in made.execute(_NAMES).fetchall():
            words = f"PRAGMA table_info({table})"
            wanted = {column[1] for column in made.execute(words)}
            found = {column[1] for column in base.execute(words)}
            if wanted != found:
                has = ", ".join(sorted(found)) or "nothing"
                raise sqlite3.DatabaseError(f"its table {table} has {has}")
