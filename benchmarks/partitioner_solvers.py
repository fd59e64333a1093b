"""Who takes part: every registered partitioner, ``auto``, and the learned one maimed.

A solver is made anew for every question and asked on a wall clock; what it answers is
judged apart from it, by the rules and by the simulator.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.cost import CostModel
from planner.errors import MeshwrightError
from planner.portfolio import best_answer, run_partitioners
from planner.search import (
    Candidate,
    Request,
    SearchResult,
    get_partitioner,
    partitioner_names,
    score,
)
from planner.space import check
from planner.strategy_input import complete_strategy

__all__ = [
    "ABLATIONS",
    "Answer",
    "Solver",
    "attempt",
    "baselines",
    "latest_s",
    "solver_named",
    "solver_names",
]

_log = logging.getLogger(__name__)

#: Asks a request, returns what partitioners answered.
Solver = Callable[[Request], Sequence[SearchResult]]

#: The learned partitioner without one of its parts.
ABLATIONS = ("learned:no-graphs", "learned:no-refinement", "learned:no-learning")
#: Columns of tables; partitioners registered besides come after.
_FIRST = (
    *("learned", "auto", "exhaustive", "evolutionary", "anneal", "beam"),
    *("metis", "dtfm"),
)
#: An answer is in time up to so many budgets and so many seconds on top.
_GRACE, _GRACE_S = 1.5, 0.2
#: One that has not ended by then is stopped, as others wait for it.
_PATIENCE, _PATIENCE_S = 5.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A solver's answer to a world; fields but the first two are None without a plan.

    Attributes:
        seconds: Wall time of the search.
        late: Whether it took longer than the budget and a grace.
        step_time_s: Of its best plan, by the simulator.
        score: The objective's value of that plan.
        strategy: Label of that plan.
        evaluations: Strategies it priced, by fidelity.
        why: What it said instead of a plan.
        checkpoint: Hash of the weights it used.
    """

    seconds: float
    late: bool
    step_time_s: float | None = None
    score: float | None = None
    strategy: str | None = None
    evaluations: dict[str, int] | None = None
    why: str | None = None
    checkpoint: str | None = None


def solver_names() -> list[str]:
    """All that are there, the learned ones first."""
    names = ["auto", *partitioner_names()]
    return [n for n in _FIRST if n in names] + [n for n in names if n not in _FIRST]


def baselines(names: Sequence[str]) -> list[str]:
    """Solvers that learn nothing."""
    return [n for n in names if n != "auto" and n.partition(":")[0] != "learned"]


def latest_s(budget_s: float | None) -> float:
    """Seconds after which an answer is late; infinite without a budget."""
    return float("inf") if budget_s is None else _GRACE * budget_s + _GRACE_S


class _StoppedError(Exception):
    """A solver did not end."""


@contextmanager
def _stopped_after(budget_s: float | None) -> Iterator[None]:
    """Raise in what runs too long; only in the main thread, where signals arrive.

    Where the budget is of processor time, so is the limit.
    """
    here = threading.current_thread() is threading.main_thread()
    if budget_s is None or not here or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise _StoppedError

    limit_s = _PATIENCE * budget_s + _PATIENCE_S
    timer, alarm = signal.ITIMER_REAL, signal.SIGALRM
    if time.perf_counter is time.process_time:
        timer, alarm = signal.ITIMER_PROF, signal.SIGPROF
    before = signal.signal(alarm, stop)
    left_s, again_s = signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        # Somebody else's alarm goes off as it would have, at the latest a bit later.
        signal.setitimer(timer, left_s, again_s)
        signal.signal(alarm, before)


