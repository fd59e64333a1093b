"""The fastest pipeline of a Piper task that is cut at some suffixes of its graph.

For a time per sample asked for, ways that reach it are found for every suffix; the
least time that can be reached is enclosed from both sides.
"""

from __future__ import annotations

import time as clock

import numpy as np

from planner.split.piper.labels import Limits, Ways, extend, new_ways
from planner.split.piper.plan import NO_PLAN, PiperPlan, PiperStage
from planner.split.piper.stage import layers_of, stage_time
from planner.split.piper.suffixes import Suffixes
from planner.split.piper.task import PiperTask

__all__ = ["Pipelines"]

_FEW_WAYS = 64  # of a suffix at first
_SLICE = 256  # suffixes between looks at the clock
_STEP = 0.02  # what the second time asked for is above the least, relative
_FAR = 8.0  # above this many times the least whether anything fits is asked
_CLOSE = 1e-12  # relative; times that far apart are the same


class Pipelines:
    """Pipelines of a task that cut it at some suffixes.

    Args:
        task: What is planned.
        suffixes: Where it may be cut.
        ends: By the monotonic clock; a time that is asked for later is not reached.
    """

    def __init__(
        self, task: PiperTask, suffixes: Suffixes, ends: float = np.inf
    ) -> None:
        self.task, self.suffixes, self.ends = task, suffixes, ends
        self.layers = layers_of(task)
        self.sums = min(task.microbatches, task.devices)
        found = [d for d in range(1, self.sums + 1) if task.microbatches % d == 0]
        self.replicas = np.array(found, dtype=np.int64)
        self._most = _FEW_WAYS

    def reach(self, asked: float) -> tuple[Ways, bool]:
        """Ways that take at most ``asked``; false if there was no time for all."""
        limits = Limits(
            self.task.degrees, self.replicas, self.task.devices, self.sums, asked
        )
        count = len(self.suffixes.has)
        while True:
            ways = new_ways(count, self._most)
            for first in range(0, count, _SLICE):
                last = min(first + _SLICE, count)
                if clock.monotonic() > self.ends:
                    return ways, False
                if not extend(self.layers, self.suffixes, limits, ways, first, last):
                    self._most *= 2
                    break
            else:
                return ways, True

    def plan(self, ways: Ways) -> PiperPlan:
        """The way of all layers with the fewest devices."""
        at = len(self.suffixes.has) - 1
        k = int(ways.used[at, : ways.many[at]].argmin())
        n, options = self.task.time.shape[0], self.task.time.shape[2]
        cost, held = np.empty((n, options)), np.empty((n, options))
        chosen = np.zeros(n, dtype=np.int64)
        slowest, stages = 0.0, []
        while at:
            rest, t = int(ways.rest[at, k]), int(ways.degree[at, k])
            d, total = int(self.replicas[ways.replicas[at, k]]), int(ways.sum[at, k])
            inside = self.suffixes.has[at] - self.suffixes.has[rest]
            nodes = np.flatnonzero(inside)
            took = stage_time(
                self.layers, inside, nodes, t, d, -(-total // d), cost, held, chosen
            )
            slowest = max(slowest, took)
            ids, names = self.task.nodes, self.task.option_names
            stages.append(
                PiperStage(
                    nodes=tuple(ids[v] for v in nodes),
                    data_parallel=d,
                    tensor_parallel=int(self.task.degrees[t]),
                    options={ids[v]: names[v][t][chosen[v]] for v in nodes},
                )
            )
            at, k = rest, int(ways.way[at, k])
        return PiperPlan(time_per_sample=slowest, stages=tuple(stages))

    def best(
        self,
        *,
        known: PiperPlan | None = None,
        guess: float = np.inf,
        close: float = _CLOSE,
    ) -> tuple[PiperPlan, bool]:
        """The pipeline of least time per sample.

        Args:
            known: A pipeline that there is already; it is to be beaten.
            guess: A time asked for first; at infinity it turns out whether any fits.
            close: How much slower than the best it may be, relative.

        Returns:
            The pipeline, or the known one, and whether that is known to be so.
        """
        best = known or NO_PLAN
        low = float(self.suffixes.before[0]) / self.task.devices
        asked, step = min(guess, best.time_per_sample * (1 - close)), _STEP
        while low < best.time_per_sample * (1 - close):
            ways, finished = self.reach(asked)
            if not finished:
                return best, False
            if ways.many[-1]:
                best = self.plan(ways)
            elif asked == np.inf:
                return best, True
            else:
                low = max(asked, float(ways.beyond[0]))
            time = best.time_per_sample
            asked = (low + time) / 2
            if ways.many[-1] and guess < np.inf:
                asked = max(asked, time * (1 - step))
            elif step < _FAR:
                asked = min(asked, low * (1 + step))
            step *= 2
        return best, True
