"""A real Ray of this machine as a queue: two nodes of two declared GPUs each."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from planner.admission.journal import Journal
from planner.admission.operator import Operator, OperatorSettings
from planner.admission.queues import Entry, Launch, QueueError, RayQueue
from planner.admission.queues.base import NoAnswerError
from planner.admission.throughputs import load_throughputs
from planner.schema.admission import JobRequest
from tests.admission.serving import Serving, wait_for

pytestmark = [
    # Ray's processes wait long for busy cores.
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\."),
    pytest.mark.filterwarnings(r"ignore::FutureWarning:ray\."),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

#: Time that something may take on a machine that does much else.
LONG_S = 200.0


class RayNodes:
    """A head without GPUs, and nodes n0 and n1 of two GPUs that need not be there."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.ray = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "num_gpus": 0,
                "include_dashboard": False,
                "node_name": "head",
            },
        )
        self.nodes = {name: self.add(name) for name in ("n0", "n1")}

    def add(self, name: str) -> Any:
        """Start a node."""
        return self.ray.add_node(
            num_cpus=1,
            num_gpus=2,
            node_name=name,
            resources={"accelerator_type:A100": 1},
        )

    def kill(self, name: str) -> None:
        """Kill a node's processes as if its machine had gone."""
        self.ray.remove_node(self.nodes.pop(name), allow_graceful=False)

    @property
    def server(self) -> int:
        """Process of the server that answers for the cluster."""
        return self.ray.head_node.all_processes["gcs_server"][0].process.pid


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    pytest.importorskip("ray", reason="ray is not installed: meshwright[ray]")
    before = set(psutil.Process().children(recursive=True))
    made: RayNodes | None = None
    try:
        made = RayNodes()
        yield made
    finally:
        begun = set(psutil.Process().children(recursive=True)) - before
        if made is not None:
            made.ray.shutdown()
        _, alive = psutil.wait_procs(begun, timeout=30)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=30)
    assert not alive, alive


@pytest.fixture(scope="module")
def connected(nodes: RayNodes) -> Iterator[RayQueue]:
    made = RayQueue(address=nodes.ray.address, names={"A100": "a100"}, answer_s=LONG_S)
    yield made
    made.close()


@pytest.fixture
def queue(connected: RayQueue) -> Iterator[RayQueue]:
    """The Ray, on which nothing is left to run."""
    yield connected
    for entry in connected.read().entries:
        _stop(connected, entry.name)


def _launch(number: int, devices: dict[str, int], line: str) -> Launch:
    return Launch(
        name=f"mw-a-{number}",
        job="a",
        device="a100",
        devices=devices,
        words=("sh", "-c", line),
    )


def _entry(queue: RayQueue, name: str) -> Entry | None:
    return next((each for each in queue.read().entries if each.name == name), None)


def _ended(queue: RayQueue, name: str) -> Entry | None:
    entry = _entry(queue, name)
    return entry if entry is not None and entry.kept else None


def _is_running(queue: RayQueue, name: str) -> bool:
    entry = _entry(queue, name)
    return entry is not None and entry.status == "running"


def _stop(queue: RayQueue, name: str) -> None:
    def gone() -> bool:
        queue.stop(name)
        return _entry(queue, name) is None

    assert wait_for(gone, LONG_S)


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _pid(path: Path) -> int:
    return int(wait_for(lambda: _text(path), LONG_S))


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_launch_runs_once_and_gives_its_devices_back(
    queue: RayQueue, tmp_path: Path
) -> None:
    assert [(h.name, h.device, h.devices) for h in queue.read().hosts] == [
        ("n0", "a100", 2),
        ("n1", "a100", 2),
    ]
    line = (
        "echo $MESHWRIGHT_NODE_RANK of $MESHWRIGHT_NODES: $CUDA_VISIBLE_DEVICES "
        f">> {tmp_path}/ran"
    )
    launch = _launch(1, {"n1": 2, "n0": 1}, line)
    assert queue.launch(launch) == queue.launch(launch) == "mw-a-1"
    entry = wait_for(lambda: _ended(queue, "mw-a-1"), LONG_S)
    assert (entry.status, entry.devices) == ("done", {"n1": 2, "n0": 1})
    first, second = sorted((tmp_path / "ran").read_text().splitlines())
    assert (first, second[:-1]) == ("0 of 2: 0,1", "1 of 2: ")
    _stop(queue, "mw-a-1")


