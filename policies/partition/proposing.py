"""Proposals of the network, improved by small changes and simulated.

One :class:`Proposer` answers one request and collects what it finds in :class:`Known`.
First the network's best meshes and the best by closed forms make a shortlist, which is
priced with all rows; then orders are drawn and improved; then the best are simulated.
Where no order matters, the neighbours of the best plan are simulated as well.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from envs.partition.features import Observed, observe
from planner.cost import CostModel
from planner.schema.schedules import schedule_names, schedule_spec
from planner.search import Candidate, Request
from planner.search.base import scores_of
from planner.search.device_order.climb import Limits, best_of, climb_in_steps, joined
from planner.search.device_order.groups import DeviceGroups
from planner.search.device_order.near_feasible import (
    NearFeasible,
    RecutMeshes,
    RecutResult,
    best_score,
    find_near_feasible,
    recut_in_steps,
    roomiest,
)
from planner.search.device_order.pricer import (
    Finalists,
    OrderPricer,
    Priced,
    open_order_pricer_in_steps,
)
from planner.search.device_order.screening import Screened, screen_in_steps
from planner.search.device_order.subsets import Choices
from planner.search.moves import Row, Solution, neighbours
from planner.search.refine import ExactPricer
from planner.search.steps import Steps
from planner.space import StrategyTable
from policies.partition.decoding import draw_in_steps
from policies.partition.network import Encoded, SavedNetwork

__all__ = [
    "Known",
    "Problem",
    "Proposer",
    "SearchConfig",
    "Shortlist",
    "polish",
    "share_of",
    "shortlist",
]

Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Problem:
    """One request with its meshes and its deadlines.

    Attributes:
        request: The question.
        groups: Groups of its devices.
        choices: All meshes.
        until: ``time.perf_counter`` at which proposing should end; None for no limit.
        ends: The same for the whole search.
    """

    request: Request
    groups: DeviceGroups
    choices: Choices
    until: float | None
    ends: float | None

    @property
    def order_matters(self) -> bool:
        """True if the order of the devices changes the price of a plan."""
        many = any(len(subset.sequences) > 1 for subset in self.choices.subsets)
        return many or len(np.unique(self.groups.host_sizes)) > 1

    @property
    def late(self) -> bool:
        """True once proposing should have ended."""
        return self.until is not None and time.perf_counter() >= self.until

    @property
    def over(self) -> bool:
        """True once the whole search should have ended."""
        return self.ends is not None and time.perf_counter() >= self.ends


@dataclass(eq=False, slots=True, kw_only=True)
class Known:
    """Findings of a search so far.

    Attributes:
        model: Counts the evaluations.
        solutions: Starting points for evolution.
        found: Solutions that were simulated, with their cuts.
    """

    model: CostModel
    solutions: list[Solution] = field(default_factory=list)
    found: list[tuple[Solution, list[Candidate]]] = field(default_factory=list)

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates that were simulated."""
        return [one for _, cuts in self.found for one in cuts]


def share_of(until: float | None, share: float) -> float | None:
    """Return when a share of the time left is used up; None for no limit."""
    if until is None:
        return None
    now = time.perf_counter()
    return now + share * (until - now)


#: Share of the time for screening all meshes. Share of the rest for recutting meshes
#: that miss the memory limit, and the same where all that fits is far worse than they
#: promise. Share of a budget of simulations for it.
_GLANCING, _RECUTTING, _RECUT = 0.5, (0.4, 0.8), 1 / 8
#: Recut meshes that fit and are priced with all rows.
_OPENED = 4
#: Meshes that look this much worse than the best recut one are not priced. (The best of
#: all rows is up to three times better than the best of the few that are screened.)
_FAR = 3.0
#: Meshes of the network's choice that are screened where no order matters.
_GLANCED = 160
#: Meshes priced with all rows: the network's best, and the best of the screening.
_RANKED, _SEEN = 12, 20


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Shortlist:
    """Meshes worth a closer look.

    Attributes:
        chosen: Indices into the problem's choices. Shape [n].
        seen: Result of screening all meshes.
        recut: Result of recutting meshes that miss the memory limit.
    """

    chosen: Index
    seen: Screened
    recut: RecutResult


