"""A queue whose time is a number, for loops without processes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from planner.admission.journal import Journal
from planner.admission.operator import Operator, OperatorSettings
from planner.admission.queues import Entry, Launch, Snapshot
from planner.schema.admission import ResizePrice, StateHost
from tests.admission.small import request, table

PRICE = ResizePrice(restart_s=10.0, checkpoint_bytes=20.0, bytes_per_s=1.0)


class SimulatedQueue:
    """Two hosts of four devices; jobs run as fast as the table says.

    Attributes:
        now: Time.
        entries: All entries.
        down: Host to devices that do not work.
        shown: Whether the queue tells of its entries; False for nonsense.
        limit_s: Time after which launches are ended, or None.
    """

    name = "slurm"

    def __init__(self) -> None:
        self.now, self.entries, self.down, self.shown = 0.0, {}, {}, True
        self.limit_s: float | None = None
        self.ends: dict[str, float] = {}
        self.operator: Operator
        self.journal: Journal

    def read(self) -> Snapshot:
        """Return hosts and entries, and end what has done its work."""
        for name, end in self.ends.items():
            if self.entries[name].status != "running":
                continue
            until = self.entries[name].until_s
            if until is not None and until <= min(end, self.now):
                self._set(name, "failed", cause="limit")
            elif end <= self.now:
                self._set(name, "done")
        hosts = tuple(
            StateHost(
                name=f"h{at}", device="gpu", devices=4, down=self.down.get(f"h{at}", 0)
            )
            for at in range(2)
        )
        found = tuple(self.entries.values()) if self.shown else ()
        return Snapshot(hosts=hosts, entries=found)

    def launch(self, launch: Launch) -> str:
        """Start a launch."""
        assert launch.name not in self.entries, "launched twice"
        running = [each for each in self.entries.values() if each.status == "running"]
        assert launch.job not in {each.name.split("-")[1] for each in running}
        (kept,) = [x for x in self.journal.launches() if x.name == launch.name]
        job = self.journal.job(launch.job)
        self.entries[launch.name] = Entry(
            id=launch.name,
            name=launch.name,
            status="running",
            devices=launch.devices,
            start_s=self.now,
            until_s=None if self.limit_s is None else self.now + self.limit_s,
            note="meshwright",
        )
        self.ends[launch.name] = self.now + kept.stall_s + job.left / kept.rate
        return launch.name

    def stop(self, entry: str) -> None:
        """End an entry."""
        if self.entries[entry].status == "running":
            self._set(entry, "failed")

    def revoke(self, launch: str) -> None:
        """Nothing arrives late here."""

    def write_note(self, entry: str, text: str) -> None:
        """Replace a note."""
        self.entries[entry] = replace(self.entries[entry], note=text)

    def extend(self, entry: Entry, until_s: float) -> None:
        """Raise a time limit."""
        assert until_s > entry.until_s
        self.entries[entry.id] = replace(self.entries[entry.id], until_s=until_s)

    def _set(self, name: str, status: str, *, cause: str | None = None) -> None:
        entry = self.entries[name]
        self.entries[name] = Entry(id=name, name=name, status=status, cause=cause)
        assert entry.devices


def simulate(folder: Path, jobs: int, seed: int) -> Journal:
    """Serve jobs that come at random until all have ended; return the journal."""
    queue, draw = SimulatedQueue(), random.Random(seed)
    journal = Journal(folder, "slurm")
    settings = OperatorSettings(
        throughputs=table(spread=0.9), price=PRICE, guard_s=20.0
    )
    operator = Operator(queue, journal, settings, clock=lambda: queue.now)
    queue.journal = journal
    due = 0.0
    number = 0
    while number < jobs or journal.jobs("active", "submitted"):
        if number < jobs and due <= queue.now:
            size = draw.uniform(50, 400)
            deadline = queue.now + 30 + size / 3 * draw.uniform(0.8, 4)
            best = draw.random() < 0.2
            job = request(
                f"j{number}",
                size,
                None if best else deadline,
                submitted_s=queue.now,
                command=("train",),
            )
            journal.submit(job, queue.now)
            number += 1
            due += draw.expovariate(1 / 30)
        assert operator.tick(), journal.events(1)
        queue.now += 3.0
        assert queue.now < 1e5
    return journal
