"""``launch``: results in order, errors that name the rank, and nobody left behind."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from executors import launch
from executors.launching.launcher import _reserved_port
from planner.errors import ExecutionError, FingerprintError, RankFailedError

ENTRIES = "tests.executors.launching.entries"


def _gone(pids: list[int], within_s: float = 10.0) -> bool:
    """True if all processes end in time; zombies count as gone."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_each_rank_gets_the_environment_of_torchrun() -> None:
    results = launch(f"{ENTRIES}:environment", {"extra": "é"}, processes=2)
    for rank, result in enumerate(results):
        assert result == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "extra": "é",
        }


def test_messages_arrive_in_order_and_output_does_not_block() -> None:
    heard: list[tuple[int, Any]] = []
    pids = launch(
        f"{ENTRIES}:talk",
        {"count": 300},
        processes=2,
        on_message=lambda rank, value: heard.append((rank, value)),
    )
    assert len(set(pids)) == 2
    for rank in range(2):
        numbers = [value["number"] for who, value in heard if who == rank]
        assert numbers == list(range(300))


def test_restarts_are_for_ranks_that_others_outlive() -> None:
    with pytest.raises(ExecutionError, match="max_restarts=1 with on_failure='stop'"):
        launch(f"{ENTRIES}:environment", {}, processes=2, max_restarts=1)


def test_a_killed_rank_ends_the_others_within_seconds() -> None:
    pids: list[int] = []
    begin = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1 of 3 was killed by SIGKILL"):
        launch(
            f"{ENTRIES}:wait_for_ever",
            {"dies": 1},
            processes=3,
            on_message=lambda _, pid: pids.append(pid),
        )
    # They would sleep for ten minutes.
    assert time.monotonic() - begin < 60
    assert len(pids) == 3
    assert _gone(pids)


def test_an_exit_code_and_the_last_words_are_told() -> None:
    with pytest.raises(RankFailedError, match=r"rank 0 of 2 exited 7") as caught:
        launch(f"{ENTRIES}:wait_for_ever", {"exits": 0}, processes=2)
    # Warnings that came after them are left out.
    assert str(caught.value).endswith("; last output: the disk is full")


def test_what_a_rank_started_dies_with_it() -> None:
    pids: list[int] = []
    with pytest.raises(RankFailedError) as caught:
        launch(
            f"{ENTRIES}:breed",
            {},
            processes=1,
            on_message=lambda _, pid: pids.append(pid),
        )
    assert "rank 0 of 1 raised ValueError: one line;" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(pids) == 2
    assert _gone(pids)


def test_errors_of_our_own_keep_their_class() -> None:
    with pytest.raises(FingerprintError, match=r"^a plan for another model$"):
        launch(f"{ENTRIES}:refuse", {}, processes=2)


def test_the_root_cause_is_told_and_the_traceback_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.INFO, logger="executors"),
        pytest.raises(RankFailedError) as caught,
    ):
        launch(f"{ENTRIES}:wrap", {"ours": False}, processes=2)
    assert str(caught.value) == (
        "rank 1 of 2 raised RuntimeError: [Stage 1] failed to run forward: "
        "OSError: disk full; the other ranks were stopped"
    )
    (note,) = caught.value.__notes__
    assert note.startswith("rank 1 of 2:\nTraceback (most recent call last):\n")
    assert "ValueError: in between" in note
    assert note in caplog.messages


def test_an_error_of_our_own_is_found_in_what_wraps_it() -> None:
    with pytest.raises(FingerprintError, match=r"^ours$"):
        launch(f"{ENTRIES}:wrap", {"ours": True}, processes=2)


def test_the_cause_is_blamed_and_not_who_noticed_first() -> None:
    with pytest.raises(
        RankFailedError, match="rank 1 of 2 raised MemoryError: no room"
    ):
        launch(f"{ENTRIES}:blame_the_peer", {}, processes=2)


def test_time_out_leaves_no_process() -> None:
    pids: list[int] = []
    with pytest.raises(ExecutionError, match="did not end within 5 s"):
        launch(
            f"{ENTRIES}:wait_for_ever",
            {},
            processes=2,
            on_message=lambda _, pid: pids.append(pid),
            timeout_s=5.0,
        )
    assert _gone(pids)


def test_the_port_of_the_ranks_is_given_to_nobody_else() -> None:
    with _reserved_port() as port, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        # With the option that torch sets, rank 0 may listen there.
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()


def test_an_unknown_entry_is_an_error_of_the_rank() -> None:
    with pytest.raises(RankFailedError, match="AttributeError"):
        launch(f"{ENTRIES}:nothing_of_the_kind", {}, processes=1)
    with pytest.raises(ExecutionError, match="processes=0"):
        launch(f"{ENTRIES}:talk", {}, processes=0)


# Ctrl-C is ignored by what a shell has started in the background, and so by a test run.
_LAUNCHER = f"""
import signal, sys
from executors import launch
from executors.launching.launcher import _reserved_port
signal.signal(signal.SIGINT, signal.default_int_handler)
launch("{ENTRIES}:wait_for_ever", {{}}, processes=2,
       on_message=lambda rank, pid: print(pid, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_is_ended_leaves_no_process(number: signal.Signals) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
        text=True,
    )
    assert launcher.stdout is not None
    with launcher.stdout:
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        assert all(_alive(pid) for pid in pids)
        launcher.send_signal(number)
        assert launcher.wait(60) != 0
    assert _gone(pids)