def test_a_launch_lies_on_the_hosts_that_it_was_given(queue: RayQueue) -> None:
    given = {f"mw-a-1{at}": host for at, host in enumerate(("n1", "n0", "n1", "n0"))}
    for name, host in given.items():
        queue.launch(replace(_launch(0, {host: 1}, "sleep 600"), name=name))

    def placed() -> dict[str, Any]:
        entries = queue.read().entries
        return {each.name: each.devices for each in entries if each.devices}

    wait_for(lambda: len(placed()) == len(given), LONG_S)
    assert placed() == {name: {host: 1} for name, host in given.items()}


def test_a_command_that_is_not_there_fails(queue: RayQueue) -> None:
    queue.launch(replace(_launch(2, {"n0": 1}, ""), words=("no-such-command",)))
    assert wait_for(lambda: _ended(queue, "mw-a-2"), LONG_S).status == "failed"


def test_a_stop_ends_all_that_was_started(queue: RayQueue, tmp_path: Path) -> None:
    line = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    queue.launch(_launch(3, {"n0": 2}, line))
    pid = _pid(tmp_path / "pid")
    _stop(queue, "mw-a-3")
    assert wait_for(lambda: not _alive(pid), LONG_S)


def test_a_command_that_is_stopped_and_ends_with_0_is_not_done(
    queue: RayQueue, tmp_path: Path
) -> None:
    line = f"trap 'exit 0' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.1; done"
    queue.launch(_launch(4, {"n0": 1}, line))
    _pid(tmp_path / "pid")
    queue.stop("mw-a-4")
    assert wait_for(lambda: _ended(queue, "mw-a-4"), LONG_S).status == "failed"


def test_a_command_ends_with_its_actor(queue: RayQueue, tmp_path: Path) -> None:
    line = f"sleep 600 & echo $! $PPID > {tmp_path}/pid; wait"
    queue.launch(_launch(5, {"n0": 2}, line))
    text = wait_for(lambda: _text(tmp_path / "pid"), LONG_S)
    pid, actor = map(int, text.split())
    os.kill(actor, signal.SIGKILL)
    assert wait_for(lambda: not _alive(pid), LONG_S)
    entry = wait_for(lambda: _ended(queue, "mw-a-5"), LONG_S)
    assert (entry.status, entry.cause) == ("failed", None)


def test_what_does_not_fit_waits_and_can_be_stopped(queue: RayQueue) -> None:
    queue.launch(_launch(6, {"n0": 2}, "sleep 600"))
    wait_for(lambda: _is_running(queue, "mw-a-6"), LONG_S)
    queue.launch(_launch(7, {"n0": 1}, "sleep 600"))
    assert _entry(queue, "mw-a-7").status == "pending"
    _stop(queue, "mw-a-7")
    with pytest.raises(QueueError, match="launch mw-a-8: Ray has no node n7 any more"):
        queue.launch(_launch(8, {"n7": 1}, "true"))


def test_a_ray_that_does_not_answer_is_told_and_asked_again(
    nodes: RayNodes, queue: RayQueue
) -> None:
    before = queue.read()
    object.__setattr__(queue, "answer_s", 0.5)
    os.kill(nodes.server, signal.SIGSTOP)
    try:
        with pytest.raises(NoAnswerError, match=r"within 0\.5 s.*longer with --answer"):
            queue.read()
    finally:
        os.kill(nodes.server, signal.SIGCONT)
        object.__setattr__(queue, "answer_s", LONG_S)
    assert queue.read() == before


class _Late:
    """A Ray whose answers to launches come too late.

    Args:
        queue: The Ray.
        limits_s: Time that each launch gets; None to launch and lose the answer.
    """

    def __init__(self, queue: RayQueue, limits_s: list[float | None]) -> None:
        self._queue, self.limits_s = queue, limits_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def launch(self, launch: Launch) -> str:
        limit_s = self.limits_s.pop() if self.limits_s else LONG_S
        object.__setattr__(self._queue, "answer_s", limit_s or LONG_S)
        try:
            known = self._queue.launch(launch)
        finally:
            object.__setattr__(self._queue, "answer_s", LONG_S)
        if limit_s is None:
            raise NoAnswerError("Ray", "launch it", LONG_S)
        return known


