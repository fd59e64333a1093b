"""Commands on models and machines: models, clusters, probe, calibrate."""

from __future__ import annotations

import datetime
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from planner.cli.options import OptionalInt
from planner.cli.output import emit_json, emit_table, emit_text, note, progress, working
from planner.errors import ExecutionError, MeshwrightError
from planner.schema.base import require_writable

if TYPE_CHECKING:
    from planner.calibration.refit import Refit
    from planner.cluster import Cluster
    from planner.cost.constants import Calibration
    from planner.measurements.points import Point

__all__ = ["CalibrateCommand", "ClustersCommand", "ModelsCommand", "ProbeCommand"]


@dataclass(frozen=True, kw_only=True)
class ModelsCommand:
    """List the built-in model names."""

    json: bool = False
    """Print the list as JSON."""

    def run(self) -> None:
        """Print the names, classes and sources."""
        from planner.capture import built_in_models

        known = built_in_models()
        if self.json:
            emit_json(
                {
                    name: {"class": made, "source": of}
                    for name, (made, of) in known.items()
                }
            )
            return
        rows = [(name, *entry) for name, entry in known.items()]
        emit_table(("model", "class", "figures from"), rows)


@dataclass(frozen=True, kw_only=True)
class ClustersCommand:
    """List the cluster presets, or show one cluster."""

    name: Annotated[
        str | None,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="CLUSTER", help_behavior_hint=""),
    ] = None
    """Cluster to show in detail: a preset with a node count, local, or a file."""
    json: bool = False
    """Print as JSON; a single cluster as its document, ready to be edited."""

    def run(self) -> None:
        """Print."""
        from planner.cluster import Cluster, cluster_names

        if self.name is not None:
            cluster = Cluster.parse(self.name)
            if self.json:
                emit_json(cluster.document.to_data())
            else:
                emit_table(("", ""), list(cluster.describe().items()))
            return
        names = cluster_names()
        if self.json:
            emit_json(list(names))
            return
        emit_table(("preset", "one unit is"), [(name, _unit(name)) for name in names])


def _unit(name: str) -> str:
    """Devices of a preset's smallest cluster, or the reason why its data is missing."""
    from planner.cluster import Cluster

    try:
        cluster: Cluster = Cluster.from_preset(name)
    except MeshwrightError as error:
        return f"not available: {error}"
    kinds = cluster.reference().device_types
    return " + ".join(f"{count} x {kind}" for kind, count in kinds.items())


@dataclass(frozen=True, kw_only=True)
class ProbeCommand:
    """Measure this machine (or, under torchrun, all of them) and save the result."""

    processes: OptionalInt = None
    """Number of local processes; one a GPU, or one a core, by default."""
    out: Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = "probe.json"
    """File for the result; plan takes it as --cluster."""
    seconds: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 10.0
    """Approximate time to measure."""
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        tyro.conf.arg(metavar="{cpu,cuda}", help_behavior_hint=""),
    ] = None
    """Kind of device; GPUs by default, where there are any."""
    seed: int = 0
    """Seed of the random matrices."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Start the processes, measure, write."""
        if self.processes is not None and self.processes < 1:
            raise ExecutionError(f"--processes {self.processes}; probe at least 1")
        if not 0 < self.seconds < float("inf"):
            raise ExecutionError(
                f"--seconds {self.seconds:g} is not above 0; give about 10"
            )
        require_writable(self.out)
        arguments: dict[str, Any] = {
            "seconds": self.seconds,
            "seed": self.seed,
            "device": self.device,
            "name": Path(self.out).name.removesuffix(".json"),
            "date": datetime.date.today().isoformat(),
        }
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            from planner.cli.rank import probe_rank

            result = probe_rank(arguments, lambda _: None)
            if os.environ["RANK"] == "0":
                self._report(result)
            return
        self._report(self._launch(arguments))

    def _launch(self, arguments: dict[str, Any]) -> dict[str, Any]:
        from executors import launch
        from planner.cluster import Cluster

        processes = self.processes or Cluster.detect().num_devices
        note(f"probing with {processes} processes for about {self.seconds:.0f} s")
        with working("probing"):
            results = launch(
                "planner.cli.rank:probe_rank", arguments, processes=processes
            )
        return dict(results[0])

    def _report(self, data: dict[str, Any]) -> None:
        from planner.cluster import Cluster
        from planner.schema.probe import ProbeDocument

        document = ProbeDocument.from_data(data)
        document.save(self.out)
        note(f"wrote {self.out}")
        if self.json:
            emit_json(document.to_data())
            return
        described = Cluster.from_probe(document).describe()
        emit_table(("", ""), list(described.items()))


@dataclass(frozen=True, kw_only=True)
class CalibrateCommand:
    """Fit the constants of GPUs and frameworks to a handful of your own runs."""

    measurements: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CSV")]
    """One row a run; docs/cli.md names the columns."""
    out: Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = (
        "calibration.json"
    )
    """File for the constants; plan takes it as --calibration."""
    start: Annotated[str, tyro.conf.arg(metavar="FILE|shipped|none")] = "shipped"
    """Constants to start from; the fit is pulled towards them."""
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
    doubts = [
        (row.point_id, text) for row in result.rows for text in row.contradictions
    ]
    if doubts:
        emit_text("")
        emit_table(("used", "contradiction"), doubts)
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
