"""Evidence for a price: what of a strategy was ever measured beside a prediction.

A strategy is made of mechanisms: ZeRO 3, tensor parallelism inside a host, ring
attention and so on. The prices of each were compared with measured runs under the same
recipe, under other recipes only, or never. The less was seen, the wider the interval of
the prediction:

log(measured / predicted) ~ N(0, base^2 + sum over mechanisms of spread^2)

where base is what residuals of held-out runs have, and a mechanism adds nothing where
runs of the recipe have it. ``benchmarks/evidence.py`` makes the counts and spreads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.schema.schedules import schedules
from planner.simulate import schedule_columns
from planner.space.table import RECOMPUTE_NAMES, StrategyTable

__all__ = [
    "INTERVAL",
    "Evidence",
    "Finding",
    "Level",
    "Place",
    "RecipeEvidence",
    "Risk",
    "Seen",
    "interval_of",
    "mechanisms",
    "tokens_of",
]

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: Share of unseen runs that the intervals of predictions are to hold.
INTERVAL = 0.8
#: Runs from which on a mechanism counts as measured.
_ENOUGH = 3

#: How well a mechanism is known: runs of the recipe, of other recipes, or none.
Level = Literal["measured", "elsewhere", "none"]


class Place(NamedTuple):
    """Facts of a request that mechanisms depend on, the same for all strategies.

    Attributes:
        devices_per_host: Most devices that one host holds.
        seq_len: Tokens of a sample; None without a sequence.
        compute: Compute dtype.
        experts: Experts of a layer; 0 without.
    """

    devices_per_host: int
    seq_len: int | None
    compute: str
    experts: int


class _At(NamedTuple):
    """Strategies, and what they have in common."""

    rows: StrategyTable
    place: Place

    def within_host(self, ranks: NDArray[np.int64]) -> Mask:
        """Groups that one host holds whole. Shape [n]."""
        return np.asarray(ranks <= self.place.devices_per_host)


#: Rows that have a mechanism. Shape [n].
Applies = Callable[[StrategyTable, Place], Mask]
_Test = Callable[[_At], Mask]


def _zero(stage: int) -> _Test:
    return lambda at: (
        (at.rows.zero_stage == stage) & (at.rows.dp_shard * at.rows.cp > 1)
    )


def _recomputes(name: str) -> _Test:
    code = RECOMPUTE_NAMES.index(name)
    return lambda at: at.rows.recompute == code


def _schedule_is(code: int) -> _Test:
    return lambda at: (at.rows.pp > 1) & (at.rows.schedule == code)


def _facts(at: _At, name: str) -> Mask:
    """A yes or no of the rows' schedules."""
    return np.asarray(schedule_columns(name)[at.rows.schedule, 0] == 1)


_TESTS: Mapping[str, _Test] = {
    "replicas": lambda at: at.rows.dp_replicate > 1,
    "ZeRO 1": _zero(1),
    "ZeRO 2": _zero(2),
    "ZeRO 3": _zero(3),
    "hybrid sharding": lambda at: (
        (at.rows.zero_stage > 0)
        & (at.rows.dp_replicate > 1)
        & (at.rows.dp_shard * at.rows.cp > 1)
    ),
    "tp": lambda at: (at.rows.tp > 1) & at.within_host(at.rows.tp),
    "tp across hosts": lambda at: ~at.within_host(at.rows.tp),
    "interleaved split backward": lambda at: (
        (at.rows.pp > 1)
        & (at.rows.virtual_stages > 1)
        & _facts(at, "splits_backward")
        & ~_facts(at, "folded")
    ),
    "cp": lambda at: (at.rows.cp > 1) & at.within_host(at.rows.cp * at.rows.tp),
    "cp across hosts": lambda at: (
        (at.rows.cp > 1) & ~at.within_host(at.rows.cp * at.rows.tp)
    ),
    "ep": lambda at: (at.rows.ep > 1) & at.within_host(at.rows.ep),
    "ep across hosts": lambda at: (at.rows.ep > 1) & ~at.within_host(at.rows.ep),
    "selective recomputation": _recomputes("selective"),
    "full recomputation": _recomputes("full"),
    "float8": lambda at: np.full(len(at.rows), at.place.compute == "float8"),
    "experts": lambda at: np.full(len(at.rows), at.place.experts > 0),
}


def _applies(test: _Test) -> Applies:
    return lambda rows, place: test(_At(rows, place))


def mechanisms() -> dict[str, Applies]:
    """Mechanisms by name; every schedule of the registry is one."""
    by_schedule = {spec.name: _schedule_is(spec.code) for spec in schedules()}
    return {name: _applies(test) for name, test in {**_TESTS, **by_schedule}.items()}


