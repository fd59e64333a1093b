"""Lessons prepared ahead of the steps that study them, in other processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
import torch

from envs.partition.graphs import GraphStore
from policies.partition.lessons import Lesson, prepare_lesson
from policies.partition.settings import PartitionTrainConfig, WorldSource, worlds_of

__all__ = ["Preparer"]

Split = Literal["train", "validation"]
_Key = tuple[Split, int]


class _Maker:
    """Makes lessons of a run's worlds."""

    def __init__(self, config: PartitionTrainConfig, folder: Path) -> None:
        self._graphs = GraphStore(folder)
        self._sources: dict[Split, WorldSource] = {
            "train": worlds_of(config, "train", self._graphs),
            "validation": worlds_of(config, "validation", self._graphs),
        }

    def make(self, split: Split, index: int) -> Lesson | None:
        world = self._sources[split].world(index)
        return prepare_lesson(world, np.random.default_rng(index), self._graphs)


@cache
def _maker(config: PartitionTrainConfig, folder: Path) -> _Maker:
    return _Maker(config, folder)


def _make(
    config: PartitionTrainConfig, folder: Path, split: Split, index: int
) -> Lesson | None:
    return _maker(config, folder).make(split, index)


def _begin() -> None:
    """Start of a process: one thread, silent when interrupted, gone with its parent."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Preparer:
    """Lessons by split and place; each is the same whoever prepares it.

    Args:
        config: Of the run.
        folder: Where graphs of models are kept.
        processes: That prepare what was asked for; 0 prepares it here, when it is
            needed.
    """

    def __init__(
        self, config: PartitionTrainConfig, folder: Path, processes: int
    ) -> None:
        self._config, self._folder, self._processes = config, folder, processes
        self._pool: ProcessPoolExecutor | None = None
        self._begun: dict[_Key, Future[Lesson | None]] = {}

    def __enter__(self) -> Preparer:
        if self._processes:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self._processes, context, initializer=_begin
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._begun.clear()

    def ask(self, split: Split, indices: Iterable[int]) -> None:
        """Begin with lessons, as many as keep the processes busy, the first first."""
        if self._pool is None:
            return
        waiting = sum(not one.done() for one in self._begun.values())
        for index in indices:
            if waiting >= 2 * self._processes:
                return
            if (split, index) not in self._begun:
                self._begun[split, index] = self._pool.submit(
                    _make, self._config, self._folder, split, index
                )
                waiting += 1

    def take(self, split: Split, index: int) -> Lesson | None:
        """A lesson; waits for it. None if its world gives none."""
        begun = self._begun.pop((split, index), None)
        if begun is not None:
            return begun.result()
        if self._pool is None:
            return _make(self._config, self._folder, split, index)
        return self._pool.submit(
            _make, self._config, self._folder, split, index
        ).result()
