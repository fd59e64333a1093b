"""State that every search over orders and rows shares: prices, budgets, candidates.

Many solutions are priced at once by closed forms; the most promising ones are cut
exactly and simulated. The simulated score of a row corrects the closed form of the same
row under other orders.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.schema.schedules import schedule_names
from planner.search.base import (
    Candidate,
    Request,
    SearchResult,
    finish,
    score,
    scores_of,
)
from planner.search.budget import SIMULATIONS, Budget
from planner.search.moves import (
    Solution,
    block_sizes,
    moved_order,
    neighbours,
    neighbours_of,
    refilled,
    resized,
    spare_of,
)
from planner.search.refine import candidates_of_row
from planner.space import StrategyTable, legal

__all__ = ["Campaign"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Most solutions with one mesh that are simulated in a row.
_PER_MESH = 2
#: Kinds whose best solution is tried under all schedules, among so many solutions.
_VARIED, _CONSIDERED = 12, 200
#: Share of moves that change the number of devices.
_RESIZING = 0.05
#: Simulations of rows with the same closed-form score as the best.
_TIES = 3
#: Least score of solutions that do not fit; the score grows with the excess.
_OVER = 1e12
#: Priced solutions that are remembered before the worse half is forgotten.
_REMEMBERED = 4_000
#: Neighbours of the best plan that are simulated, and their largest ratio to it.
_POLISHED, _PROMISING = 8, 1.1
#: Solutions in a row that bring nothing, after which a search without a budget ends.
_PATIENCE = 16
#: Cost models under orders of devices that are kept.
_MODELS = 64
#: Seconds to lay out an action of a schedule without a formula (one core of 2023).
_ACTION_S = 1e-6
#: Score of solutions that the request's launcher cannot express.
_INEXPRESSIBLE = 1e30


class _Prices(Budget):
    """Scores of solutions by closed forms, corrected by simulations of their rows.

    Args:
        request: The question.
        contenders: Searches that share it; see :class:`Budget`.
    """

    def __init__(self, request: Request, contenders: int = 1) -> None:
        super().__init__(request, contenders)
        self._scores: dict[object, float] = {}
        self._distinct: dict[object, Solution] = {}
        self._groups: dict[object, object] = {}
        self._ratios: dict[object, float] = {}
        self._recut: dict[object, tuple[float, float]] = {}
        self._simulated: dict[object, float] = {}
        self._unlimited: dict[object, float] = {}
        self._types = np.asarray(request.context.cluster.type_index)

    def price(self, solutions: Sequence[Solution]) -> Array:
        """Return the scores of solutions: closed forms, corrected by simulations.

        Solutions that do not fit in memory score ``1e12`` and more, by their excess.

        Args:
            solutions: Solutions on any numbers of devices. Length n.
        Returns:
            Shape [n].
        """
        if len(self._distinct) > _REMEMBERED or len(self._scores) > 8 * _REMEMBERED:
            self._forget()
        fresh = {one.key: one for one in solutions if one.key not in self._scores}
        if fresh:
            self._price(list(fresh.values()))
        return np.array([self.corrected(one) for one in solutions])

    def is_priced(self, solution: Solution) -> bool:
        """Return True if a solution has a price."""
        return solution.key in self._scores

    def corrected(self, solution: Solution) -> float:
        """Return the corrected score of a solution that was priced.

        A row that exceeded memory by closed forms and fitted once it was cut by memory
        is taken to fit under other orders that exceed it by no more.
        """
        simulated = self._simulated.get(solution.key)
        if simulated is not None:
            return simulated
        self._recall(solution)
        row, closed = solution.key[1], self._scores[solution.key]
        if closed < _OVER:
            return closed * self._ratios.get(row, 1.0)
        lacked, ratio = self._recut.get(row, (0.0, 1.0))
        return self._unlimited[solution.key] * ratio if closed <= lacked else closed

    def learn(self, solution: Solution, value: float) -> None:
        """Correct the closed forms of a row by a simulation of it.

        Args:
            solution: The solution, priced before.
            value: Its simulated score, ``1e12`` and more if it does not fit.
        """
        row, closed = solution.key[1], self._scores[solution.key]
        self._simulated[solution.key] = value
        if value >= _OVER:
            return
        if closed < _OVER:
            self._ratios[row] = value / closed
        elif closed < _INEXPRESSIBLE:
            lacked, _ = self._recut.get(row, (0.0, 1.0))
            ratio = value / self._unlimited[solution.key]
            self._recut[row] = max(lacked, closed), ratio

    def take(self, solution: Solution, value: float) -> None:
        """Take the simulated score of a solution that was not priced.

        Schedules whose time is no formula take long to price; a simulation says more.

        Args:
            solution: The solution.
            value: As of :meth:`learn`.
        """
        self._simulated[solution.key] = self._scores[solution.key] = value
        self._groups[solution.key] = self._group(solution)
        self._distinct.setdefault(self._groups[solution.key], solution)

    def may_fit(self, solution: Solution) -> bool:
        """Return True if a priced solution fits by its corrected score."""
        return self.corrected(solution) < _OVER

    def unlimited(self, solution: Solution) -> float:
        """Return the score that a priced solution would have with enough memory."""
        self._recall(solution)
        return self._unlimited.get(solution.key, self.corrected(solution))

    def price_key(self, solution: Solution) -> object:
        """Return a key that is equal for solutions with equal closed forms.

        Most such solutions differ in the places of equal devices, others in messages
        that overlap with the rest of the step. Each must have been priced.
        """
        self._recall(solution)
        return self._groups[solution.key]

    def _recall(self, solution: Solution) -> None:
        """Price a solution again that :meth:`_forget` dropped since it was priced.

        Searches that race share the prices: what one prices may make room by what
        another still holds.
        """
        if solution.key not in self._scores:
            self._price([solution])

    def _group(self, solution: Solution) -> object:
        row, types = solution.row, self._types[solution.order]
        # The simulator distinguishes the stages that are on slow devices.
        slowest = types.reshape(row["pp"], -1).max(axis=1).tobytes()
        shape = row["pp"], row["schedule"], row["virtual_stages"], slowest
        return shape, f"{self._scores[solution.key]:.9g}"

    def _price(self, solutions: list[Solution]) -> None:
        """Price solutions by closed forms, all at once, each under its own order."""
        numbers: dict[bytes, int] = {}
        which = [numbers.setdefault(s.key[0], len(numbers)) for s in solutions]
        orders = [np.frombuffer(key, dtype=np.int64) for key in numbers]
        ids = np.full((len(orders), max(map(len, orders))), -1, dtype=np.int64)
        for place, order in enumerate(orders):
            ids[place, : len(order)] = order
        table = StrategyTable.from_columns(
            **{name: [one.row[name] for one in solutions] for name in solutions[0].row}
        )
        costs = self._model.table_in_orders(table, ids, np.array(which, dtype=np.int64))
        value = scores_of(costs, table, self.request.objective, fitting=False)
        over = _OVER * (1 + np.maximum(costs.excess_bytes, 0) / 1e9)
        found = np.where(costs.fits, value, over)
        limits = self.request.launcher_limits
        if limits is not None:
            found = np.where(limits.mask(ids)[which], found, _INEXPRESSIBLE)
        missed = np.flatnonzero((found >= _OVER) & (found < _INEXPRESSIBLE))
        for place in missed.tolist():
            self._unlimited[solutions[place].key] = float(value[place])
        for one, each in zip(solutions, found.tolist(), strict=True):
            self._scores[one.key] = each
            self._groups[one.key] = self._group(one)
            self._distinct.setdefault(self._groups[one.key], one)

    def _forget(self) -> None:
        """Forget the worse half of the solutions, and repetitions."""
        kept = self.best(_REMEMBERED // 2)
        self._scores = {one.key: self._scores[one.key] for one in kept}
        self._groups = {one.key: self._groups[one.key] for one in kept}
        self._unlimited = {
            k: score for k, score in self._unlimited.items() if k in self._groups
        }
        self._distinct = {self._groups[one.key]: one for one in kept}

    def best(self, count: int) -> list[Solution]:
        """Return the best priced solutions by corrected scores, equal ones once."""
        known = list(self._distinct.values())
        order = np.argsort([self.corrected(one) for one in known], kind="stable")
        return [known[index] for index in order[:count].tolist()]


class Campaign(_Prices):
    """One search: its prices, budget, random moves and simulated candidates.

    Args:
        request: The question.
        contenders: Searches that share it; see :class:`Budget`.

    Attributes:
        rng: Generator of all random draws.
        host_devices: Devices that most hosts of the request have.
        best_score: Best simulated score of a solution that fits; infinite before.
    """

    def __init__(self, request: Request, contenders: int = 1) -> None:
        super().__init__(request, contenders)
        self.rng = np.random.default_rng(request.seed)
        self._cut: dict[object, float] = {}
        self._simulated_keys: set[object] = set()
        self._choices: dict[int, Index] = {}
        self._sizes: dict[object, StrategyTable | None] = {}
        self._candidates: list[Candidate] = []
        self._neighbours: dict[object, StrategyTable | None] = {}
        hosts = np.asarray(request.context.cluster.host_of_device)
        sizes = np.bincount(hosts[request.context.order])
        self.host_devices = int(np.bincount(sizes[sizes > 0]).argmax())
        self._free_recompute = "recompute" not in request.pins
        self.best_score = np.inf
        self._leader: Solution | None = None
        self._local: dict[bytes, CostModel] = {}

    def neighbours(self, solution: Solution) -> StrategyTable | None:
        """Return the legal rows next to a solution's; looked up once a row."""
        self.find_neighbours([solution])
        return self._neighbours[solution.key[1]]

    def find_neighbours(self, solutions: Sequence[Solution]) -> None:
        """Find the :meth:`neighbours` of many solutions; the rules run once."""
        new = {s.key[1]: s.row for s in solutions if s.key[1] not in self._neighbours}
        if new:
            request = self.request
            found = neighbours_of(list(new.values()), request.facts, request.pins)
            self._neighbours.update(zip(new, found, strict=True))

    # -- Moves -------------------------------------------------------------------

    def allow_choice(self, devices: Index, count: int) -> None:
        """Let solutions on ``count`` devices choose them among ``devices``."""
        self._choices[count] = devices

    def pool_of(self, solution: Solution) -> Index:
        """Return the devices that a solution may use."""
        if self.request.devices == "any":
            return self.request.context.order
        return self._choices.get(len(solution.order), solution.order)

    def moved(self, solution: Solution) -> Solution:
        """Return a solution after a random move of order, row or device count."""
        rng = self.rng
        kind = float(rng.random())
        if kind < _RESIZING and self.request.devices == "any":
            return self._resized(solution)
        rows = self.neighbours(solution) if kind < 0.45 else None
        if rows is not None:
            row = rows.row(int(rng.random() * len(rows)))
            return Solution(order=solution.order, row=row)
        return Solution(order=self._shuffled(solution), row=solution.row)

    def _shuffled(self, solution: Solution) -> Index:
        order, rng, pool = solution.order, self.rng, self.pool_of(solution)
        sizes = block_sizes(solution.row, self.host_devices)
        for _ in range(1 + int(rng.random() < 0.3)):
            spare = spare_of(pool, order) if len(pool) > len(order) else pool[:0]
            size = sizes[int(rng.random() * len(sizes))]
            order = moved_order(order, spare, size, rng)
        limits = self.request.launcher_limits
        if limits is not None and not limits.allows_order(order):
            return solution.order
        return order

    def _resized(self, solution: Solution) -> Solution:
        key, request, order = solution.key[1], self.request, solution.order
        free = request.context.order
        if key not in self._sizes:
            self._sizes[key] = resized(
                solution.row, request.facts, request.pins, len(free)
            )
        rows = self._sizes[key]
        if rows is None:
            return Solution(order=self._shuffled(solution), row=solution.row)
        row = rows.row(int(self.rng.random() * len(rows)))
        spare = spare_of(free, order)
        made = refilled(order, solution.row, row, spare, self.rng)
        return Solution(order=made, row=row)

    # -- Simulation --------------------------------------------------------------

    def _cut_key(self, solution: Solution) -> object:
        """Return a key that is equal for solutions with the same exact cut."""
        row = solution.row
        if self._free_recompute and row["pp"] > 1:
            row = {**row, "recompute": 0}
        return solution.key[0], tuple(row.values())

    def simulate(self, solution: Solution, cuts: int | None = None) -> float:
        """Cut a solution exactly and simulate it, unless that was done before.

        The evenly timed cut is tried as well with several virtual stages on a rank,
        where the exact cut minimises the slowest stage, not the slowest rank; and where
        the exact cut, which counts memory a little differently, does not fit.

        Args:
            solution: The solution; its simulated score counts if it was not priced.
            cuts: Cuts to try; None for one, or two with several virtual stages.
        Returns:
            Its score; ``1e12`` and more if no cut fits; infinite without budget.
        """
        key = self._cut_key(solution)
        if key in self._cut:
            self._simulated[solution.key] = self._cut[key]
            return self._cut[key]
        left = self.left
        cuts = cuts or (2 if solution.row["virtual_stages"] > 1 else 1)
        most = cuts if left is None else min(left, cuts)
        if most < 1:
            return np.inf
        model = self.model_of(solution.order)
        before = model.evaluations["simulated"]
        found = candidates_of_row(
            model,
            solution.row,
            free_recompute=self._free_recompute,
            most=most,
            spare=int(left is None or left > most),
            limits=self.request.launcher_limits,
        )
        self.count_simulations(model.evaluations["simulated"] - before)
        return self.adopt(solution, found)

    def model_of(self, order: Index) -> CostModel:
        """Return the cost model under an order, which keeps the prices of units.

        Its evaluations are not yet among those of the campaign.
        """
        key = order.tobytes()
        if key not in self._local:
            if len(self._local) >= _MODELS:
                del self._local[next(iter(self._local))]
            self._local[key] = CostModel(self.request.context.reordered(order))
        return self._local[key]

    def was_simulated(self, solution: Solution) -> bool:
        """Return True if a solution with the same exact cut was simulated."""
        return self._cut_key(solution) in self._cut

    def adopt(self, solution: Solution, found: Sequence[Candidate]) -> float:
        """Add the simulated candidates of a solution.

        Args:
            solution: The solution; its simulated score counts if it was not priced.
            found: Its cuts, simulated; none if the launcher can express no cut.
        Returns:
            The solution's score, as :meth:`simulate` returns it.
        """
        key = self._cut_key(solution)
        value = min(
            (self._value(candidate) for candidate in found), default=_INEXPRESSIBLE
        )
        self._cut[key] = value
        if self.is_priced(solution):
            self.learn(solution, value)
        else:
            self.take(solution, value)
        self._simulated_keys.add(self.price_key(solution))
        self._candidates += found
        if value < min(self.best_score, _OVER):
            self.best_score, self._leader = value, solution
        return value

    def _value(self, candidate: Candidate) -> float:
        cost, devices = candidate.cost, candidate.strategy.mesh.num_devices
        if cost.fits:
            return score(cost, devices, self.request.objective)
        over = cost.lack_bytes
        return _OVER * (1 + over / 1e9)

    def simulate_best(self, count: int, patience: int | None = None) -> None:
        """Simulate the most promising solutions, few with one mesh.

        Args:
            count: Most solutions.
            patience: Solutions in a row that are no better than the best, after which
                the others are left; None for no limit.
        """
        if count < 1 or self.left == 0:
            return
        done, of_mesh = 0, dict[tuple[int, ...], int]()
        best, idle = self.best_score, 0
        for one in self.best(_REMEMBERED):
            if (
                self.price_key(one) in self._simulated_keys
                or self._cut_key(one) in self._cut
            ):
                continue
            if of_mesh.get(one.mesh, 0) >= _PER_MESH:
                continue
            # A first candidate is simulated whatever the time, and a few that may fit.
            late = self.is_late() and (self.has_fit or done == _TIES)
            if self._candidates and (done == count or late):
                return
            of_mesh[one.mesh] = of_mesh.get(one.mesh, 0) + 1
            self.simulate(one)
            done += 1
            idle = 0 if self.best_score < best else idle + 1
            best = self.best_score
            if idle == patience:
                return

    def polish(self) -> Iterator[None]:
        """Simulate the neighbours of the best plan, under all schedules; yield each.

        It goes on as long as anybody makes the best plan a better one.
        """
        request, polished = self.request, None
        while self._leader is not None and self._leader is not polished:
            leader = polished = self._leader
            rows = neighbours(leader.row, request.facts, request.pins, schedule_names())
            if rows is None:
                return
            near = [Solution(order=leader.order, row=row) for row in rows.rows()]
            self.price(near)
            limit = _PROMISING * self.corrected(leader)
            near = [one for one in near if self.unlimited(one) <= limit]
            for one in sorted(near, key=self.unlimited)[:_POLISHED]:
                if self.left == 0:
                    return
                if not self.was_simulated(one):
                    self.simulate(one, cuts=2)
                    yield

    def finish(self) -> None:
        """Spend the rest of budget and time on the most promising solutions.

        They are tried under other schedules, too, which closed forms price slowly.
        """
        self._try_schedules()
        self.simulate_best(_TIES)
        self._simulate_ties()
        left, request = self.left, self.request
        free = request.time_budget_s is None and request.evaluation_budget is None
        self.simulate_best(
            SIMULATIONS if left is None else left, _PATIENCE if free else None
        )

    def _simulate_ties(self) -> None:
        """Simulate rows with the same score as the best: one of them may send less."""
        leader = self._leader
        if leader is None or self.is_late():
            return
        rows = self.neighbours(leader)
        if rows is None:
            return
        ties = [Solution(order=leader.order, row=row) for row in rows.rows()]
        self.price([leader, *ties])
        alike = [one for one in ties if self.price_key(one) == self.price_key(leader)]
        for one in alike[:_TIES]:
            if not self.is_late():
                self.simulate(one)

    def _try_schedules(self) -> None:
        """Price the best solutions of a few kinds under all other schedules.

        A kind is a mesh with so many stages a rank and samples a microbatch.
        """
        request = self.request
        if "schedule" in request.pins:
            return
        seen: set[tuple[int, ...]] = set()
        for one in self.best(_CONSIDERED):
            row = one.row
            kind = (*one.mesh, row["virtual_stages"], row["microbatch_size"])
            if row["pp"] == 1 or kind in seen:
                continue
            seen.add(kind)
            if len(seen) > _VARIED or (self._candidates and self.is_late(0.95)):
                return
            rows = neighbours(one.row, request.facts, request.pins, schedule_names())
            if rows is None:
                continue
            kept = rows[rows.schedule != one.row["schedule"]]
            if self._candidates and not self._has_time_for(kept):
                continue
            self.price([Solution(order=one.order, row=row) for row in kept.rows()])

    def _has_time_for(self, rows: StrategyTable) -> bool:
        """Return True if there is time to lay out the schedules of rows."""
        until = self.until
        if until is None:
            return True
        actions = 3 * (rows.pp * rows.virtual_stages * rows.num_microbatches).sum()
        return bool(actions * _ACTION_S <= until - time.perf_counter())

    @property
    def simulated(self) -> list[Candidate]:
        """Simulated candidates, legal or not, in the order in which they were found."""
        return self._candidates

    @property
    def has_fit(self) -> bool:
        """True once a simulated solution fits."""
        return bool(np.isfinite(self.best_score))

    @property
    def leader(self) -> Solution | None:
        """The solution with the best simulated score that fits; None before."""
        return self._leader

    def add(self, found: Sequence[Candidate]) -> None:
        """Add simulated candidates that are no solutions: no row has their cuts."""
        self._candidates += found
        fitting = [self._value(one) for one in found if one.cost.fits]
        self.best_score = min(self.best_score, *fitting, np.inf)

    @property
    def candidates(self) -> list[Candidate]:
        """Simulated candidates that are legal."""
        return self.legal(self._candidates)

    def legal(self, kept: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates that are legal."""
        if not kept:
            return []
        table = StrategyTable.from_strategies([c.strategy for c in kept])
        rows = np.flatnonzero(legal(table, self.request.facts))
        return [kept[row] for row in rows.tolist()]

    def result(self, name: str) -> SearchResult:
        """Return the result of the search, best candidates first."""
        return finish(name, self.request, self._model, self.candidates, self.started)