def test_answers_that_come_too_late_launch_once(
    queue: RayQueue, tmp_path: Path
) -> None:
    serving = Serving(tmp_path)
    journal = Journal(tmp_path / "journal", "ray")
    # Whether Ray has a launch within the shorter times is chance.
    late = _Late(queue, [0.1, 0.03, 0.01, None])
    settings = OperatorSettings(
        throughputs=load_throughputs(tmp_path / "table.csv"), guard_s=5.0
    )
    operator = Operator(late, journal, settings)
    names = [f"job{at}" for at in range(4)]
    for name in names:
        journal.submit(JobRequest(**serving.job(name, 0.1)), time.time())
        operator.tick()
        wait_for(lambda: operator.tick() and not journal.jobs("active"), LONG_S)
    once = Counter(f"{name} {what}" for name in names for what in ("start", "end"))
    assert Counter(serving.lines()) == once
    assert not late.limits_s
    assert [job.failures for job in journal.jobs("done")] == [0] * 4
    told = [each["text"] for each in journal.events() if each["kind"] == "problem"]
    assert any("the next look, which finds out" in text for text in told)
    journal.close()


@pytest.fixture
def serving(nodes: RayNodes, tmp_path: Path) -> Iterator[Serving]:
    address = ("--ray-address", nodes.ray.address, "--device", "A100=a100")
    made = Serving(tmp_path, ("--queue", "ray", *address))
    yield made
    if made.process is not None and made.process.poll() is None:
        made.kill()


def _jobs(serving: Serving, count: int, *status: str) -> Any:
    """Return all jobs by name, once there are so many, of some statuses."""
    answer = serving.call("GET", "/status")
    if answer is None:
        return None
    jobs = {job["name"]: job for job in answer[1]["jobs"]}
    fit = len(jobs) == count and {x["status"] for x in jobs.values()} <= set(status)
    return jobs if fit else None


def test_killed_at_any_moment_no_job_is_lost_or_doubled(serving: Serving) -> None:
    draw = random.Random(0)
    jobs = [serving.job(f"job{at}", draw.uniform(0.2, 2.0)) for at in range(6)]
    for at in range(3):
        serving.start()
        for job in jobs[2 * at : 2 * at + 2]:
            wait_for(lambda job=job: serving.call("POST", "/jobs", job), LONG_S)
            time.sleep(draw.uniform(0.0, 0.5))
        if at:
            # Another moment: once something of this or an earlier loop runs.
            before = len(serving.lines())
            wait_for(lambda before=before: len(serving.lines()) > before, LONG_S)
        serving.kill()
    serving.start()
    wait_for(lambda: _jobs(serving, len(jobs), "done"), LONG_S)
    once = Counter(f"job{at} {what}" for at in range(6) for what in ("start", "end"))
    assert Counter(serving.lines()) == once


def test_a_job_whose_node_is_lost_goes_on_elsewhere(
    nodes: RayNodes, serving: Serving, tmp_path: Path
) -> None:
    serving.start()
    wait_for(lambda: serving.call("GET", "/status"), LONG_S)
    job = serving.job("wide", 1.0, iterations=4000, elastic=True, deadline_s=None)
    log = tmp_path / "ran"
    job["command"] = ["sh", "-c", f"echo $PPID $$ >> {log}; exec sleep 600"]
    assert serving.call("POST", "/jobs", job)[0] == 202
    first = wait_for(lambda: _text(log).split(), LONG_S)
    raylet = psutil.Process(int(first[0])).ppid()
    (host,) = [
        name
        for name, node in nodes.nodes.items()
        if node.all_processes["raylet"][0].process.pid == raylet
    ]
    nodes.kill(host)
    wait_for(lambda: len(log.read_text().splitlines()) == 2, LONG_S)
    assert not _alive(int(first[1]))
    answer = serving.call("GET", "/status")[1]
    assert [each["launches"] for each in answer["jobs"]] == [2]
    lost = [each["text"] for each in answer["events"] if each["kind"] == "lost"]
    assert lost == ["mw-wide-1 lost a host"]
    # The host is given jobs again when it is back.
    nodes.nodes[host] = nodes.add(host)
    other = serving.job("other", 0.2, min_degree=2)
    assert serving.call("POST", "/jobs", other)[0] == 202
    wait_for(lambda: "other end" in serving.lines(), LONG_S)
    journal = Journal(serving.journal, None)
    assert journal.job("wide").failures == 0
    (launch,) = [each for each in journal.launches() if each.job == "other"]
    assert launch.devices == {host: 2}
    journal.close()
    assert serving.call("DELETE", "/jobs/wide")[0] == 200
    second = int(log.read_text().split()[3])
    wait_for(lambda: not _alive(second), LONG_S)
