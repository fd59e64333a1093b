"""``meshwright plan``"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from planner.cli.options import TrainingOptions, parse_pins
from planner.cli.output import emit_json, emit_text, note, working
from planner.search import Objective

__all__ = ["PlanCommand"]


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Plan a model on a cluster and write the plan."""

    model: str
    """Built-in name (see `meshwright models`), hf:PATH of a transformers config or
    folder, a PipeDream graph.txt, or module:factory of your own."""
    cluster: str
    """Preset with a node count (dgx-h100:4, see `meshwright clusters`), local:4, or a
    cluster or probe file."""
    global_batch: int
    """Samples per optimizer step, over all devices."""
    seq_len: int | None = None
    """Tokens per sample; the model's own by default."""
    out: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """Where to write the plan."""
    pin: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Fix a knob, KNOB=VALUE: pp, dp_replicate, dp_shard, cp, tp, ep, zero_stage,
    schedule, virtual_stages, microbatch_size, num_microbatches, recompute or
    sequence_parallel. May be given several times."""
    partitioner: str = "auto"
    """Who plans: auto, or one of the installed partitioners."""
    objective: Objective = "throughput"
    """What to optimise."""
    target: Literal["meshwright", "any"] = "meshwright"
    """Keep to what Meshwright's executors can run, or allow all that is legal."""
    devices: Literal["all", "any"] = "all"
    """Use every free device, or as many as it takes to be fastest."""
    memory_fraction: float = 0.9
    """Share of each device's memory that may be filled."""
    evaluation_budget: int | None = None
    """Most strategies that each partitioner may simulate."""
    seed: int = 0
    """Of everything random."""
    json: bool = False
    """Print the plan as JSON instead of a summary."""
    explain: bool = False
    """Also print what bounds it and what the runners-up cost."""
    training: Annotated[TrainingOptions, tyro.conf.arg(name="")] = field(
        default_factory=TrainingOptions
    )

    def run(self) -> None:
        """Plan, print, write."""
        from planner.api import plan

        with working(f"planning {self.model} on {self.cluster}"):
            made = plan(
                self.model,
                self.cluster,
                global_batch=self.global_batch,
                seq_len=self.seq_len,
                partitioner=self.partitioner,
                objective=self.objective,
                pin=parse_pins(self.pin),
                target=self.target,
                devices=self.devices,
                precision=self.training.precision(),
                optimizer=self.training.build_optimizer(),
                grad_clip_norm=self.training.grad_clip_norm,
                memory_fraction=self.memory_fraction,
                evaluation_budget=self.evaluation_budget,
                seed=self.seed,
            )
        if self.out is not None:
            made.save(self.out)
            note(f"wrote {self.out}")
        if self.json:
            emit_json(json.loads(made.to_json()))
        else:
            emit_text(made.explain() if self.explain else made.summary())
