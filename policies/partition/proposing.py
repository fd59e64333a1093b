"""What the network proposes, improved by small changes and simulated.

One proposer answers one question; what it finds is in its ``known``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envs.partition.features import Observed, observe
from planner.schema import SCHEDULES
from planner.search.arranging.arranger import Arranger, Finalists, Priced, open_arranger
from planner.search.arranging.climb import Limits, best_of, climb, joined
from planner.search.arranging.mended import Mended
from planner.search.arranging.misses import best_score, roomiest
from planner.search.arranging.screening import Screened
from planner.search.arranging.settling import Settler
from planner.search.moves import Solution
from policies.partition.decoding import draw_orders
from policies.partition.network import Encoded
from policies.partition.polishing import polish
from policies.partition.problem import Problem, share_of
from policies.partition.refining import Known
from policies.partition.saved import SavedNetwork
from policies.partition.shortlist import shortlist

__all__ = ["Proposer", "SearchConfig"]

#: What is this much worse than the best by closed forms is not simulated any more.
_HOPELESS = 1.25
#: Share of the time that is left which drawing orders may take, and what a step of it
#: takes: seconds, and seconds for each order and group (one core of 2020).
_DRAWING, _STEP_S, _GROUP_S = 0.3, 4e-4, 1.5e-6
#: Without a clock, orders times groups squared.
_MOST_DRAWN = 120_000
#: Rows that are simulated before other schedules are, and pipelines that are tried
#: under those; the schedules by how short their bubbles are.
_PLAIN, _VARIED = 3, 3
_PREFERRED = {
    SCHEDULES.index(name): place
    for place, name in enumerate(
        ("ZBVZeroBubble", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS")
    )
}
#: Share of the time that is left which pricing meshes with all rows may take.
_OPENING = 0.4
#: Arrangements that evolution starts from, and of one layout.
_SEEDS, _OF_LAYOUT = 48, 6

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """How much is tried of what.

    Attributes:
        meshes: Meshes priced in one go where the network chooses alone.
        layouts: Of them, those that orders are drawn for.
        draws: Orders drawn for each.
        rounds: Rounds of small changes without a clock.
        climbing: Share of the time that is left when they begin.
        finalists: Arrangements simulated without a clock.
        generations: Of evolution, where there is neither a clock nor a number of
            simulations; 0 for none at all.
        learned: False scores meshes at random and draws orders at random: what search
            alone is worth.
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
    """Proposes for one problem.

    Args:
        problem: The question.
        saved: The network.
        config: How much is tried.
        known: Gets what is found.
    """

    def __init__(
        self, problem: Problem, saved: SavedNetwork, config: SearchConfig, known: Known
    ) -> None:
        self.problem, self.known = problem, known
        self._saved, self._config = saved, config
        self._settler = Settler(request=problem.request, model=known.model)
        self._mended = Mended()
        self._seen: Screened | None = None
        self._rng = np.random.default_rng(problem.request.seed)

    def propose(self) -> None:
        """Fill in what is known: solutions, some of them simulated."""
        problem, saved = self.problem, self._saved
        if not len(problem.choices):
            return
        seen = observe(problem.request, problem.groups, problem.choices)
        encoded = saved.network.encode(seen)
        logits = saved.network.mesh_logits(seen, encoded).numpy()
        if not self._config.learned:
            logits = self._rng.random(len(logits))
        arranger = self._open(np.argsort(-logits, kind="stable"))
        if arranger is not None:
            self._arrange(seen, encoded, arranger)
        if not np.isfinite(self._best()):
            self._settle_roomiest()

    def _arrange(self, seen: Observed, encoded: Encoded, arranger: Arranger) -> None:
        """Draw and climb where order matters; simulate the best."""
        problem, known = self.problem, self.known
        layouts = arranger.layouts
        current = Priced(
            layout=np.arange(len(layouts)),
            sequence=layouts.sequence,
            row=layouts.starts[:-1].copy(),
            score=layouts.score,
        )
        if problem.order_matters:
            if self._affordable():
                drawn = self._draw(seen, encoded, arranger)
                current = joined([current, drawn])
            current = self._climb(arranger, current)
        self._settle(arranger, current)
        if not problem.order_matters:
            polish(self._settler, known, problem.until)
        if problem.over:
            return
        seeds = arranger.finalists(best_of(current, _SEEDS, of_layout=_OF_LAYOUT))
        known.solutions += [
            _solution(arranger, seeds, index) for index in range(len(seeds))
        ]

    def _open(self, ranked: Index) -> Arranger | None:
        """The best meshes that fit; further down the list while none does."""
        problem = self.problem
        if not problem.late:
            short = shortlist(problem, self._settler, ranked)
            self.known.found += short.settled.found
            self._mended, self._seen = short.settled.mended, short.seen
            opened = self._opened(short.chosen)
            if opened is not None or np.isfinite(self._best()):
                return opened
        step = self._config.meshes
        for start in range(0, len(ranked), step):
            opened = self._opened(ranked[start : start + step])
            if opened is not None:
                return opened
            step *= 2
            if problem.late:
                return None
        return None

    def _opened(self, chosen: Index) -> Arranger | None:
        one, model = self.problem, self.known.model
        if not len(chosen):
            return None
        until = share_of(one.until, _OPENING)
        asked = one.request, one.choices, one.groups
        return open_arranger(*asked, chosen, model, until, self._settler, self._mended)

    def _best(self) -> float:
        """Score of the best that was simulated; infinite if nothing fits so far."""
        request, found = self.problem.request, self.known.found
        return min((best_score(request, cuts) for _, cuts in found), default=np.inf)

    def _affordable(self) -> int:
        """Orders to draw, so that on a clock they take a share of it; 0 for none."""
        problem = self.problem
        groups = len(problem.groups)
        wanted = self._config.layouts * (1 + self._config.draws)
        if problem.until is None:
            return min(wanted, max(8, _MOST_DRAWN // groups**2))
        left = _DRAWING * (problem.until - time.perf_counter())
        each_step = left / groups - _STEP_S
        count = int(min(wanted, each_step / (_GROUP_S * groups)))
        return count if count >= 4 else 0

    def _draw(self, seen: Observed, encoded: Encoded, arranger: Arranger) -> Priced:
        """Orders for the best layouts, the likeliest of each among them."""
        problem, rng = self.problem, self._rng
        count = max(1, self._affordable())
        few = np.arange(min(self._config.layouts, len(arranger.layouts), count))
        layout = np.sort(np.resize(few, max(0, count - len(few))))
        layout = np.concatenate([few, layout])
        if not self._config.learned:
            sequence = arranger.layouts.sequence[layout]
            shuffled = np.stack(
                [np.append(rng.permutation(s[s >= 0]), s[s < 0]) for s in sequence]
            )
            return arranger.price(layout, shuffled)
        drawn = draw_orders(
            self._saved.network,
            seen,
            encoded,
            problem.groups,
            problem.choices,
            arranger.layouts.choice[layout],
            rng,
            greedy=len(few),
        )
        return arranger.price(layout, drawn.sequence)

    def _climb(self, arranger: Arranger, start: Priced) -> Priced:
        until = share_of(self.problem.until, self._config.climbing)
        rounds = self._config.rounds if until is None else None
        limits = Limits(until=until, rounds=rounds)
        return joined([climb(arranger, start, self._rng, limits), best_of(start, 8)])

    def _settle(self, arranger: Arranger, current: Priced) -> None:
        """Simulate the best until time or the number of simulations is up."""
        problem, known = self.problem, self.known
        budget = problem.request.evaluation_budget
        before = known.model.evaluations["simulated"]
        finalists = self._config.finalists
        # Where no order matters polishing finds out about the rest.
        finalists = finalists if problem.order_matters else -(-finalists // 2)
        most = before + finalists if budget is None else budget
        if budget is not None and self._config.generations and problem.order_matters:
            most = -(-budget // 2)
        few = best_of(current, max(12, self._config.finalists), of_layout=3)
        ranked = arranger.finalists(few)
        fits = bool(np.isfinite(self._best()))
        for entered, index in self._turns(arranger, ranked):
            hopeless = entered.score[index] > _HOPELESS * self._best()
            if hopeless and np.isfinite(entered.score[index]):
                continue
            spent = known.model.evaluations["simulated"]
            full = spent >= most and (problem.until is None or budget is not None)
            if known.found and (full or (problem.late and fits)):
                break
            # The exact cut has the fastest slowest stage; of ranks that hold several
            # stages the slowest may be another, and even times the better cut.
            looped = entered.rows.virtual_stages[index] > 1
            left = 2 if budget is None else max(1, most - spent)
            cuts = min(left, 2 if looped else 1)
            cut = arranger.settled(entered, index, cuts=cuts, spare=int(left > cuts))
            fits = fits or any(one.cost.fits for one in cut)
            known.found.append((_solution(arranger, entered, index), cut))

    def _settle_roomiest(self) -> None:
        """Simulate what has most memory to spare, until something fits."""
        problem, known = self.problem, self.known
        if self._seen is None:
            return
        asked = problem.request, known.model, problem.groups, problem.choices
        for miss in roomiest(*asked, self._seen):
            budget = problem.request.evaluation_budget
            if budget is not None and known.model.evaluations["simulated"] >= budget:
                return
            cuts = self._settler.settled(miss.solution.row, miss.solution.order)
            known.found.append((miss.solution, cuts))
            if problem.over or np.isfinite(self._best()):
                return

    @staticmethod
    def _turns(
        arranger: Arranger, ranked: Finalists
    ) -> Iterator[tuple[Finalists, int]]:
        """What to simulate, the most promising first.

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
            others = arranger.variants(ranked, index)
            known = _PREFERRED.get
            order = [known(int(code), len(_PREFERRED)) for code in others.rows.schedule]
            yield from (
                (others, int(other)) for other in np.argsort(order, kind="stable")
            )
        for index in rows[_PLAIN:]:
            if ranked.score[index] > _HOPELESS * ranked.score[0]:
                return
            yield ranked, index


def _solution(arranger: Arranger, rows: Finalists, index: int) -> Solution:
    count = int(arranger.layouts.count[rows.layout[index]])
    order = arranger.groups.orders(rows.sequence[index : index + 1], count)[0]
    return Solution(order=order, row=rows.rows.row(index))
