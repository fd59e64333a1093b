"""The command ``meshwright probe``."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from planner.cli.options import OptionalInt
from planner.cli.output import emit_json, emit_table, note, working
from planner.errors import ExecutionError
from planner.schema.base import require_writable

__all__ = ["ProbeCommand"]


@dataclass(frozen=True, kw_only=True)
class ProbeCommand:
    """Measure this machine (or, under torchrun, all of them) and save the result."""

    processes: OptionalInt = None
    """Local processes; one a GPU, or one a core, by default."""
    out: Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = "probe.json"
    """Where to write the result; give that file as --cluster."""
    seconds: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 10.0
    """About how long to measure."""
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        tyro.conf.arg(metavar="{cpu,cuda}", help_behavior_hint=""),
    ] = None
    """GPUs where there are any by default."""
    seed: int = 0
    """Of the random matrices."""
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
