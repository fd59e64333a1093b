"""The operator's loop in simulated time, and the report of its journal."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from planner.admission.journal import Journal, JournalError
from planner.admission.notes import kept_until, launch_note
from planner.admission.operator import Operator, OperatorSettings, progress
from planner.cli.main import main
from planner.report.queue import read_queue_report
from planner.schema.admission import Reservation, ReservedSegment
from planner.units import format_seconds
from tests.admission.simulated import PRICE, SimulatedQueue, simulate
from tests.admission.small import request, table


def _loop(
    folder: Path, guard_s: float = 10.0
) -> tuple[SimulatedQueue, Journal, Operator]:
    queue = SimulatedQueue()
    queue.journal = Journal(folder, "slurm")
    settings = OperatorSettings(throughputs=table(), price=PRICE, guard_s=guard_s)
    operator = Operator(queue, queue.journal, settings, clock=lambda: queue.now)
    return queue, queue.journal, operator


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    simulate(folder, jobs=25, seed=1).close()
    return folder


def test_all_promises_are_kept_while_jobs_are_moved_about(served: Path) -> None:
    journal = Journal(served, None)
    jobs = journal.jobs()
    promised = [job for job in jobs if job.promised]
    assert len(promised) >= 8
    assert all(job.ended_s <= job.request.deadline_s for job in promised)
    assert not any(job.broken for job in jobs)
    assert {job.status for job in jobs} == {"done", "declined"}
    # Some gave way, and went on.
    assert max(job.launches for job in jobs) >= 2
    journal.close()


def test_the_report_tells_jobs_causes_and_costs(served: Path, tmp_path: Path) -> None:
    page, text = tmp_path / "page.html", tmp_path / "page.md"
    assert main(["report", str(served), "-o", str(page), "--md", str(text)]) == 0
    journal = Journal(served, None)
    jobs, launches = journal.jobs(), journal.launches()
    journal.close()
    told = text.read_text()
    assert f"jobs: {len(jobs)}, promised: {sum(j.promised for j in jobs)}" in told
    causes = [job.cause for job in jobs if job.status == "declined"]
    assert f"| no schedule was found | {causes.count('search')} |" in told
    assert f"| too slow even alone | {causes.count('alone')} |" in told
    pauses = {}
    for each in read_queue_report(str(served)).changes:
        pair = f"| {each['for']} | {each['job']} |"
        if each["kind"] == "paused":
            pauses[pair] = each["at_s"]
        elif each["kind"] == "resumed" and pair in pauses:
            still = format_seconds(each["at_s"] - pauses.pop(pair) + each["stall_s"])
            assert f"{pair} 1 x paused, 1 x resumed | {still} |" in told
    assert told.count("1 x paused, 1 x resumed") >= 3
    assert pauses == {}
    shown = page.read_text()
    assert all(f'data-tip="{each.name}\n' in shown for each in launches)
    end = read_queue_report(str(served)).end_s
    dues = [job.request.deadline_s for job in jobs if job.promised]
    assert shown.count('class="limit"') == sum(due <= end for due in dues) > 0


def test_a_deadline_within_the_guard_is_not_promised(tmp_path: Path) -> None:
    _, journal, operator = _loop(tmp_path, guard_s=60.0)
    # It takes 11 s, and no time is left for what queues take.
    journal.submit(request("near", 1, 15.0), 0.0)
    journal.submit(request("far", 1, 75.0), 0.0)
    assert operator.tick()
    near = journal.job("near")
    assert (near.status, near.cause) == ("declined", "alone")
    assert near.reason.endswith("(deadlines count 60 s early, --guard-s)")
    assert journal.job("far").promised
    journal.close()


def test_a_promise_that_a_failure_breaks_is_told_once(tmp_path: Path) -> None:
    queue, journal, operator = _loop(tmp_path)
    journal.submit(request("a", 300, 140.0, command=("train",)), 0.0)
    operator.tick()
    assert journal.job("a").promised
    queue.down = {"h0": 4, "h1": 3}
    for _ in range(3):
        queue.now += 10.0
        operator.tick()
    broken = [each for each in journal.events() if each["kind"] == "promise broken"]
    assert [each["job"] for each in broken] == ["a"]
    assert "7 devices are down" in journal.job("a").broken
    journal.close()


def test_what_a_queue_forgets_is_launched_anew_and_ended_if_it_comes_back(
    tmp_path: Path,
) -> None:
    queue, journal, operator = _loop(tmp_path)
    journal.submit(request("a", 300, 900.0, command=("train",)), 0.0)
    operator.tick()
    queue.shown = False
    for _ in range(2):
        queue.now += 1.0
        operator.tick()
    assert list(queue.entries) == ["mw-a-1"]
    # The queue says again what it runs, before it was given up.
    queue.shown = True
    operator.tick()
    assert [each.missing for each in journal.launches()] == [0]
    del queue.entries["mw-a-1"], queue.ends["mw-a-1"]
    for _ in range(3):
        queue.now += 1.0
        operator.tick()
    assert list(queue.entries) == ["mw-a-2"]
    journal.close()


def _minute(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).isoformat(timespec="minutes")


def test_a_launch_shows_its_promise(tmp_path: Path) -> None:
    queue, journal, operator = _loop(tmp_path)
    journal.submit(request("a", 600, 420.0, command=("train",)), 0.0)
    operator.tick()
    operator.tick()
    assert queue.entries["mw-a-1"].note == f"meshwright: promised by {_minute(420)}"
    journal.set_job("a", broken="devices are down")
    # A note is written once a minute at most.
    for now, said in ((30.0, f"promised by {_minute(420)}"), (61.0, "broken")):
        queue.now = now
        operator.tick()
        assert queue.entries["mw-a-1"].note.endswith(said)
    journal.close()


@pytest.mark.parametrize(
    ("later", "said", "kept"),
    [
        ([], "", 600.0),
        ([(600.0, 4)], "", 900.0),
        ([(600.0, 2)], f"; 2 gpu from {_minute(600)}", 600.0),
        ([(700.0, 4)], f"; paused from {_minute(600)}", 600.0),
    ],
)
def test_a_launch_shows_what_changes_next(
    tmp_path: Path, later: list[tuple[float, int]], said: str, kept: float
) -> None:
    journal = Journal(tmp_path, "slurm")
    journal.submit(request("a", 600, None), 0.0)
    segments = tuple(
        ReservedSegment(
            start_s=start_s,
            end_s=start_s + 300.0 if start_s else 600.0,
            device="gpu",
            degree=degree,
            devices={"h0": degree},
            stall_s=0.0,
            iterations_per_s=1.0,
        )
        for start_s, degree in [(0.0, 4), *later]
    )
    given = Reservation(job="a", segments=segments, finish_s=segments[-1].end_s)
    note = launch_note(journal.job("a"), given, 60.0)
    journal.close()
    assert note == f"meshwright: no promise{said}"
    assert kept_until(given, 60.0) == kept
    assert kept_until(given, 9e9) is None


def test_a_time_limit_is_raised_or_ends_a_launch_without_blame(tmp_path: Path) -> None:
    queue, journal, operator = _loop(tmp_path)
    queue.limit_s = 50.0
    journal.submit(request("a", 900, 900.0, command=("train",)), 0.0)
    operator.tick()
    operator.tick()
    entry = queue.entries["mw-a-1"]
    end = journal.reservations()[0].finish_s
    assert entry.until_s == pytest.approx(2 * end + 10.0)
    queue.entries["mw-a-1"] = replace(entry, until_s=50.0)
    left = journal.job("a").left
    queue.now = 51.0
    operator.tick()
    job = journal.job("a")
    assert (job.failures, job.launches) == (0, 2)
    assert job.left < left
    journal.close()


def test_the_report_marks_failures_and_what_they_block(tmp_path: Path) -> None:
    queue, journal, operator = _loop(tmp_path)
    journal.submit(request("a", 900, 900.0, command=("train",)), 0.0)
    journal.submit(request("b", 100, 900.0, command=("train",)), 0.0)
    operator.tick()
    operator.tick()
    for number in (1, 2, 3):
        queue.now += 10.0
        queue.stop(f"mw-a-{number}")
        operator.tick()
        operator.tick()
    while journal.jobs("active"):
        queue.now += 10.0
        operator.tick()
    journal.close()
    report = read_queue_report(str(tmp_path))
    assert [bar.name for bar in report.bars if bar.failed] == [
        f"mw-a-{number}" for number in (1, 2, 3)
    ]
    assert [(job.name, job.cause) for job in report.jobs] == [
        ("a", "failed"),
        ("b", ""),
    ]
    assert report.jobs[0].blocked_s == 30.0
    text = tmp_path / "report.md"
    assert main(["report", str(tmp_path), "--md", str(text)]) == 0
    assert "| its launches failed | 1 |" in text.read_text()


def test_progress_that_is_reported_counts(tmp_path: Path) -> None:
    queue, journal, operator = _loop(tmp_path)
    journal.submit(request("a", 300, 900.0, command=("train",)), 0.0)
    operator.tick()
    first = journal.reservations()[0].finish_s
    queue.now = 20.0
    progress(journal, "a", 150, 20.0)
    operator.tick()
    rate = journal.launches()[0].rate
    assert journal.reservations()[0].finish_s == pytest.approx(20 + 150 / rate)
    assert journal.reservations()[0].finish_s < first
    with pytest.raises(JournalError, match="says 301 of 300 iterations"):
        progress(journal, "a", 301, 20.0)
    journal.close()


def test_a_clock_that_goes_back_is_refused(tmp_path: Path) -> None:
    queue, journal, operator = _loop(tmp_path)
    queue.now = 1000.0
    operator.tick()
    queue.now = 0.0
    with pytest.raises(JournalError, match="set the clock, or wait"):
        operator.tick()
    journal.close()


def test_a_launch_on_other_devices_is_refused(tmp_path: Path) -> None:
    queue, journal, operator = _loop(tmp_path)
    journal.submit(request("a", 300, 900.0, command=("train",)), 0.0)
    operator.tick()
    entry = queue.entries["mw-a-1"]
    queue.entries["mw-a-1"] = type(entry)(
        id=entry.id, name=entry.name, status="running", devices={"h1": 4}
    )
    with pytest.raises(JournalError, match="it is launched anew"):
        operator.tick()
    journal.close()


def test_journals_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "slurm")
    journal.submit(request("a", 300, 900.0), 0.0)
    with pytest.raises(JournalError, match="another meshwright serve holds"):
        Journal(tmp_path, "slurm")
    with pytest.raises(JournalError, match="was submitted with other values"):
        journal.submit(request("a", 301, 900.0), 0.0)
    journal.close()
    with pytest.raises(JournalError, match="is of the queue slurm, not of ray"):
        Journal(tmp_path, "ray")
    path = tmp_path / "journal.sqlite"
    kept = path.read_bytes()
    # Cut off, as a copy that was not finished, or overwritten.
    for found in (kept[: len(kept) // 2], b"", b"no database" * 100):
        path.write_bytes(found)
        with pytest.raises(JournalError, match="is damaged or no journal"):
            Journal(tmp_path, "slurm")
    path.write_bytes(kept)
    again = Journal(tmp_path, "slurm")
    assert [job.name for job in again.jobs("submitted")] == ["a"]
    again.close()
    with pytest.raises(JournalError, match="has no journal; name the folder"):
        Journal(tmp_path / "other", None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("DROP TABLE launches", "its table launches has nothing"),
        (
            "ALTER TABLE jobs DROP COLUMN cause",
            "its table jobs has broken, ended_s, failures",
        ),
        ("UPDATE jobs SET request='{'", "job a makes no sense"),
        ("UPDATE jobs SET status='gone'", "job a makes no sense .status gone"),
        ("UPDATE jobs SET left=-5", "-5.0 iterations left"),
        ("UPDATE jobs SET left='few'", "job a makes no sense"),
        ("UPDATE launches SET devices='[1]'", "launch mw-a-1 makes no sense"),
        ("UPDATE launches SET job='b'", "mw-a-1 is of job b, which it does not have"),
        ("UPDATE meta SET value='{' WHERE key='reservations'", "what was reserved"),
    ],
)
def test_a_journal_that_makes_no_sense_launches_nothing(
    tmp_path: Path, words: str, said: str
) -> None:
    _, journal, operator = _loop(tmp_path)
    journal.submit(request("a", 300, 900.0, command=("train",)), 0.0)
    operator.tick()
    journal.close()
    with contextlib.closing(sqlite3.connect(journal.path)) as base:
        base.execute(words)
        base.commit()
    with pytest.raises(JournalError, match=f"is damaged.*{said}.*restore it"):
        Journal(journal.folder, "slurm")


def test_an_answer_of_other_types_is_a_problem_that_is_told(tmp_path: Path) -> None:
    queue, journal, operator = _loop(tmp_path)
    journal.submit(request("a", 300, 900.0, command=("train",)), 0.0)
    known = queue.read
    queue.read = lambda: tuple(None)
    assert not operator.tick()
    assert "answered what makes no sense (TypeError" in journal.events(1)[0]["text"]
    assert not queue.entries
    queue.read = known
    assert operator.tick()
    assert list(queue.entries) == ["mw-a-1"]
    journal.close()