def solver_named(name: str, no_graphs: Path | None = None) -> Solver:
    """A new solver.

    Args:
        name: A registered partitioner, ``auto``, or one of :data:`ABLATIONS`.
        no_graphs: Folder of weights that were trained without graphs.

    Raises:
        UnknownNameError: If there is none of that name.
        MeshwrightError: If what it needs is not installed.
    """
    if name == "auto":
        return lambda request: run_partitioners(request, "auto")
    one = _ablated(name, no_graphs) if name in ABLATIONS else get_partitioner(name)
    return lambda request: [one.search(request)]


def _ablated(name: str, no_graphs: Path | None) -> Any:
    # Takes seconds to import, and needs the learn extra.
    from policies.partition.partitioner import LearnedPartitioner, SearchConfig

    if name == "learned:no-graphs":
        return LearnedPartitioner(no_graphs)
    if name == "learned:no-refinement":
        return LearnedPartitioner(
            config=SearchConfig(rounds=0, climbing=0.0, generations=0)
        )
    return LearnedPartitioner(config=SearchConfig(learned=False))


def attempt(
    name: str,
    ask_anew: Callable[[], Request],
    no_graphs: Path | None = None,
    *,
    patient: bool = False,
) -> Answer:
    """Ask a solver once, alone, with nothing kept from who was asked before.

    Args:
        name: As for :func:`solver_named`.
        ask_anew: Makes the request; called twice, for the solver and for the judge.
        no_graphs: As for :func:`solver_named`.
        patient: Whether to wait however long it takes, as for what is compiled.
    """
    found: Sequence[SearchResult] = ()
    why = None
    try:
        solve = solver_named(name, no_graphs)
    except MeshwrightError as error:
        return Answer(seconds=0.0, late=False, why=str(error))
    request = ask_anew()
    _forget()
    started = time.perf_counter()
    try:
        with _stopped_after(None if patient else request.time_budget_s):
            found = solve(request)
    except MeshwrightError as error:
        why = str(error)
    except _StoppedError:
        why = "did not end, and was stopped"
    except Exception as error:
        # A defect of one solver is a line of the table, not the end of a long run.
        _log.exception("%s failed", name)
        why = f"failed: {type(error).__name__}: {error}"
    seconds = time.perf_counter() - started
    late = seconds > latest_s(request.time_budget_s)
    if not any(result.candidates for result in found):
        why = why or "found nothing that fits"
        return Answer(seconds=seconds, late=late, why=why)
    return _judged(ask_anew(), found, seconds, late)


def _judged(
    request: Request, found: Sequence[SearchResult], seconds: float, late: bool
) -> Answer:
    """The best plan, priced by us."""
    winner, best = best_answer(found, request.objective)
    evaluations = {
        kind: sum(result.evaluations[kind] for result in found)
        for kind in winner.evaluations
    }
    marks = [result.checkpoint for result in found if result.checkpoint]
    answer = Answer(
        seconds=seconds,
        late=late,
        evaluations=evaluations,
        checkpoint=marks[0] if marks else None,
        strategy=best.strategy.label(),
    )
    try:
        priced = _priced(request, best)
    except MeshwrightError as error:
        return replace(answer, strategy=None, why=f"not legal: {error}")
    if not priced.cost.fits:
        return replace(answer, strategy=None, why="its plan does not fit in memory")
    return replace(
        answer,
        step_time_s=float(priced.cost.step_time_s),
        score=float(
            score(priced.cost, best.strategy.mesh.num_devices, request.objective)
        ),
    )


def _priced(request: Request, candidate: Candidate) -> Candidate:
    check(candidate.strategy, request.facts)
    full, order = complete_strategy(candidate.strategy, request.context)
    model = CostModel(replace(request.context, order=order))
    return Candidate(strategy=full, cost=model.cost(full, "simulated"))


def _forget() -> None:
    """Drop what is kept of schedules and of kinds of strategies, and garbage.

    Who is asked second would find what the first has laid out and looked up.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(("planner.simulate.", "planner.space.")):
            for value in vars(module).values():
                forget = getattr(value, "cache_clear", None)
                if forget is not None:
                    forget()
    gc.collect()
