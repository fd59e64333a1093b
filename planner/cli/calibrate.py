"""The command ``meshwright calibrate``."""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from planner.cli.options import CalibrationName
from planner.cli.output import emit_json, emit_table, emit_text, note, progress
from planner.schema.base import require_writable

if TYPE_CHECKING:
    from planner.calibration.refit import Refit
    from planner.cost.constants import Calibration
    from planner.measurements.points import Point

__all__ = ["CalibrateCommand"]


@dataclass(frozen=True, kw_only=True)
class CalibrateCommand:
    """Correct the constants of GPUs and frameworks by a handful of your own runs."""

    measurements: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CSV")]
    """One row a run; docs/cli.md names the columns."""
    out: Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = (
        "calibration.json"
    )
    """Where to write the constants; give that file as --calibration."""
    start: CalibrationName = "shipped"
    """What is known so far, and pulls the fit towards it."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Read, fit, write, print."""
        require_writable(self.out)
        from planner.measurements.points import read_points
        from planner.measurements.store import save_calibration

        points = read_points(self.measurements)
        start = self._start()
        today = datetime.date.today().isoformat()
        stem = Path(self.measurements).stem
        name = f"{stem} {today}" + (f" on {start.name}" if start else "")
        result = self._refit(points, start, name)
        save_calibration(result.calibration, self.out, result.origin(today))
        note(f"wrote {self.out}")
        if self.json:
            emit_json(_data(result))
        else:
            _report(result)

    def _start(self) -> Calibration | None:
        from planner.measurements.store import has_shipped, load_calibration, shipped

        if self.start == "none":
            return None
        if self.start != "shipped":
            return load_calibration(self.start)
        return shipped() if has_shipped() else None

    def _refit(
        self, points: tuple[Point, ...], start: Calibration | None, name: str
    ) -> Refit:
        from planner.calibration.refit import refit

        with progress(len(points), "row") as bar:

            def watch(done: int) -> None:
                bar.update(done - bar.n)
                if done == len(points):
                    bar.set_description("fitting")

            return refit(points, start, name=name, watch=watch)


def _data(result: Refit) -> dict[str, Any]:
    return {
        "calibration": result.calibration.name,
        "error_before": result.error_before,
        "error_after": result.error_after,
        "rows": [
            {**asdict(row), "before": row.before, "after": row.after}
            for row in result.rows
        ],
        "unusable": [
            {"point_id": point_id, "why": why} for point_id, why in result.unusable
        ],
        "moved": [asdict(one) for one in result.moved],
    }


def _report(result: Refit) -> None:
    emit_table(
        ("run", "measured", "before", "after", "device", "framework"),
        [
            (
                row.point_id,
                f"{row.measured_s:.4g} s",
                f"{row.before:+.1%}",
                f"{row.after:+.1%}",
                row.device,
                row.framework,
            )
            for row in result.rows
        ],
    )
    emit_text(
        f"mean absolute error of {len(result.rows)} runs: {result.error_before:.1%} "
        f"before, {result.error_after:.1%} after"
    )
    if result.unusable:
        emit_text("")
        emit_table(("not used", "why"), result.unusable)
    emit_text("")
    if not result.moved:
        emit_text("no constant moved")
        return
    emit_table(
        ("of", "constant", "before", "after"),
        [
            (one.of, one.name, f"{one.before:.4g}", f"{one.after:.4g}")
            for one in result.moved
        ],
    )
