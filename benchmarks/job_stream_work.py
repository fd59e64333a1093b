"""Replay episodes of the job stream on all cores, each of them once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.job_stream_replay import replay_law, scaled_law
from envs.ramp.jobs import ramp_tables, read_jobs
from planner.errors import StrategyError
from policies.baselines import best_constant

__all__ = ["BETA_BINS", "CHOSEN_ON", "Episode", "Task", "Work", "degrees"]

#: Seeds that the best constants are chosen on, apart from those of reports.
CHOSEN_ON = range(5000, 5012)
#: Prefixes of names of fast policies.
_CHEAP = ("para_", "min_", "constant_", "random")
#: Edges of the bins of beta that degrees are counted in.
BETA_BINS: NDArray[np.float64] = np.linspace(0.1, 1.0, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One episode to replay; the arguments of ``replay_law``."""

    policy: str
    law: str
    seed: int
    load: float = 1.0
    told: bool = False


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Episode:
    """Result of a task.

    Attributes:
        summary: Summary of the ReplayResult.
        ms_per_decision: Wall time of the policy.
        chosen: Decisions by bin of beta and action. Shape [bins, actions].
    """

    summary: dict[str, float]
    ms_per_decision: float
    chosen: NDArray[np.int64]


def _episode(task: Task, horizon_s: float) -> Episode:
    result = replay_law(
        task.policy,
        task.law,
        task.seed,
        load=task.load,
        told=task.told,
        horizon_s=horizon_s,
    )
    actions = [0, *degrees()]
    chosen = np.zeros((len(BETA_BINS) - 1, len(actions)), dtype=np.int64)
    for decision in result.decisions:
        # Edges are tenths and so are betas: count an edge to the bin below it.
        index = int(np.searchsorted(BETA_BINS, decision.beta - 1e-9)) - 1
        place = min(max(index, 0), len(chosen) - 1)
        chosen[place, actions.index(decision.degree)] += 1
    return Episode(
        summary=result.summary, ms_per_decision=result.ms_per_decision, chosen=chosen
    )


def degrees() -> list[int]:
    """Return the degrees of the benchmark's cluster."""
    return list(read_jobs().degrees)


def _best(law: str, load: float, horizon_s: float) -> str:
    jobs = read_jobs()
    chosen = best_constant(
        jobs, scaled_law(law, load), CHOSEN_ON, ramp_tables(jobs), horizon_s
    )
    return f"constant_{chosen.degree}"


class Work:
    """Replays episodes on all cores, each of them once.

    Args:
        horizon_s: End of the episodes.
        processes: Number of processes, 1 for this one; by default that of the cores.
        kept: File to which finished episodes are added, and from which they are read to
            resume a run.

    Raises:
        StrategyError: If a number is not positive, or the file is not of this kind.
    """

    def __init__(
        self,
        horizon_s: float = 1e6,
        processes: int | None = None,
        kept: Path | None = None,
    ) -> None:
        cores = len(os.sched_getaffinity(0))
        self._processes = cores if processes is None else processes
        if self._processes < 1 or not 0.0 < horizon_s < np.inf:
            raise StrategyError(
                f"processes={processes}, horizon_s={horizon_s}; give at least 1 "
                f"process and a positive number of seconds"
            )
        self.horizon_s, self._kept = horizon_s, kept
        self._done: dict[Task, Episode] = {}
        if kept is not None and kept.exists():
            self._done = _read(kept, horizon_s)
        self._best: dict[tuple[str, float], str] = {}

    def best(self, law: str, load: float = 1.0) -> str:
        """Find the constant that blocks least on the seeds of CHOSEN_ON."""
        key = (law, load)
        if key not in self._best:
            self._best[key] = _best(law, load, self.horizon_s)
        return self._best[key]

    def run(self, tasks: Iterable[Task], name: str) -> None:
        """Replay the tasks that have not been, with a progress bar."""
        todo = [task for task in dict.fromkeys(tasks) if task not in self._done]
        # Slow ones first, so that no core is left with one at the end.
        todo.sort(key=lambda task: task.policy.startswith(_CHEAP))
        call = partial(_episode, horizon_s=self.horizon_s)
        bar = tqdm(total=len(todo), desc=name, disable=None)
        if self._processes == 1:
            for task in todo:
                self._add(task, call(task))
                bar.update()
            return
        # Forked processes inherit locks of threads that they do not have.
        with ProcessPoolExecutor(
            self._processes, mp_context=get_context("spawn")
        ) as pool:
            pending = {pool.submit(call, task): task for task in todo}
            for future in as_completed(pending):
                self._add(pending[future], future.result())
                bar.update()

    def _add(self, task: Task, episode: Episode) -> None:
        self._done[task] = episode
        if self._kept is None:
            return
        row = {
            "horizon_s": self.horizon_s,
            "task": asdict(task),
            **asdict(episode),
            "chosen": episode.chosen.tolist(),
        }
        with self._kept.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")

    def __getitem__(self, task: Task) -> Episode:
        """Return the result of a task that was run."""
        return self._done[task]


def _read(kept: Path, horizon_s: float) -> dict[Task, Episode]:
    """Read the episodes of a file with the same horizon."""
    found = {}
    lines = kept.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            # The run was killed while it wrote this one: it is replayed again.
            kept.write_text("".join(lines[:-1]), encoding="utf-8")
            break
        try:
            row = json.loads(line)
            if row["horizon_s"] != horizon_s:
                continue
            found[Task(**row["task"])] = Episode(
                summary=row["summary"],
                ms_per_decision=row["ms_per_decision"],
                chosen=np.array(row["chosen"], dtype=np.int64),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StrategyError(
                f"{kept}, line {number} is no episode ({error}); give a file that "
                f"this command wrote, or one that is not there yet"
            ) from error
    return found