def tokens_of(rows: StrategyTable, place: Place) -> Array:
    """Tokens of a microbatch that one rank has. Shape [n]."""
    return np.asarray(rows.microbatch_size * (place.seq_len or 1) / rows.cp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Measured runs with a mechanism.

    Attributes:
        runs: How many.
        tokens: Fewest tokens of a rank's microbatch among them.
    """

    runs: int
    tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeEvidence:
    """Measured runs of one recipe.

    Attributes:
        runs: How many.
        base: Spread of the logarithm of measured over predicted, of held-out runs.
        seen: By mechanism; those without runs are left out.
        tokens: Fewest tokens of a rank's microbatch in any run.
    """

    runs: int
    base: float
    seen: Mapping[str, Seen]
    tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Measured runs of all recipes, and the spreads that stand for their lack.

    Attributes:
        recipes: By name.
        base: Spread of predictions under a recipe without runs.
        elsewhere: What a mechanism adds that only other recipes' runs have.
        unseen: What a mechanism adds that no run has.
    """

    recipes: Mapping[str, RecipeEvidence]
    base: float
    elsewhere: float
    unseen: float

    def level(self, recipe: str, mechanism: str) -> Level:
        """Tell how well a mechanism is known under a recipe."""
        own = self.recipes.get(recipe)
        if own is not None and _runs(own, mechanism) >= _ENOUGH:
            return "measured"
        every = sum(_runs(one, mechanism) for one in self.recipes.values())
        return "elsewhere" if every >= _ENOUGH else "none"

    def added(self, level: Level) -> float:
        """Return the spread that a mechanism of a level adds."""
        return {"measured": 0.0, "elsewhere": self.elsewhere, "none": self.unseen}[
            level
        ]

    def findings(
        self, recipe: str, rows: StrategyTable, place: Place
    ) -> list[tuple[Finding, Mask]]:
        """List what no run of the recipe has, with the rows that rest on it."""
        own = self.recipes.get(recipe)
        found = []
        for name, applies in mechanisms().items():
            level = self.level(recipe, name)
            if level != "measured":
                finding = Finding(name, level, self.added(level))
                found.append((finding, applies(rows, place)))
                continue
            least = own.seen[name].tokens if own is not None else 0.0
            if name in _BY_TOKENS:
                few = applies(rows, place) & (tokens_of(rows, place) < least)
                found.append((self._few(f"{name} below", least), few))
        least = own.tokens if own is not None else 0.0
        few = tokens_of(rows, place) < least
        return [*found, (self._few("microbatches below", least), few)]

    def _few(self, words: str, least: float) -> Finding:
        return Finding(f"{words} {least:,.0f} tokens a rank", "none", self.unseen)

    def spread(self, recipe: str, rows: StrategyTable, place: Place) -> Array:
        """Standard deviation of log(measured / predicted) of rows. Shape [n]."""
        own = self.recipes.get(recipe)
        base = own.base if own is not None else self.base
        variance = np.full(len(rows), base**2)
        for finding, mask in self.findings(recipe, rows, place):
            variance += np.where(mask, finding.spread**2, 0.0)
        return np.asarray(np.sqrt(variance))


#: Mechanisms whose price depends on how many tokens a rank has at a time.
_BY_TOKENS = frozenset({"cp", "cp across hosts", "ep", "ep across hosts"})


def _runs(recipe: RecipeEvidence, mechanism: str) -> int:
    seen = recipe.seen.get(mechanism)
    return seen.runs if seen is not None else 0


class Finding(NamedTuple):
    """A mechanism that a price leans on without runs of its recipe.

    Attributes:
        mechanism: Name, with its range where that is what lacks.
        level: ``elsewhere`` or ``none``.
        spread: Standard deviation that it adds.
    """

    mechanism: str
    level: Level
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """Weight of a strategy's uncertainty against it.

    Attributes:
        quantile: Of the predicted distribution of the step time, by which strategies
            are ranked: 0.5 ranks by the prediction itself.
        evidence: What was measured.
    """

    quantile: float
    evidence: Evidence

    def factor(self, spread: Array) -> Array:
        """Return the quantile of the step time over its median. Shape as given."""
        return np.exp(NormalDist().inv_cdf(self.quantile) * spread)


def interval_of(step_s: float, spread: float) -> tuple[float, float]:
    """Return the ends between which :data:`INTERVAL` of measured steps are to lie."""
    wide = NormalDist().inv_cdf(0.5 + INTERVAL / 2) * spread
    return step_s * float(np.exp(-wide)), step_s * float(np.exp(wide))
