"""The command ``meshwright predict``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from planner.cli.options import (
    CalibrationName,
    ClusterName,
    ModelName,
    OptionalInt,
    OutFile,
    SeqLen,
    name_model,
)
from planner.cli.output import emit_json, emit_text, note, working
from planner.schema.base import require_writable

__all__ = ["PredictCommand"]


@dataclass(frozen=True, kw_only=True)
class PredictCommand:
    """Price a strategy chosen by hand: time and memory; exit 2 if it does not fit."""

    strategy: Annotated[str, tyro.conf.arg(metavar="FILE")]
    """JSON or YAML file with a strategy's fields, or a plan."""
    model: ModelName
    cluster: ClusterName
    global_batch: OptionalInt = None
    """Checked against the strategy; taken from it by default."""
    seq_len: SeqLen = None
    memory_fraction: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.9
    """Share of each device's memory that may be filled."""
    calibration: CalibrationName = "shipped"
    fidelity: Literal["analytic", "simulated"] = "simulated"
    """Closed forms, or the schedule's exact order."""
    out: OutFile = None
    """Where to write the strategy as a plan, if it fits."""
    allow_remote_code: bool = False
    """Run Python code that came with a hf:PATH model; read it first."""
    json: bool = False
    """Print the priced plan as JSON."""

    def run(self) -> None:
        """Price and print; exit 2 if memory does not suffice."""
        if self.out is not None:
            require_writable(self.out)
        with working(f"pricing {self.strategy}"):
            from planner.api import predict, require_fit
            from planner.strategy_input import read_strategy

            strategy = read_strategy(self.strategy)
            made = predict(
                name_model(
                    self.model,
                    seq_len=self.seq_len,
                    dtype=strategy.precision.compute,
                    allow_remote_code=self.allow_remote_code,
                ),
                self.cluster,
                strategy,
                global_batch=self.global_batch,
                seq_len=self.seq_len,
                memory_fraction=self.memory_fraction,
                calibration=self.calibration,
                fidelity=self.fidelity,
            )
        if self.json:
            emit_json(made.to_data())
        else:
            emit_text(made.explain())
        require_fit(made)
        if self.out is not None:
            made.save(self.out)
            note(f"wrote {self.out}")
