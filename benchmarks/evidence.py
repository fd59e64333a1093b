"""Evidence for prices: which mechanisms measured runs have, and how far off these are.

python -m benchmarks.evidence [--points FILE] [--collected FILE] [--write]

Runs of points.csv are predicted by fits that never saw their source, those of
collected.csv by the shipped constants, which were not fitted to them. Prints, by recipe
and mechanism, the runs and the error; and the share of runs that 80 % intervals hold,
where the intervals are made from points.csv alone and the runs are those of
collected.csv. ``--write`` writes ``planner/measurements/data/evidence.json``, from both
files. A few minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.cost_model_fits import predict_by
from benchmarks.cost_model_rows import Rows
from benchmarks.cost_model_scores import Prediction, runs_of
from benchmarks.tables import aligned
from planner.cost.evidence import (
    INTERVAL,
    Evidence,
    RecipeEvidence,
    Seen,
    interval_of,
    mechanisms,
    tokens_of,
)
from planner.measurements.cases import Case
from planner.measurements.evidence import EVIDENCE, evidence_document
from planner.measurements.points import read_points
from planner.schema.base import write_atomically
from planner.space import StrategyTable

__all__ = ["Residual", "coverage_of", "evidence_from", "main", "residuals"]

#: What a mechanism without any measured run adds to an interval: 25 % either way at
#: 80 %. Assumption: no run can say it.
UNSEEN = 0.25
#: Half-width of 80 % intervals in standard deviations.
_WIDE = float(np.log(interval_of(1.0, 1.0)[1]))
#: Runs with a mechanism, and without it, from which on they are compared.
_COMPARED = 10
#: Runs whose weight the error over all recipes has in that of one.
_PRIOR = 20
_COLLECTED = Path(__file__).parent / "data" / "collected.csv"


@dataclass(frozen=True, eq=False, kw_only=True)
class Residual:
    """A measured run beside its prediction.

    Attributes:
        recipe: Framework.
        log: Logarithm of predicted over measured.
        case: The run.
        source: Where it is from.
    """

    recipe: str
    log: float
    case: Case
    source: str

    @property
    def row(self) -> StrategyTable:
        """The run's strategy as a table of one row."""
        return StrategyTable.from_strategies([self.case.strategy])

    @cached_property
    def mechanisms(self) -> list[str]:
        """Names of the mechanisms of the run's strategy."""
        row, place = self.row, self.case.setting.place
        return [name for name, has in mechanisms().items() if has(row, place)[0]]

    @property
    def tokens(self) -> float:
        """Tokens of a rank's microbatch."""
        return float(tokens_of(self.row, self.case.setting.place)[0])


def residuals(path: Path, fit: str) -> list[Residual]:
    """Predict the runs of a file by constants that were not fitted to them.

    Args:
        path: CSV of measurements.
        fit: A name of :data:`benchmarks.cost_model_fits.FITS`.
    """
    points = read_points(path)
    rows = Rows(points)
    predictions: Sequence[Prediction] = predict_by(fit, points, rows)
    places = {(one.source, one.point_id): at for at, one in enumerate(points)}
    found = []
    for run in runs_of(predictions):
        case = rows.case(places[run.source, run.point_id])
        if case is None or not run.step_s:
            continue
        found.append(
            Residual(
                recipe=case.framework,
                log=math.log(run.step_s / run.measured_s),
                case=case,
                source=run.source,
            )
        )
    return found


def _spread(logs: Iterable[float]) -> float:
    """Standard deviation of a normal error of which 80 % are as small as these."""
    return float(np.quantile(np.abs(list(logs)), INTERVAL)) / _WIDE


def _counted(rows: Sequence[Residual], base: float) -> RecipeEvidence:
    """Count the mechanisms of one recipe's runs."""
    tokens: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name in row.mechanisms:
            tokens[name].append(row.tokens)
    own = _spread(row.log for row in rows)
    shrunk = (len(rows) * own**2 + _PRIOR * base**2) / (len(rows) + _PRIOR)
    return RecipeEvidence(
        runs=len(rows),
        base=round(math.sqrt(shrunk), 4),
        tokens=min(row.tokens for row in rows),
        seen={
            name: Seen(runs=len(tokens[name]), tokens=min(tokens[name]))
            for name in mechanisms()
            if tokens[name]
        },
    )


