"""Time and memory of planning, and the share of each part.

python -m benchmarks.planning_time [--runs 3] [--json]

Every plan is made in a fresh process on one thread. Imports are left out of the time,
also those that libraries put off until a plan first needs them (numba has most of its
own, and scipy's, when it loads the first function): their seconds are shown apart.
Loading what numba has compiled is in it. That code is on disk already
(``__pycache__``): a run before the measured ones, which may have to compile, sees to
that, and its time is shown apart. Steps leave out what is listed as a step of its own
inside of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["CASES", "Case", "Stopwatch", "fresh", "measure"]

MEMORY_TARGET_BYTES = 2e9
_OTHER, _IMPORTS = "all else", "imports on first use"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request.

    Attributes:
        read_before: Whether the model is read before the clock starts.
        target_s: What is asked for.
    """

    model: str
    cluster: str
    global_batch: int
    seq_len: int
    read_before: bool
    target_s: float

    @property
    def title(self) -> str:
        """For people."""
        reading = "after reading it" if self.read_before else "reading included"
        return (
            f"{self.model} on {self.cluster}, batch {self.global_batch} x "
            f"{self.seq_len} tokens, {reading}"
        )


CASES = {
    "large": Case(
        model="llama3-405b",
        cluster="dgx-h100:2048",
        global_batch=2048,
        seq_len=8192,
        read_before=False,
        target_s=5.0,
    ),
    "small": Case(
        model="llama3-8b",
        cluster="dgx-h100:8",
        global_batch=128,
        seq_len=8192,
        read_before=True,
        target_s=1.0,
    ),
}

#: Steps of a plan, and the functions whose calls they consist of.
STEPS = (
    ("reading: build without memory", "planner.capture.read", "build_on_meta"),
    ("reading: run once on fakes", "planner.capture.read", "trace_model"),
    ("graph: all layers from one", "planner.capture.read", "expand"),
    ("graph: what tp may split", "planner.capture.read", "infer_roles"),
    ("graph: ops to blocks", "planner.capture.read", "coarsen"),
    ("space: legal rows", "planner.search.exhaustive", "enumerate_strategies"),
    ("space: legal rows", "planner.search.exhaustive", "legal"),
    ("table: units", "planner.cost.table.step", "price_units"),
    ("table: cuts", "planner.cost.table.step", "summarize"),
    (
        "table: chains",
        "planner.simulate.closed_form",
        "bubble_coefficients",
    ),
    ("table: closed forms", "planner.cost.model", "price_table"),
    ("finalists: units", "planner.cost.model", "price_units"),
    ("finalists: order of actions", "planner.search.refine", "actions"),
    ("finalists: exact cuts", "planner.search.refine", "best_cut"),
    ("finalists: build strategies", "planner.search.refine", "build_strategy"),
    ("finalists: simulate", "planner.cost.pipelines.flushed", "evaluate"),
    ("finalists: price", "planner.cost.model", "price_strategy"),
    ("assemble: fingerprint", "planner.assemble", "fingerprint_parameters"),
    ("assemble: plan", "planner.api", "make_plan"),
    ("load compiled code", "numba.core.dispatcher.Dispatcher", "compile"),
    (_IMPORTS, "builtins", "__import__"),
    (_IMPORTS, "importlib", "import_module"),
)


