"""Queues that hang, answer by halves, are not there, fail, or answer too late."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from planner.admission.journal import Journal
from planner.admission.operator import Operator, OperatorSettings
from planner.admission.queues import (
    KueueQueue,
    Launch,
    QueueError,
    RayQueue,
    SlurmQueue,
)
from planner.admission.queues.base import ANSWER_S, Command, NoAnswerError, answer
from planner.admission.throughputs import load_throughputs
from planner.schema.admission import JobRequest
from tests.admission.serving import Serving, wait_for

#: Time after which a silent command is given up here.
SHORT_S = 0.5


class _Hasty:
    """A queue whose commands have little time."""

    def __init__(
        self, queue: SlurmQueue | KueueQueue, launch_s: float, read_s: float
    ) -> None:
        self._queue, self.asked = queue, list[str]()
        self._hasty = replace(queue, answer_s=launch_s)
        self.read = replace(queue, answer_s=read_s).read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def launch(self, launch: Launch) -> str:
        self.asked.append(launch.name)
        return self._hasty.launch(launch)


class Faulty:
    """A queue that runs jobs, a journal, and loops over them.

    Args:
        serving: Folders and commands.
        queue: The queue.
    """

    def __init__(self, serving: Serving, queue: SlurmQueue | KueueQueue) -> None:
        self.serving, self.queue = serving, queue
        self.asked: list[str] = []
        self.journal = Journal(serving.journal, queue.name)
        table = load_throughputs(serving.folder / "table.csv")
        self.settings = OperatorSettings(throughputs=table, guard_s=5.0)

    def submit(self, *names: str) -> None:
        """Submit jobs that end at once."""
        for name in names:
            job = JobRequest(**self.serving.job(name, 0.01))
            self.journal.submit(job, time.time())

    def look(self, launch_s: float = ANSWER_S, read_s: float = ANSWER_S) -> list[str]:
        """Look once as a loop that has just begun; return what it says is wrong.

        Args:
            launch_s: Time that a launch may take.
            read_s: Time that a command that reads may take.
        """
        queue = _Hasty(self.queue, launch_s, read_s)
        last = self.journal.events(1)
        before = last[0]["id"] if last else 0
        Operator(queue, self.journal, self.settings).tick()
        self.asked += queue.asked
        return [
            each["text"]
            for each in self.journal.events()
            if each["id"] > before and each["kind"] == "problem"
        ]

    def end(self) -> None:
        """Look until all jobs are done; each has run once, and none has failed."""
        # A command that was ended early may not have had its fault.
        self.serving.faults()
        wait_for(lambda: not self.look() and not self.journal.jobs("active"), 120)
        jobs = self.journal.jobs()
        assert [(job.status, job.failures) for job in jobs] == [("done", 0)] * len(jobs)
        ran = [f"{job.name} {what}" for job in jobs for what in ("start", "end")]
        assert sorted(self.serving.lines()) == sorted(ran)
        assert len(self.serving.jobs("a")) == 1


@pytest.fixture(params=["slurm", "kueue"])
def faulty(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Faulty]:
    serving = Serving(tmp_path)
    for name in ("PATH", "FAKE_QUEUE"):
        monkeypatch.setenv(name, serving.environment[name])
    queue = (
        SlurmQueue(claims=str(tmp_path / "claims"))
        if request.param == "slurm"
        else KueueQueue(local_queue="user-queue", image="torch")
    )
    made = Faulty(serving, queue)
    yield made
    made.journal.close()


#: The first commands that read and launch.
READ = {"slurm": "sinfo", "kueue": "kubectl get"}
LAUNCH = {"slurm": "sbatch", "kueue": "kubectl create"}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("silent", r"' within 0\.5 s; see whether the queue runs, or .* --answer-s"),
        ("nonsense", "which is not JSON; nothing is done till it answers JSON again"),
        ("refused", r" failed \(1\): .*controller; it is tried again at the next look"),
    ],
    ids=["silent", "nonsense", "refused"],
)
def test_a_look_without_an_answer_does_nothing(
    faulty: Faulty, fault: str, said: str
) -> None:
    command = READ[faulty.queue.name]
    faulty.submit("a")
    faulty.serving.faults(**{f"{command} {fault}": 1})
    (told,) = faulty.look(read_s=SHORT_S if fault == "silent" else ANSWER_S)
    assert re.search(f"{command}.*{said}", told), told
    assert not faulty.journal.launches()
    faulty.end()


@pytest.mark.parametrize(
    ("fault", "said", "launch_s"),
    [
        ("silent", r" within 0\.5 s; see .* the next look, which finds out", SHORT_S),
        # It has launched by then, unless the machine does much else.
        ("late", " within 3 s; see .* the next look, which finds out", 3.0),
        ("lost", r" failed \(1\): .*; it is tried again at the next look", ANSWER_S),
        ("nonsense", "answered '{half', which .*; the next look finds out", ANSWER_S),
        ("refused", r" failed \(1\): .*; it is tried again at the next look", ANSWER_S),
    ],
    ids=["silent", "late", "lost", "nonsense", "refused"],
)
def test_a_launch_without_an_answer_is_made_once(
    faulty: Faulty, fault: str, said: str, launch_s: float
) -> None:
    command = LAUNCH[faulty.queue.name]
    faulty.submit("a")
    faulty.serving.faults(**{f"{command} {fault}": 1})
    (told,) = faulty.look(launch_s)
    assert re.search(f"{command}.*{said}", told), told
    assert [each.status for each in faulty.journal.launches()] == ["intended"]
    faulty.end()


def test_a_queue_that_is_silent_is_not_asked_for_every_job(faulty: Faulty) -> None:
    command = LAUNCH[faulty.queue.name]
    faulty.submit("a", "b", "c")
    faulty.serving.faults(**{f"{command} silent": 3})
    assert len(faulty.look(SHORT_S)) == 1
    assert faulty.asked == ["mw-a-1"]
    faulty.end()


def test_a_command_that_is_missing_is_told(
    faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = READ[faulty.queue.name].split()[0]
    faulty.submit("a")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(faulty.serving.folder))
        (told,) = faulty.look()
    assert told == (
        f"{command} does not start (No such file or directory); run this where the "
        f"queue's commands are on PATH"
    )
    faulty.end()


def test_a_command_that_is_given_up_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    line = f"sleep 600 & echo $! > {path}; wait"
    for limit_s in (0.5, 5.0, 50.0):
        with pytest.raises(NoAnswerError, match="did not answer 'sh -c sleep 600"):
            answer(Command(words=("sh", "-c", line)), limit_s)
        if path.exists() and path.read_text():
            break
    pid = int(path.read_text())
    gone = (psutil.STATUS_ZOMBIE,)
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() in gone)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "raise ImportError",
            r"ray is not installed; pip install 'meshwright\[ray\]'",
        ),
        ("import time; time.sleep(600)", r"tell its state within 3 s; see .*answer-s"),
        ("import os; os._exit(3)", r"tell its state \(exit code 3\); see with ray st"),
        (
            "def init(**_): raise OSError('gone')",
            r"no Ray cluster at auto: gone; start one with ray start --head, give",
        ),
    ],
    ids=["missing", "silent", "ended", "stopped"],
)
def test_a_ray_that_does_not_answer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    (tmp_path / "ray.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    queue = RayQueue(answer_s=3.0 if "sleep" in code else ANSWER_S)
    for _ in range(2):
        with pytest.raises(QueueError, match=said):
            queue.read()
