"""The command ``meshwright plan``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from planner.cli.options import (
    CalibrationName,
    ClusterName,
    ModelName,
    OptionalInt,
    OutFile,
    SeqLen,
    TrainingOptions,
    name_model,
    parse_pins,
)
from planner.cli.output import emit_json, emit_text, note, working
from planner.schema.base import require_writable

__all__ = ["PlanCommand"]

Pins = Annotated[
    tuple[str, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(
        metavar="KNOB=VALUE",
        help="Fix a knob and plan the rest: pp, dp_replicate, dp_shard, cp, tp, ep, "
        "zero_stage, schedule, virtual_stages, microbatch_size, num_microbatches, "
        "recompute, sequence_parallel or compile. May be given several times.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Plan a model on a cluster and write the plan."""

    model: ModelName
    cluster: ClusterName
    global_batch: int
    """Samples per optimizer step, over all devices."""
    seq_len: SeqLen = None
    out: OutFile = None
    """Where to write the plan."""
    pin: Pins = ()
    partitioner: Annotated[str, tyro.conf.arg(metavar="NAME")] = "auto"
    """Who plans: auto, or one of the installed partitioners."""
    # planner.search has the same names; importing it here would slow every command.
    objective: Literal["throughput", "throughput_per_device", "memory"] = "throughput"
    """What to optimise."""
    target: Literal["meshwright", "any"] = "meshwright"
    """Keep to what Meshwright's executors can run, or allow all that is legal."""
    devices: Literal["all", "any"] = "all"
    """Use every free device, or as many as it takes to be fastest."""
    memory_fraction: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.9
    """Share of each device's memory that may be filled."""
    calibration: CalibrationName = "shipped"
    evaluation_budget: OptionalInt = None
    """Most strategies that each partitioner may simulate."""
    seed: int = 0
    """Of everything random."""
    allow_remote_code: bool = False
    """Run Python code that came with a hf:PATH model; read it first."""
    json: bool = False
    """Print the plan as JSON instead of a summary."""
    explain: bool = False
    """Also print what bounds it and what the runners-up cost."""
    training: Annotated[TrainingOptions, tyro.conf.arg(name="")] = field(
        default_factory=TrainingOptions
    )

    def run(self) -> None:
        """Plan, print, write."""
        pins = parse_pins(self.pin)
        optimizer = self.training.build_optimizer()
        if self.out is not None:
            require_writable(self.out)
        with working(f"planning {self.model} on {self.cluster}"):
            from planner.api import plan

            made = plan(
                name_model(
                    self.model,
                    seq_len=self.seq_len,
                    dtype=self.training.dtype,
                    allow_remote_code=self.allow_remote_code,
                ),
                self.cluster,
                global_batch=self.global_batch,
                seq_len=self.seq_len,
                partitioner=self.partitioner,
                objective=self.objective,
                pin=pins,
                target=self.target,
                devices=self.devices,
                precision=self.training.precision(),
                optimizer=optimizer,
                grad_clip_norm=self.training.grad_clip_norm,
                memory_fraction=self.memory_fraction,
                calibration=self.calibration,
                evaluation_budget=self.evaluation_budget,
                seed=self.seed,
            )
        if self.out is not None:
            made.save(self.out)
            note(f"wrote {self.out}")
        if self.json:
            emit_json(made.to_data())
        else:
            emit_text(made.explain() if self.explain else made.summary())
