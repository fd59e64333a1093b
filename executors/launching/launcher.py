"""Start local processes, one a rank, and end every one of them.

Whatever happens (a rank that dies, Ctrl-C, SIGTERM, a launcher killed outright), no
process is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from executors.launching.monitor import Monitor, OnFailure, Rank
from planner.errors import ExecutionError

__all__ = ["launch"]


def launch(
    entry: str,
    args: Mapping[str, Any],
    *,
    processes: int,
    on_message: Callable[[int, Any], None] | None = None,
    threads: int = 1,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    on_failure: OnFailure = "stop",
    max_restarts: int = 0,
    passed_on: Sequence[signal.Signals] = (),
) -> list[Any]:
    """Call a function in each of several new processes that can form a group.

    Each has the environment that torchrun gives (RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR, MASTER_PORT), a session of its own, and this process's ``sys.path``.

    Args:
        entry: ``module:function``; called as ``function(args, emit)``, where ``emit``
            sends any JSON value to ``on_message``.
        args: JSON values, the same for all.
        processes: How many.
        on_message: Called as ``on_message(rank, value)``, in this thread.
        threads: OMP_NUM_THREADS of each.
        env: Environment variables on top of this process's.
        timeout_s: Longest that all of it may take, in seconds; None for ever.
        on_failure: Whether the others are stopped when a rank dies or raises, or
            continue without it. Then this process, which outlives them, holds the
            store that the ranks meet by, and tells there which have ended.
        max_restarts: How often each rank that fails is started again while the others
            continue.
        passed_on: Signals to this process that each rank gets, and answers by itself,
            as :func:`executors.run` does behind a step; a second one ends all at once.
            They are blocked in ranks, which look for them when they can.
    Returns:
        What each call returned, by rank; None for ranks that have failed.
    Raises:
        RankFailedError: If a rank died or raised (or, where the others continue, if all
            have): which one, how, its last words or the root cause, with the rank's
            traceback as a note. The others have been ended.
        MeshwrightError: The very error, if that is what a rank raised, or what caused
            what it raised.
        ExecutionError: If the time was not enough.
    """
    if processes < 1:
        raise ExecutionError(f"processes={processes}; launch at least 1")
    if max_restarts < 0 or (max_restarts and on_failure == "stop"):
        raise ExecutionError(
            f"max_restarts={max_restarts} with on_failure={on_failure!r}; ranks are "
            f"started again while others continue: use on_failure='continue' and a "
            f"number of at least 0, or max_restarts=0"
        )
    job = {
        "entry": entry,
        "args": dict(args),
        "restarts": max_restarts,
        "blocked": [int(number) for number in passed_on],
    }
    relay = _Relay(passed_on)
    with relay.active(), contextlib.ExitStack() as cleanup:
        port = cleanup.enter_context(_reserved_port())
        common = _common_environment(processes, threads, port, env)
        losses: _Losses | None = None
        if on_failure == "continue":
            losses = _Losses(port)
            common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        spawner, ranks, control = _start(job, common, processes, cleanup)
        relay.ranks = ranks
        monitor = Monitor(spawner, ranks, control, on_message, losses)
        cleanup.callback(monitor.end)
        monitor.watch(timeout_s)
        return [rank.result for rank in ranks]


def _common_environment(
    processes: int, threads: int, port: int, env: Mapping[str, str] | None
) -> dict[str, str]:
    path = [folder or str(Path.cwd()) for folder in sys.path]
    variables = {
        **os.environ,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(path),
        # Looking for GPUs must not start the driver, which no fork survives.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    if Path("/sys/class/net/lo").exists():
        # gloo would look its own host name up, which not every machine can.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return variables | dict(env or {})


class _Losses:
    """The store of ranks that continue without each other, in this process.

    Args:
        port: Where it listens.
    """

    def __init__(self, port: int) -> None:
        from torch.distributed import (  # type: ignore[attr-defined]
            PrefixStore,
            TCPStore,
        )

        from executors.launching.rendezvous import REPLICAS_PREFIX

        base = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        self._store = PrefixStore(REPLICAS_PREFIX, base)

    def tell(self, rank: int) -> None:
        """Tell the others that a rank has ended."""
        from executors.launching.rendezvous import ENDED, here_key, hung_key

        self._store.set(here_key(rank), ENDED)
        self._store.delete_key(hung_key(rank))

    def why_hung(self, rank: int) -> str:
        """Return why the others went on without a rank; empty if they did not."""
        from executors.launching.rendezvous import hung_key

        key = hung_key(rank)
        return str(self._store.get(key), "utf-8") if self._store.check([key]) else ""


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that the system gives to nobody else during the block.

    With SO_REUSEADDR, which torch sets too, rank 0 may listen there meanwhile.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def _start(
    job: dict[str, Any],
    common: dict[str, str],
    processes: int,
    cleanup: contextlib.ExitStack,
) -> tuple[subprocess.Popen[bytes], list[Rank], int]:
    """Start the spawner, which forks the ranks.

    Returns:
        It, the ranks, and the pipe on which it tells of them.
    """
    with contextlib.ExitStack() as ours:

        def pipe() -> tuple[int, int]:
            read, write = os.pipe()
            cleanup.callback(os.close, read)
            ours.callback(os.close, write)
            return read, write

        control, control_end = pipe()
        ranks, ends, passed = [], [], [control_end]
        for index in range(processes):
            (messages, messages_end), (output, output_end) = pipe(), pipe()
            ranks.append(Rank(index=index, messages=messages, output=output))
            passed += [messages_end, output_end]
            place = {"RANK": str(index), "LOCAL_RANK": str(index)}
            ends.append({"env": place, "messages": messages_end, "output": output_end})
        file = ours.enter_context(tempfile.TemporaryFile())
        file.write(json.dumps({**job, "ranks": ends, "control": control_end}).encode())
        file.seek(0)
        spawner = subprocess.Popen(
            [sys.executable, "-m", "executors.launching.worker", str(os.getpid())],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=common,
            pass_fds=passed,
            start_new_session=True,
        )
    return spawner, ranks, control


class _Relay:
    """Signals to this process: passed on to the ranks, or the end of all.

    Args:
        passed_on: Those that ranks get; SIGTERM ends all in any case, when it comes
            twice, or while not all ranks have been started.

    Attributes:
        ranks: Those that there are.
    """

    def __init__(self, passed_on: Sequence[signal.Signals]) -> None:
        self._passed_on = passed_on
        self._told = False
        self.ranks: Sequence[Rank] = ()

    def _handle(self, number: int, _: FrameType | None) -> None:
        started = self.ranks and all(rank.pid is not None for rank in self.ranks)
        if self._told or not started or number not in self._passed_on:
            raise SystemExit(128 + number)
        self._told = True
        for rank in self.ranks:
            if rank.code is None and rank.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Handle signals in the block; SIGTERM always, so that resources are closed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self._handle)
            for number in {signal.SIGTERM, *self._passed_on}
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