def shortlist(problem: Problem, exact: ExactPricer, ranked: Index) -> Steps[Shortlist]:
    """Choose meshes: recut ones that fit, the network's best, the best by closed forms.

    Pauses after each batch of prices and each mesh that is recut.

    Args:
        problem: The question.
        exact: Cuts and simulates.
        ranked: Indices of all choices, the network's best first. Shape [choices].
    """
    until = share_of(problem.until, _GLANCING)
    asked = (problem.request, exact.model, problem.groups, problem.choices)
    # Where no order matters the network's ranking is reliable.
    among = ranked[: None if problem.order_matters else _GLANCED]
    found = yield from screen_in_steps(*asked, among, until)
    yield
    near_feasible = find_near_feasible(*asked, found)
    yield
    recut = yield from _recut_near_feasible(problem, exact, near_feasible, found)
    limit = _FAR * recut.best
    fitting = found.choice[np.isfinite(found.score) & (found.score <= limit)]
    best = found.choice[np.argsort(found.score, kind="stable")]
    # In turn, as there may be time for the first few alone.
    turns = itertools.zip_longest(
        best[: min(_SEEN, len(fitting))].tolist(),
        ranked[np.isin(ranked, fitting)][:_RANKED].tolist(),
    )
    both = [*recut.choices[:_OPENED], *itertools.chain.from_iterable(turns)]
    chosen = np.array([one for one in dict.fromkeys(both) if one is not None], np.int64)
    return Shortlist(chosen=chosen, seen=found, recut=recut)


def _recut_near_feasible(
    problem: Problem,
    exact: ExactPricer,
    near_feasible: list[NearFeasible],
    seen: Screened,
) -> Steps[RecutResult]:
    """Find meshes over the memory limit that fit once stages are cut by memory."""
    far = seen.unlimited.min(initial=np.inf) * _FAR < seen.score.min(initial=np.inf)
    budget = problem.request.evaluation_budget
    most = 2 * len(near_feasible) if budget is None else int(_RECUT * budget)
    until = share_of(problem.until, _RECUTTING[int(far)])
    return recut_in_steps(exact, near_feasible, until, most)


#: Neighbours that are simulated at once, how much worse closed forms may price them,
#: and changes in a row.
_NEIGHBOURS, _WORSE, _CHANGES = 6, 1.1, 4


def polish(exact: ExactPricer, known: Known, until: float | None) -> Steps[None]:
    """Simulate the neighbours of the best plan that fits, until none is better.

    Pauses after each.

    Closed forms rank a few rows of each mesh under one schedule that stands for others.
    The best by closed forms need not be the best under the schedule that won, with as
    many stages a rank or samples a microbatch.

    Args:
        exact: Cuts and simulates; has the request.
        known: Extended by the results.
        until: ``time.perf_counter`` at which to stop; None for no limit.
    """
    request = exact.request
    tried = {
        (one.order.tobytes(), tuple(one.row.values()))
        for one, cuts in known.found
        if len(cuts) > 1 or one.row["pp"] == 1
    }
    for _ in range(_CHANGES):
        values = [best_score(request, cuts) for _, cuts in known.found]
        best = min(values, default=np.inf)
        if not np.isfinite(best) or _left(exact, until) < 1:
            return
        leader = known.found[int(np.argmin(values))][0]
        for row in _near(request, exact.model, leader):
            key = leader.order.tobytes(), tuple(row.values())
            if key in tried:
                continue
            cuts = min(_left(exact, until), 2 if row["pp"] > 1 else 1)
            if cuts < 1:
                return
            tried.add(key)
            one = Solution(order=leader.order, row=row)
            known.found.append((one, exact.candidates(row, one.order, cuts=cuts)))
            yield
        if min(best_score(request, cuts) for _, cuts in known.found) >= best:
            return


def _left(exact: ExactPricer, until: float | None) -> int:
    """Return how many simulations are left, 2 if many; 0 when the time is up."""
    if until is not None and time.perf_counter() >= until:
        return 0
    budget, spent = exact.request.evaluation_budget, exact.model.evaluations
    return 2 if budget is None else budget - spent["simulated"]


