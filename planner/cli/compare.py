"""The command ``meshwright compare``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from planner.cli.import_config import WantedOptions, read_config, tell_ignored
from planner.cli.options import (
    CalibrationName,
    ClusterName,
    ModelName,
    OptionalFloat,
    OptionalInt,
    OutFile,
    SeqLen,
)
from planner.cli.output import emit_json, emit_table, emit_text, note, working
from planner.errors import StrategyError
from planner.schema.base import require_writable

if TYPE_CHECKING:
    from planner.imports import Imported
    from planner.schema import Strategy

__all__ = ["CompareCommand"]


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Price the config of today beside what would be planned, and explain."""

    current: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """accelerate's YAML, DeepSpeed's JSON, Megatron's arguments, a strategy, a plan."""
    model: ModelName
    cluster: ClusterName
    global_batch: OptionalInt = None
    """Samples per step, where the config does not say."""
    format: Literal["auto", "megatron", "accelerate", "deepspeed", "strategy"] = "auto"
    """What the file is; told by its content by default."""
    seq_len: SeqLen = None
    target: Annotated[str, tyro.conf.arg(metavar="TARGET")] = "meshwright"
    """Whose limits the plan keeps to; see plan."""
    calibration: CalibrationName = "shipped"
    memory_fraction: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.9
    """Share of each device's memory that may be filled."""
    time_budget_s: OptionalFloat = None
    """Seconds until the best plan so far is taken."""
    options: Annotated[WantedOptions, tyro.conf.arg(name="")] = field(
        default_factory=WantedOptions
    )
    out: OutFile = None
    """Where to write our plan."""
    json: bool = False
    """Print both plans and the verdict as JSON."""

    def run(self) -> None:
        """Price, plan, lay side by side."""
        if self.out is not None:
            require_writable(self.out)
        current = self._read()
        with working(f"planning {self.model} on {self.cluster}"):
            from planner.compare import compare_with_plan

            found = compare_with_plan(
                current,
                self.model,
                self.cluster,
                seq_len=self.seq_len,
                target=self.target,
                calibration=self.calibration,
                memory_fraction=self.memory_fraction,
                time_budget_s=self.time_budget_s,
            )
        if self.out is not None:
            found.ours.save(self.out)
            note(f"wrote {self.out}")
        if self.json:
            emit_json(found.data())
            return
        emit_table(["", "current", "ours"], found.rows())
        emit_text(f"\n{found.verdict()}")

    def _read(self) -> Imported | Strategy:
        """What is run today.

        Raises:
            StrategyError: If it is for another batch than asked for.
        """
        from planner.imports import detect_source, import_text
        from planner.strategy_input import read_strategy

        text, source = read_config(self.current), self.format
        kind = detect_source(text, self.current) if source == "auto" else source
        if kind not in ("plan", "strategy"):
            found = import_text(
                kind,
                text,
                self.options.wanted(self.global_batch),
                self.current,
                recompute=self.options.recompute,
            )
            tell_ignored(found)
            return found
        strategy = read_strategy(self.current)
        if self.global_batch not in (None, strategy.global_batch):
            raise StrategyError(
                f"{self.current} trains {strategy.global_batch} samples a step, not "
                f"global_batch={self.global_batch}; leave it out, or change the file"
            )
        return strategy
