"""A rank that is lost while it trains is named by the others, which then end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from executors import launch
from planner.errors import RankFailedError

ENTRIES = "tests.executors.launching.entries"


@contextlib.contextmanager
def _unwatched(
    world: int, **arguments: object
) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks that no launcher ends when one fails, as SLURM's srun starts them."""
    with socket.socket() as holder, contextlib.ExitStack() as stack:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        place = {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(holder.getsockname()[1]),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(folder or "." for folder in sys.path),
        }
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", ENTRIES, json.dumps(arguments)],
                    env={**os.environ, **place, "RANK": str(rank)},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(world)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        yield ranks


@pytest.mark.parametrize(
    ("fault", "victim", "said"),
    [
        (
            "SIGKILL",
            1,
            "RankFailedError: rank 1 of 3 ended or stopped without an error",
        ),
        pytest.param(
            "SIGKILL",
            0,
            "RankFailedError: rank 0 of 3 has ended or hangs",
            marks=pytest.mark.further,
        ),
        ("SIGSTOP", 1, "meshwright: rank 1 of 3 gave no sign of life for 3 s: "),
        pytest.param(
            "SIGSTOP",
            0,
            "meshwright: rank 0 of 3 gave no sign of life for 3 s: ",
            marks=pytest.mark.further,
        ),
        pytest.param(
            "raise",
            1,
            "RankFailedError: rank 1 of 3 raised ValueError: no such batch",
            marks=pytest.mark.further,
        ),
        pytest.param(
            "sleep",
            1,
            "RankFailedError: rank 1 of 3 did not take part in a collective",
            marks=pytest.mark.further,
        ),
    ],
)
def test_without_a_launcher_the_others_end_and_name_it(
    fault: str, victim: int, said: str
) -> None:
    limit_s = 3.0 if fault == "SIGSTOP" else 15.0
    with _unwatched(3, fault=fault, victim=victim, rank_timeout_s=limit_s) as ranks:
        for number, rank in enumerate(ranks):
            if number != victim:
                _, err = rank.communicate(timeout=60)
                assert rank.returncode == 1
                assert err.splitlines()[-1].startswith(said)


@pytest.mark.further
def test_a_rank_that_goes_on_too_late_ends_too() -> None:
    with _unwatched(2, fault="SIGSTOP", victim=1, rank_timeout_s=2.0) as ranks:
        ranks[0].communicate(timeout=60)
        ranks[1].send_signal(signal.SIGCONT)
        _, err = ranks[1].communicate(timeout=60)
        assert ranks[1].returncode == 1
        assert "rank 0 of 2 has ended or hangs" in err.splitlines()[-1]


def test_the_launcher_says_what_the_ranks_found_and_leaves_none() -> None:
    arguments = {"fault": "SIGSTOP", "victim": 1, "rank_timeout_s": 2.0}
    # Other tests of this process may have workers of their own.
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(RankFailedError) as caught:
        launch(f"{ENTRIES}:reduce_for_ever", arguments, processes=2)
    assert str(caught.value) == (
        "rank 1 of 2 gave no sign of life for 2 s: it was stopped, or its machine or "
        "network was lost; resume from the last checkpoint; the other ranks were "
        "stopped"
    )
    deadline = time.monotonic() + 10
    while set(psutil.Process().children(recursive=True)) - before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