def _near(request: Request, model: CostModel, leader: Solution) -> list[Row]:
    """Return the row, to be cut in two ways, and its most promising neighbours."""
    table = neighbours(leader.row, request.facts, request.pins, schedule_names())
    here = StrategyTable.from_columns(**leader.row)
    if table is None:
        return [leader.row]
    rows = StrategyTable.concatenate([here, table])
    none = np.zeros(len(rows), dtype=np.int64)
    costs = model.table_in_orders(rows, leader.order[None, :], none)
    unlimited = scores_of(costs, rows, request.objective, fitting=False)
    promising = 1 + np.flatnonzero(unlimited[1:] <= _WORSE * unlimited[0])
    ranked = promising[np.argsort(unlimited[promising], kind="stable")]
    return [leader.row, *(rows.row(int(index)) for index in ranked[:_NEIGHBOURS])]


#: Rows whose closed-form price is this much above the best are not simulated.
_HOPELESS = 1.25
#: Share of the time left for drawing orders, and the cost of one step of it: seconds,
#: and seconds for each order and group (one core of 2020).
_DRAWING, _STEP_S, _GROUP_S = 0.3, 4e-4, 1.5e-6
#: Seconds for drawing orders at least, where nothing that fits was simulated yet.
_FIRST_S = 0.03
#: Limit without a clock: orders times groups squared.
_MOST_DRAWN = 120_000
#: Rows that are simulated before other schedules are tried, and pipelines that are
#: tried under other schedules; these in order of bubble, shortest first.
_PLAIN, _VARIED = 3, 3
_PREFERRED = {
    schedule_spec(name).code: place
    for place, name in enumerate(
        (
            *("ZBVZeroBubble", "Interleaved1F1B", "Eager1F1B"),
            *("InterleavedZeroBubble", "LoopedBFS"),
        )
    )
}
#: Share of the time left for pricing meshes with all rows.
_OPENING = 0.4
#: Arrangements that evolution starts from, and how many of them in one layout.
_SEEDS, _OF_LAYOUT = 48, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """Effort of a search.

    Attributes:
        meshes: Meshes priced in one go where the network chooses alone.
        layouts: Layouts that orders are drawn for.
        draws: Orders drawn for each.
        rounds: Rounds of small changes without a clock.
        climbing: Share of the time left for small changes, with a clock.
        finalists: Arrangements simulated without a clock.
        generations: 0 for the proposals alone, without the race that follows.
        learned: False scores meshes and draws orders at random, to measure search
            alone.
    """

    meshes: int = 24
    layouts: int = 8
    draws: int = 8
    rounds: int = 24
    climbing: float = 0.6
    finalists: int = 24
    generations: int = 12
    learned: bool = True


