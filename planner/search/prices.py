"""Prices of solutions by closed forms, corrected by what simulations of rows said."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.search.base import Request
from planner.search.budget import Budget
from planner.search.moves import Solution
from planner.space import StrategyTable

__all__ = ["INEXPRESSIBLE", "OVER", "REMEMBERED", "Prices"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Added to the score of what does not fit, with its excess, so that it comes last.
OVER = 1e12
#: Priced solutions that are remembered before the worse half is forgotten.
REMEMBERED = 4_000
#: Score of what the request's launcher cannot say.
INEXPRESSIBLE = 1e30


class Prices(Budget):
    """Remembers what solutions cost, and counts what pricing them spent.

    Args:
        request: What is asked.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._scores: dict[object, float] = {}
        self._distinct: dict[object, Solution] = {}
        self._kinds: dict[object, object] = {}
        self._ratios: dict[object, float] = {}
        self._recut: dict[object, tuple[float, float]] = {}
        self._simulated: dict[object, float] = {}
        self._hopes: dict[object, float] = {}
        self._types = np.asarray(request.setting.cluster.type_index)

    def price(self, solutions: Sequence[Solution]) -> Array:
        """Scores by closed forms, corrected by what simulations of the rows said.

        Those that do not fit in memory score ``1e12`` and more, by their excess.

        Args:
            solutions: Any number, of any numbers of devices.
        """
        if len(self._distinct) > REMEMBERED or len(self._scores) > 8 * REMEMBERED:
            self._forget()
        fresh = {one.key: one for one in solutions if one.key not in self._scores}
        if fresh:
            self._price(list(fresh.values()))
        return np.array([self.corrected(one) for one in solutions])

    def corrected(self, solution: Solution) -> float:
        """The score of a solution that was priced.

        A row that lacked memory and fitted when it was cut by memory is taken to fit
        under other orders that lack no more.
        """
        simulated = self._simulated.get(solution.key)
        if simulated is not None:
            return simulated
        row, closed = solution.key[1], self._scores[solution.key]
        if closed < OVER:
            return closed * self._ratios.get(row, 1.0)
        lacked, ratio = self._recut.get(row, (0.0, 1.0))
        return self._hopes[solution.key] * ratio if closed <= lacked else closed

    def learn(self, solution: Solution, value: float) -> None:
        """Correct what closed forms say of a row by one that was simulated.

        Args:
            solution: Was priced.
            value: Its score, ``1e12`` and more if it does not fit.
        """
        row, closed = solution.key[1], self._scores[solution.key]
        self._simulated[solution.key] = value
        if value >= OVER:
            return
        if closed < OVER:
            self._ratios[row] = value / closed
        elif closed < INEXPRESSIBLE:
            lacked, _ = self._recut.get(row, (0.0, 1.0))
            ratio = value / self._hopes[solution.key]
            self._recut[row] = max(lacked, closed), ratio

    def may_fit(self, solution: Solution) -> bool:
        """True if a solution that was priced fits, as far as is known."""
        return self.corrected(solution) < OVER

    def hope(self, solution: Solution) -> float:
        """The score of a solution that was priced, if memory were enough."""
        return self._hopes.get(solution.key, self.corrected(solution))

    def alike(self, solution: Solution) -> object:
        """Equal for solutions that the closed forms cannot tell apart.

        Most of them differ in which of several equal devices is where, others in what
        hides behind the rest of the step. Each must have been priced.
        """
        return self._kinds[solution.key]

    def _kind(self, solution: Solution) -> object:
        row, types = solution.row, self._types[solution.order]
        # The simulator knows which stage is on slow devices.
        slowest = types.reshape(row["pp"], -1).max(axis=1).tobytes()
        shape = row["pp"], row["schedule"], row["virtual_stages"], slowest
        return shape, f"{self._scores[solution.key]:.9g}"

    def _price(self, solutions: list[Solution]) -> None:
        """All at once, each under its own order."""
        numbers: dict[bytes, int] = {}
        which = [numbers.setdefault(s.key[0], len(numbers)) for s in solutions]
        orders = [np.frombuffer(key, dtype=np.int64) for key in numbers]
        ids = np.full((len(orders), max(map(len, orders))), -1, dtype=np.int64)
        for place, order in enumerate(orders):
            ids[place, : len(order)] = order
        table = StrategyTable.from_columns(
            **{name: [one.row[name] for one in solutions] for name in solutions[0].row}
        )
        costs = self._model.arranged(table, ids, np.array(which, dtype=np.int64))
        value = self.objective(costs.step_time_s, costs.memory_bytes, table.num_devices)
        over = OVER * (1 + np.maximum(costs.excess_bytes, 0) / 1e9)
        found = np.where(costs.fits, value, over)
        limits = self.request.launcher_limits
        if limits is not None:
            found = np.where(limits.mask(ids)[which], found, INEXPRESSIBLE)
        missed = np.flatnonzero((found >= OVER) & (found < INEXPRESSIBLE))
        for place in missed.tolist():
            self._hopes[solutions[place].key] = float(value[place])
        for one, each in zip(solutions, found.tolist(), strict=True):
            self._scores[one.key] = each
            self._kinds[one.key] = self._kind(one)
            self._distinct.setdefault(self._kinds[one.key], one)

    def objective(self, seconds: Array, memory_bytes: Array, devices: Index) -> Array:
        """Number that the request makes small, of many strategies. Shapes [n]."""
        if self.request.objective == "memory":
            return memory_bytes
        if self.request.objective == "throughput_per_device":
            return np.asarray(seconds * devices)
        return seconds

    def _forget(self) -> None:
        """Keep the better ones, and of those alike the first."""
        kept = self.best(REMEMBERED // 2)
        self._scores = {one.key: self._scores[one.key] for one in kept}
        self._kinds = {one.key: self._kinds[one.key] for one in kept}
        self._hopes = {k: hope for k, hope in self._hopes.items() if k in self._kinds}
        self._distinct = {self._kinds[one.key]: one for one in kept}

    def best(self, count: int) -> list[Solution]:
        """The best of all priced, of those alike the first; by corrected scores."""
        known = list(self._distinct.values())
        order = np.argsort([self.corrected(one) for one in known], kind="stable")
        return [known[index] for index in order[:count].tolist()]
