"""The command ``meshwright plan``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from planner.cli.contenders import Contender, as_data, compare, emit_contenders
from planner.cli.options import (
    CalibrationName,
    ClusterName,
    ModelName,
    OptionalFloat,
    OptionalInt,
    OutFile,
    SeqLen,
    TrainingOptions,
    name_model,
    parse_pins,
)
from planner.cli.output import emit_json, emit_text, note, working
from planner.errors import StrategyError
from planner.schema import Plan
from planner.schema.base import require_writable

if TYPE_CHECKING:
    from planner.graph import ModelGraph

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
    partitioner: Annotated[str, tyro.conf.arg(metavar="NAME[,NAME...]")] = "auto"
    """Who plans: auto, or some of the installed partitioners."""
    compare: bool = False
    """Plan with each partitioner that is installed, or those that are named, lay them
    side by side, and keep the best plan."""
    # planner.search has the same names; importing it here would slow every command.
    objective: Literal["throughput", "throughput_per_device", "memory"] = "throughput"
    """What to optimise."""
    target: Annotated[str, tyro.conf.arg(metavar="TARGET")] = "meshwright"
    """Keep to what Meshwright's executors can run (meshwright), to what a launcher can
    say (meshwright export --list names them), or allow all that is legal (any)."""
    devices: Literal["all", "any"] = "all"
    """Use every free device, or as many as it takes to be fastest."""
    memory_fraction: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.9
    """Share of each device's memory that may be filled."""
    calibration: CalibrationName = "shipped"
    evaluation_budget: OptionalInt = None
    """Most strategies that each partitioner may simulate."""
    time_budget_s: OptionalFloat = None
    """Seconds until the best plan so far is taken, shared by the partitioners; with
    --compare each has as many."""
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
        arguments = self._arguments()
        if self.out is not None:
            require_writable(self.out)
        contenders: tuple[Contender, ...] = ()
        with working(f"planning {self.model} on {self.cluster}"):
            model = name_model(
                self.model,
                seq_len=self.seq_len,
                dtype=self.training.dtype,
                allow_remote_code=self.allow_remote_code,
            )
            if self.compare:
                made, contenders = self._compare(model, arguments)
            else:
                made = self._plan(model, arguments)
        if self.out is not None:
            made.save(self.out)
            note(f"wrote {self.out}")
        if self.json:
            more = {"contenders": as_data(contenders)} if self.compare else {}
            emit_json({**made.to_data(), **more})
            return
        if contenders:
            emit_contenders(contenders)
            emit_text("")
        emit_text(made.explain() if self.explain else made.summary())

    def _plan(self, model: str | ModelGraph, arguments: Mapping[str, Any]) -> Plan:
        from planner.api import plan

        return plan(
            model,
            self.cluster,
            seq_len=self.seq_len,
            partitioner=self._asked(),
            **arguments,
        )

    def _compare(
        self, model: str | ModelGraph, arguments: Mapping[str, Any]
    ) -> tuple[Plan, tuple[Contender, ...]]:
        from planner.request import PlanOptions

        options = PlanOptions(**arguments)
        return compare(
            model, self.cluster, self._asked(), options, seq_len=self.seq_len
        )

    def _asked(self) -> str | tuple[str, ...]:
        """A name, or several.

        Raises:
            StrategyError: If one is empty.
        """
        names = tuple(name.strip() for name in self.partitioner.split(","))
        if not all(names):
            raise StrategyError(
                f"--partitioner {self.partitioner!r} has an empty name; write NAME,NAME"
            )
        return names[0] if len(names) == 1 else names

    def _arguments(self) -> dict[str, Any]:
        """Arguments of :func:`planner.api.plan` that a request shares with others.

        Raises:
            StrategyError: If a pin or a number is wrong.
        """
        return {
            "global_batch": self.global_batch,
            "objective": self.objective,
            "pin": parse_pins(self.pin),
            "target": self.target,
            "devices": self.devices,
            "precision": self.training.precision(),
            "optimizer": self.training.build_optimizer(),
            "grad_clip_norm": self.training.grad_clip_norm,
            "memory_fraction": self.memory_fraction,
            "calibration": self.calibration,
            "evaluation_budget": self.evaluation_budget,
            "time_budget_s": self.time_budget_s,
            "seed": self.seed,
        }
