"""A pool of processes that stays up between tests: a job costs tenths of a second."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

__all__ = ["Pool", "PoolError"]

_PRELOAD = ["tests.distributed.preload"]


class PoolError(AssertionError):
    """A rank raised, died, or did not answer in time."""


#: gloo now and then loses a connection while a group is made (once in 8,000 tests on
#: two busy cores), before any of the code under test has run: then once more.
_NOT_MET, _MEETINGS = "connectFullMesh failed", 2
#: How long a rank may take to write down where it is, in seconds.
_STACK_S = 2.0


def _work(rank: int, jobs: Any, results: Any, stacks: str) -> None:
    torch.set_num_threads(1)
    # Held open for as long as the process lives: the handler writes to the descriptor.
    said = open(stacks, "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=said, all_threads=True)
    while (job := jobs.get()) is not None:
        number, function, world, store, args = job
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=30),
            )
            answer = (number, rank, True, function(*args))
        except Exception:
            answer = (number, rank, False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            # It keeps meshes of the groups that are gone, and takes new ones of the
            # same ranks for them.
            _clear_sharding_prop_cache()
        results.put(answer)


class Pool:
    """Runs a module-level function on the first ``world`` of its processes.

    Args:
        size: Processes to keep.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._job = 0
        self._processes: list[Any] = []

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._results = self._context.Queue()
        self._queues = [self._context.Queue() for _ in range(self.size)]
        self._processes = [
            self._context.Process(
                target=_work,
                args=(rank, jobs, self._results, self._stack_file(rank)),
                daemon=True,
            )
            for rank, jobs in enumerate(self._queues)
        ]
        for process in self._processes:
            process.start()

    def _stack_file(self, rank: int) -> str:
        return str(Path(self._folder.name) / f"stack-{rank}")

    def _stacks(self, world: int) -> str:
        """Stacks of all ranks that live."""
        for process in self._processes[:world]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(_STACK_S)
        said = (Path(self._stack_file(rank)).read_text() for rank in range(world))
        return "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(said))

    def run(
        self,
        function: Callable[..., Any],
        world: int,
        *args: Any,
        timeout_s: float = 90.0,
    ) -> list[Any]:
        """Call ``function(*args)`` on each rank of a fresh gloo group.

        Returns:
            What it returned, by rank.
        Raises:
            PoolError: With the traceback of the lowest rank that failed; with the
                stack of every rank if they did not end in time.
        """
        for attempt in range(_MEETINGS):
            answers = self._ask((function, world, args), timeout_s)
            failed = [answer for answer in answers if not answer[2]]
            if not failed:
                break
            # Others may wait in a collective still: begin anew.
            self.close()
            met = all(_NOT_MET not in answer[3] for answer in failed)
            if met or attempt + 1 == _MEETINGS:
                raise PoolError(f"rank {failed[0][1]}:\n{failed[0][3]}")
        return [answer[3] for answer in answers]

    def _ask(
        self, work: tuple[Any, int, tuple[Any, ...]], timeout_s: float
    ) -> list[Any]:
        """Answers of all ranks, failed ones too."""
        function, world, args = work
        if not self._processes:
            self._start()
        self._job += 1
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            for jobs in self._queues[:world]:
                jobs.put((self._job, function, world, store, args))
            return self._collect(world, timeout_s)

    def _collect(self, world: int, timeout_s: float) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < world:
            try:
                answer = self._results.get(timeout=0.2)
            except queue.Empty:
                self._check(world, deadline)
                continue
            if answer[0] == self._job:
                answers[answer[1]] = answer
                if not answer[2]:
                    break
        return [answers[rank] for rank in sorted(answers)]

    def _check(self, world: int, deadline: float) -> None:
        dead = [r for r in range(world) if not self._processes[r].is_alive()]
        if dead or time.monotonic() > deadline:
            codes = [self._processes[rank].exitcode for rank in dead]
            where = self._stacks(world)
            self.close()
            what = f"ranks {dead} died (exit {codes})" if dead else "timed out"
            raise PoolError(f"{what}; the others were at\n{where}")

    def close(self) -> None:
        """End all processes; the next job starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        if self._processes:
            self._folder.cleanup()
        self._processes = []
