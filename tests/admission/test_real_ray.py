"""A real Ray of this machine as a queue."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.admission.queues import Launch, QueueError, RayQueue
from tests.admission.serving import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\."),
    pytest.mark.filterwarnings(r"ignore::FutureWarning:ray\."),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def queue() -> Iterator[RayQueue]:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    ray.init(
        address="local",
        num_cpus=4,
        namespace="meshwright",
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        yield RayQueue(resource="CPU", names={"CPU": "cpu"})
    finally:
        ray.shutdown()


def _launch(queue: RayQueue, number: int, degree: int, *words: str) -> Launch:
    (host,) = queue.read().hosts
    assert (host.device, host.devices) == ("cpu", 4)
    return Launch(
        name=f"mw-a-{number}",
        job="a",
        device="cpu",
        devices={host.name: degree},
        words=words,
    )


def test_a_launch_runs_once_and_gives_its_devices_back(
    queue: RayQueue, tmp_path: Path
) -> None:
    line = f"echo $MESHWRIGHT_NODE_RANK of $MESHWRIGHT_NODES >> {tmp_path}/ran; sleep 1"
    launch = _launch(queue, 1, 2, "sh", "-c", line)
    assert queue.launch(launch) == queue.launch(launch) == "mw-a-1"
    (entry,) = queue.read().entries
    assert (entry.status, sum(entry.devices.values())) == ("running", 2)
    wait_for(lambda: queue.read().entries[0].status == "done")
    assert (tmp_path / "ran").read_text() == "0 of 1\n"
    queue.stop("mw-a-1")
    assert wait_for(lambda: queue.read().entries == ())


def test_a_stop_ends_the_command(queue: RayQueue, tmp_path: Path) -> None:
    line = f"echo $$ > {tmp_path}/pid; exec sleep 600"
    queue.launch(_launch(queue, 2, 3, "sh", "-c", line))
    pid = int(wait_for(lambda: (tmp_path / "pid").exists() and _text(tmp_path)))
    queue.stop("mw-a-2")
    wait_for(lambda: not _alive(pid))
    assert wait_for(lambda: queue.read().entries == ())


def test_what_does_not_fit_is_refused_and_leaves_nothing(
    queue: RayQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.admission.queues.ray_cluster._ANSWER_S", 2.0)
    with pytest.raises(QueueError, match="Ray refuses mw-a-3"):
        queue.launch(_launch(queue, 3, 9, "true"))
    assert wait_for(lambda: queue.read().entries == ())


def _text(folder: Path) -> str:
    return (folder / "pid").read_text().strip()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    time.sleep(0.05)
    return True