class Stopwatch:
    """Seconds by step; a step inside another counts only itself.

    Attributes:
        seconds: Of processor time.
        wall: On the clock.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.wall: dict[str, float] = defaultdict(float)
        self._running: list[str] = [_OTHER]
        self._since = self._now()

    def _now(self) -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def start(self) -> None:
        """Forget everything so far."""
        self.seconds.clear()
        self.wall.clear()
        self._since = self._now()

    def _turn(self) -> None:
        now, step = self._now(), self._running[-1]
        self.seconds[step] += now[0] - self._since[0]
        self.wall[step] += now[1] - self._since[1]
        self._since = now

    def stop(self) -> dict[str, float]:
        """Seconds of processor time by step until now, the longest first."""
        self._turn()
        return dict(sorted(self.seconds.items(), key=lambda item: -item[1]))

    def watched(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed; of a generator, each turn is."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            result = self._inside(step, function, *args, **kwargs)
            return self._each(step, result) if isinstance(result, Iterator) else result

        return timed

    def _inside(
        self, step: str, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._turn()
        self._running.append(step)
        try:
            return function(*args, **kwargs)
        finally:
            self._turn()
            self._running.pop()

    def _each(self, step: str, values: Iterator[Any]) -> Iterator[Any]:
        end = object()
        while (value := self._inside(step, next, values, end)) is not end:
            yield value

    def watch(self) -> None:
        """Put itself in front of the functions of :data:`STEPS`."""
        for step, where, name in STEPS:
            module, _, kind = where.partition(".Dispatcher")
            owner = import_module(module)
            if where != module:
                owner = getattr(owner, "Dispatcher" + kind)
            setattr(owner, name, self.watched(step, getattr(owner, name)))


def measure(case: Case) -> dict[str, Any]:
    """Make one plan in this process."""
    import transformers

    from planner.api import plan
    from planner.capture import capture, load_model
    from planner.portfolio import AUTO
    from planner.search import get_partitioner

    # Registered partitioners and transformers' classes are imported when looked up.
    for name in AUTO:
        get_partitioner(name)
    for name in ("AutoConfig", "LlamaForCausalLM"):
        getattr(transformers, name)
    watch = Stopwatch()
    watch.watch()
    model: Any = case.model
    if case.read_before:
        model = capture(load_model(case.model, seq_len=case.seq_len))
    watch.start()
    made = plan(
        model, case.cluster, global_batch=case.global_batch, seq_len=case.seq_len
    )
    steps = watch.stop()
    imported = watch.wall.pop(_IMPORTS, 0.0), steps.pop(_IMPORTS, 0.0)
    return {
        "wall_s": sum(watch.wall.values()),
        "cpu_s": sum(steps.values()),
        "imports_on_first_use": {"wall_s": imported[0], "cpu_s": imported[1]},
        "steps_cpu_s": steps,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "plan": made.strategy.label(),
        "step_time_s": made.prediction.step_time_s,
        "evaluations": dict(made.provenance.evaluations),
    }


def fresh(case: str) -> dict[str, Any]:
    """The same in a process of its own."""
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planning_time", "--case", case],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root},
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _print(case: Case, first: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    peak = max(run["peak_rss_bytes"] for run in runs)
    print(case.title)
    for key, what in (("wall_s", "wall"), ("cpu_s", "CPU")):
        took = [run[key] for run in runs]
        print(
            f"  {statistics.median(took):.2f} s {what} ({min(took):.2f} to "
            f"{max(took):.2f}), median of {len(took)} (target {case.target_s:g} s)"
        )
    print(
        f"  {peak / 1e9:.2f} GB peak (target {MEMORY_TARGET_BYTES / 1e9:g} GB); the "
        f"run before, which may compile: {first['wall_s']:.2f} s wall"
    )
    late = [run["imports_on_first_use"]["wall_s"] for run in runs]
    print(
        f"  {statistics.median(late):.2f} s wall of imports on first use, not counted"
    )
    typical = sorted(runs, key=lambda run: run["cpu_s"])[len(runs) // 2]
    for step, seconds in typical["steps_cpu_s"].items():
        print(f"    {step:32s} {seconds:6.3f} s  {seconds / typical['cpu_s']:4.0%}")
    counts = ", ".join(f"{n:,} {kind}" for kind, n in typical["evaluations"].items())
    print(f"  {typical['plan']}, {typical['step_time_s']:.2f} s a step ({counts})")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--case", choices=sorted(CASES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(CASES[options.case])))
        return
    results = {}
    for name, case in CASES.items():
        first, *runs = [fresh(name) for _ in range(1 + options.runs)]
        results[name] = {"first": first, "runs": runs}
        if not options.json:
            _print(case, first, runs)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