def evidence_from(rows: Sequence[Residual]) -> Evidence:
    """Count the mechanisms of runs, and measure how far off their predictions are.

    Args:
        rows: Runs that no constant was fitted to.
    """
    base = _spread(row.log for row in rows)
    by_recipe: dict[str, list[Residual]] = defaultdict(list)
    for row in rows:
        by_recipe[row.recipe].append(row)
    biases = [one for own in by_recipe.values() for one in _biases(own).values()]
    elsewhere = float(np.sqrt(np.mean(np.square(biases)))) if biases else base
    return Evidence(
        recipes={name: _counted(own, base) for name, own in by_recipe.items()},
        base=round(math.hypot(base, elsewhere), 4),
        elsewhere=round(elsewhere, 4),
        unseen=round(math.log(1 + UNSEEN) / _WIDE, 4),
    )


def _biases(rows: Sequence[Residual]) -> dict[str, float]:
    """Return how much mechanisms shift the errors of one recipe's runs.

    It is what a price may be off that was made for other recipes: the mean logarithm
    with the mechanism less that without, where there are enough runs of both.
    """
    found = {}
    names = {row: set(row.mechanisms) for row in rows}
    for name in mechanisms():
        parts = [[r.log for r in rows if (name in names[r]) is has] for has in (1, 0)]
        if min(map(len, parts)) >= _COMPARED:
            found[name] = float(np.mean(parts[0]) - np.mean(parts[1]))
    return found


def coverage_of(evidence: Evidence, rows: Sequence[Residual]) -> float:
    """Return the share of runs that lie in the interval of their prediction."""
    held = [
        abs(row.log)
        <= _WIDE
        * float(evidence.spread(row.recipe, row.row, row.case.setting.place)[0])
        for row in rows
    ]
    return float(np.mean(held))


def _by_recipe(rows: Sequence[Residual]) -> str:
    names = sorted({row.recipe for row in rows})
    lines = [("recipe", "runs", "error", "bias", "spread")]
    for name in names:
        logs = np.array([row.log for row in rows if row.recipe == name])
        lines.append((name, str(len(logs)), *_error(logs), f"{_spread(logs):.3f}"))
    return aligned(lines)


def _by_mechanism(rows: Sequence[Residual]) -> str:
    lines = [("mechanism", "runs", "recipes", "error", "bias")]
    for name in mechanisms():
        own = [row for row in rows if name in row.mechanisms]
        logs = np.array([row.log for row in own])
        recipes = str(len({row.recipe for row in own}))
        cells = _error(logs) if own else ("-", "-")
        lines.append((name, str(len(own)), recipes, *cells))
    return aligned(lines)


def _error(logs: NDArray[np.float64]) -> tuple[str, str]:
    ratio = np.exp(logs) - 1
    return f"{np.abs(ratio).mean():.1%}", f"{ratio.mean():+.1%}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; write the evidence if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=Path)
    parser.add_argument("--collected", type=Path, default=_COLLECTED)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(argv)
    folder = os.environ.get("MESHWRIGHT_DATA", "")
    if args.points is None and not folder:
        parser.error("give --points, or set MESHWRIGHT_DATA; see docs/data.md")
    seen = residuals(args.points or Path(folder) / "measured" / "points.csv", "loso")
    fresh = residuals(args.collected, "shipped")
    known = evidence_from(seen)
    both = [*seen, *fresh]
    print("Predictions of runs that no constant was fitted to:\n")
    print(_by_recipe(both), _by_mechanism(both), sep="\n\n")
    print(
        f"\n{INTERVAL:.0%} intervals of points.csv hold "
        f"{coverage_of(known, fresh):.1%} of the {len(fresh)} runs of "
        f"{args.collected.name}, and {coverage_of(known, seen):.1%} of its own"
    )
    whole = evidence_from(both)
    print(
        f"spread of a recipe without runs {whole.base:.3f}, added by a mechanism that "
        f"other recipes' runs have {whole.elsewhere:.3f}, that none has "
        f"{whole.unseen:.3f}"
    )
    if args.write:
        text = json.dumps(evidence_document(whole), indent=1)
        write_atomically(EVIDENCE, (text + "\n").encode())
        print(f"{EVIDENCE}: {len(both)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