class Proposer:
    """Proposes solutions of one problem.

    Args:
        problem: The question.
        saved: The network.
        config: Effort.
        known: Extended by the results.
    """

    def __init__(
        self, problem: Problem, saved: SavedNetwork, config: SearchConfig, known: Known
    ) -> None:
        self.problem, self.known = problem, known
        self._saved, self._config = saved, config
        self._exact = ExactPricer(request=problem.request, model=known.model)
        self._recut = RecutMeshes()
        self._seen: Screened | None = None
        self._tried: set[object] = set()
        self._rng = np.random.default_rng(problem.request.seed)

    def steps(self) -> Steps[None]:
        """Add solutions to what is known, some of them simulated, in small steps."""
        problem = self.problem
        if not len(problem.choices):
            return
        with torch.inference_mode():
            seen, encoded, ranked = self._ranked()
        yield
        pricer = yield from self._open(ranked)
        if pricer is not None:
            yield from self._arrange(seen, encoded, pricer)
        if not np.isfinite(self._best()):
            yield from self._simulate_roomiest()

    def _ranked(self) -> tuple[Observed, Encoded, Index]:
        """Return the problem in numbers, its encoding, and meshes, the best first."""
        problem, network = self.problem, self._saved.network
        seen = observe(problem.request, problem.groups, problem.choices)
        encoded = network.encode(seen)
        logits = network.mesh_logits(seen, encoded).numpy()
        if not self._config.learned:
            logits = self._rng.random(len(logits))
        return seen, encoded, np.argsort(-logits, kind="stable")

    def _arrange(
        self, seen: Observed, encoded: Encoded, pricer: OrderPricer
    ) -> Steps[None]:
        """Draw and improve orders where order matters; simulate the best."""
        problem, known = self.problem, self.known
        layouts = pricer.layouts
        current = Priced(
            layout=np.arange(len(layouts)),
            sequence=layouts.sequence,
            row=layouts.starts[:-1].copy(),
            score=layouts.score,
        )
        if problem.order_matters:
            if self._affordable():
                drawn = yield from self._draw(seen, encoded, pricer)
                current = joined([current, drawn])
            if problem.until is not None and not problem.late:
                # Sure answers; there may be no time for others.
                yield from self._simulate(pricer, current, _PLAIN)
            current = yield from self._climb(pricer, current)
        yield from self._simulate(pricer, current)
        if not problem.order_matters:
            yield from polish(self._exact, known, problem.until)
        if problem.over:
            return
        seeds = pricer.finalists(best_of(current, _SEEDS, of_layout=_OF_LAYOUT))
        known.solutions += [
            _solution(pricer, seeds, index) for index in range(len(seeds))
        ]

    def _open(self, ranked: Index) -> Steps[OrderPricer | None]:
        """Price the best meshes; go further down the list while none fits."""
        problem = self.problem
        if not problem.late:
            short = yield from shortlist(problem, self._exact, ranked)
            self.known.found += short.recut.found
            self._recut, self._seen = short.recut.meshes, short.seen
            opened = yield from self._opened(short.chosen)
            if opened is not None or np.isfinite(self._best()):
                return opened
            if self._is_late_with_meshes():
                return None
        step = self._config.meshes
        for start in range(0, len(ranked), step):
            opened = yield from self._opened(ranked[start : start + step])
            if opened is not None:
                return opened
            step *= 2
            if problem.late:
                return None
        return None

    def _opened(self, chosen: Index) -> Steps[OrderPricer | None]:
        one, model = self.problem, self.known.model
        if not len(chosen):
            return None
        until = share_of(one.until, _OPENING)
        asked = one.request, one.choices, one.groups
        found = yield from open_order_pricer_in_steps(
            *asked, chosen, model, until, self._exact, self._recut
        )
        yield
        return found

    def _is_late_with_meshes(self) -> bool:
        """Return True if only what has most memory to spare is left to try."""
        late, seen = self.problem.late, self._seen
        return late and seen is not None and len(seen.choice) > 0

    def _best(self) -> float:
        """Return the score of the best simulated plan; infinite if none fits so far."""
        request, found = self.problem.request, self.known.found
        return min((best_score(request, cuts) for _, cuts in found), default=np.inf)

    def _affordable(self) -> int:
        """Return how many orders to draw in the time for it; 0 for none."""
        problem = self.problem
        groups = len(problem.groups)
        wanted = self._config.layouts * (1 + self._config.draws)
        if problem.until is None:
            return min(wanted, max(8, _MOST_DRAWN // groups**2))
        left = _DRAWING * (problem.until - time.perf_counter())
        if not np.isfinite(self._best()):
            # The first plan that fits may as well have the network's orders.
            left = max(left, _FIRST_S)
        each_step = left / groups - _STEP_S
        count = int(min(wanted, each_step / (_GROUP_S * groups)))
        return count if count >= 4 else 0

    def _draw(
        self, seen: Observed, encoded: Encoded, pricer: OrderPricer
    ) -> Steps[Priced]:
        """Draw orders for the best layouts, the likeliest of each among them."""
        problem, rng = self.problem, self._rng
        count = max(1, self._affordable())
        few = np.arange(min(self._config.layouts, len(pricer.layouts), count))
        layout = np.sort(np.resize(few, max(0, count - len(few))))
        layout = np.concatenate([few, layout])
        if not self._config.learned:
            sequence = pricer.layouts.sequence[layout]
            shuffled = np.stack(
                [np.append(rng.permutation(s[s >= 0]), s[s < 0]) for s in sequence]
            )
            return pricer.price(layout, shuffled)
        drawn = yield from draw_in_steps(
            self._saved.network,
            seen,
            encoded,
            problem.groups,
            problem.choices,
            pricer.layouts.choice[layout],
            rng,
            greedy=len(few),
        )
        yield
        return pricer.price(layout, drawn.sequence)

    def _climb(self, pricer: OrderPricer, start: Priced) -> Steps[Priced]:
        until = share_of(self.problem.until, self._config.climbing)
        rounds = self._config.rounds if until is None else None
        limits = Limits(until=until, rounds=rounds)
        yield
        climbed = yield from climb_in_steps(pricer, start, self._rng, limits)
        return joined([climbed, best_of(start, 8)])

    def _simulate(
        self, pricer: OrderPricer, current: Priced, few: int | None = None
    ) -> Steps[None]:
        """Simulate the best until time or budget is used up; pause after each.

        Args:
            pricer: Prices arrangements.
            current: Arrangements.
            few: Most meshes to simulate, each with its best row; None for all, and
                pipelines under other schedules.
        """
        problem, known = self.problem, self.known
        budget = problem.request.evaluation_budget
        before = known.model.evaluations["simulated"]
        finalists = self._config.finalists
        # Where no order matters polishing finds out about the rest.
        finalists = finalists if problem.order_matters else -(-finalists // 2)
        most = before + finalists if budget is None else budget
        kept = best_of(current, max(12, self._config.finalists), of_layout=3)
        ranked = pricer.finalists(kept[slice(0, few)])
        turns = self._turns(pricer, ranked)
        if few is not None:
            first = np.sort(np.unique(ranked.layout, return_index=True)[1])
            turns = ((ranked, index) for index in first.tolist())
        yield
        fits = bool(np.isfinite(self._best()))
        for entered, index in turns:
            hopeless = entered.score[index] > _HOPELESS * self._best()
            if hopeless and np.isfinite(entered.score[index]):
                continue
            spent = known.model.evaluations["simulated"]
            full = spent >= most and (problem.until is None or budget is not None)
            if known.found and (full or (problem.late and fits)):
                break
            one = _solution(pricer, entered, index)
            if one.key in self._tried:
                continue
            self._tried.add(one.key)
            # The exact cut has the fastest slowest stage; of ranks that hold several
            # stages the slowest may be another, and even times the better cut.
            looped = entered.rows.virtual_stages[index] > 1
            left = 2 if budget is None else max(1, most - spent)
            cuts = min(left, 2 if looped else 1)
            cut = pricer.candidates(entered, index, cuts=cuts, spare=int(left > cuts))
            fits = fits or any(one.cost.fits for one in cut)
            known.found.append((one, cut))
            yield

    def _simulate_roomiest(self) -> Steps[None]:
        """Simulate plans with the most memory to spare, until one fits."""
        problem, known = self.problem, self.known
        if self._seen is None:
            return
        asked = problem.request, known.model, problem.groups, problem.choices
        for near in roomiest(*asked, self._seen):
            if near.solution.key in self._tried:
                continue
            budget = problem.request.evaluation_budget
            if budget is not None and known.model.evaluations["simulated"] >= budget:
                return
            cuts = self._exact.candidates(near.solution.row, near.solution.order)
            known.found.append((near.solution, cuts))
            # Late or not: others would begin from the start.
            if np.isfinite(self._best()):
                return
            yield

    @staticmethod
    def _turns(
        pricer: OrderPricer, ranked: Finalists
    ) -> Iterator[tuple[Finalists, int]]:
        """Yield rows to simulate, the most promising first.

        A few rows by rank; the best of some pipelines under all other schedules, which
        may halve their time; the other rows. Of rows of one arrangement that closed
        forms cannot tell apart, such as those of ZeRO 1 and 2, the first.
        """
        first: dict[tuple[int, bytes, str], int] = {}
        pipelines: dict[int, int] = {}
        for index in range(len(ranked)):
            layout, sequence = int(ranked.layout[index]), ranked.sequence[index]
            key = layout, sequence.tobytes(), f"{ranked.score[index]:.9g}"
            first.setdefault(key, index)
            if ranked.rows.pp[index] > 1:
                pipelines.setdefault(layout, index)
        rows = list(first.values())
        yield from ((ranked, index) for index in rows[:_PLAIN])
        for index in list(pipelines.values())[:_VARIED]:
            others = pricer.variants(ranked, index)
            known = _PREFERRED.get
            order = [known(int(code), len(_PREFERRED)) for code in others.rows.schedule]
            yield from (
                (others, int(other)) for other in np.argsort(order, kind="stable")
            )
        for index in rows[_PLAIN:]:
            if ranked.score[index] > _HOPELESS * ranked.score[0]:
                return
            yield ranked, index


def _solution(pricer: OrderPricer, rows: Finalists, index: int) -> Solution:
    count = int(pricer.layouts.count[rows.layout[index]])
    order = pricer.groups.orders(rows.sequence[index : index + 1], count)[0]
    return Solution(order=order, row=rows.rows.row(index))
