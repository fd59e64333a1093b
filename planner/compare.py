"""The plan that runs today beside the planner's, with the difference explained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from planner.api import plan_graph, predict, read_model
from planner.cluster import Cluster
from planner.graph import ModelGraph
from planner.imports import Imported, name_stages
from planner.measurements.store import CalibrationChoice
from planner.request import PlanOptions
from planner.schema import Plan, Strategy
from planner.schema.describe import PART_NAMES, facts
from planner.schema.fused_kernels import KernelChoice
from planner.units import format_bytes, format_seconds

__all__ = ["Comparison", "compare_with_plan"]

#: Steps that differ by less are called as fast.
_EQUAL = 5e-4
#: A part of the step is worth a word if it changed by this much of the step.
_WORTH_A_WORD = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two priced plans for the same work.

    Attributes:
        current: What is run today, priced; it may not fit.
        ours: What was planned.
    """

    current: Plan
    ours: Plan

    @property
    def lack_bytes(self) -> float:
        """Bytes that the current plan lacks on its fullest device; 0 if it fits."""
        return max(
            0.0,
            *(m.total_bytes - m.limit_bytes for m in self.current.prediction.memory),
        )

    @property
    def speedup(self) -> float:
        """Today's step time by ours, predicted."""
        before, after = self.current.prediction, self.ours.prediction
        return before.step_time_s / after.step_time_s

    def rows(self) -> list[tuple[str, str, str]]:
        """Rows of the comparison: name, current value, planned value."""
        pair = (self.current, self.ours)
        found = [
            ("strategy", *(one.strategy.label() for one in pair)),
            ("step", *(format_seconds(p.prediction.step_time_s) for p in pair)),
            ("samples/s", *(f"{p.prediction.samples_per_s:,.2f}" for p in pair)),
        ]
        kernels = [facts(one).get("kernels", "") for one in pair]
        if any(kernels):
            found.insert(1, ("kernels", *kernels))
        spent = [one.prediction.breakdown_s for one in pair]
        parts = sorted(
            {part for one in spent for part, s in one.items() if s > 0},
            key=lambda part: -max(one.get(part, 0.0) for one in spent),
        )
        found += [
            (
                f"  {PART_NAMES.get(part, part)}",
                *(format_seconds(one.get(part, 0.0)) for one in spent),
            )
            for part in parts
        ]
        found.append(("fullest device", *(_fullest(one) for one in pair)))
        return [(name, *cells) for name, *cells in found]  # type: ignore[misc]

    def verdict(self) -> str:
        """Explain in a few sentences where the planned strategy gains, if it does."""
        return " ".join(self._sentences())

    def _sentences(self) -> Iterator[str]:
        if self.lack_bytes:
            yield (
                f"The current config does not fit: the fullest device lacks "
                f"{format_bytes(self.lack_bytes)}."
            )
        ratio = self.speedup
        if abs(ratio - 1) < _EQUAL:
            yield "Ours is predicted to be as fast: nothing is won in time."
        elif ratio < 1:
            yield (
                f"Ours is not faster: its step is predicted to take "
                f"{1 / ratio - 1:.1%} longer."
            )
        else:
            times = f"{ratio:.1f} times as fast" if ratio >= 2 else ""
            yield f"Ours is predicted to be {times or f'{ratio - 1:.1%} faster'}."
        won, lost = self._causes()
        if won:
            yield f"It wins {won}{f' and loses {lost}' if lost else ''}."
        elif lost:
            yield f"It loses {lost}."
        changes = self._changes()
        if changes:
            yield f"What differs: {changes}."

    def _causes(self) -> tuple[str, str]:
        """Parts of the step that shrank, and that grew."""
        before, after = (
            one.prediction.breakdown_s for one in (self.current, self.ours)
        )
        floor = _WORTH_A_WORD * self.current.prediction.step_time_s
        change = {
            part: after.get(part, 0.0) - before.get(part, 0.0)
            for part in dict.fromkeys([*before, *after])
        }

        def told(sign: int) -> str:
            worth = [(p, s) for p, s in change.items() if sign * s > floor]
            return ", ".join(
                f"{format_seconds(abs(s))} of {PART_NAMES.get(p, p)}"
                for p, s in sorted(worth, key=lambda item: -abs(item[1]))
            )

        return told(-1), told(1)

    def _changes(self) -> str:
        lines = (
            line.removeprefix("strategy.")
            for line in self.current.diff(self.ours)
            if line.startswith("strategy.")
        )
        shown = [
            line
            for line in lines
            if not line.startswith(("stages", "sharding.patterns", "optimizer"))
        ]
        kinds = [_kinds(one) for one in (self.current, self.ours)]
        if kinds[0] != kinds[1]:
            shown.append(f"recompute: {kinds[0]} -> {kinds[1]}")
        return ", ".join(shown)

    def data(self) -> dict[str, Any]:
        """For programs."""
        return {
            "current": self.current.to_data(),
            "ours": self.ours.to_data(),
            "speedup": self.speedup,
            "lack_bytes": self.lack_bytes,
            "verdict": self.verdict(),
        }


def _kinds(plan: Plan) -> str:
    return "+".join(sorted({s.recompute for s in plan.strategy.stages})) or "none"


def _fullest(plan: Plan) -> str:
    fullest = max(plan.prediction.memory, key=lambda m: m.total_bytes / m.limit_bytes)
    text = f"{format_bytes(fullest.total_bytes)} of {format_bytes(fullest.limit_bytes)}"
    over = fullest.total_bytes - fullest.limit_bytes
    return f"{text}, {format_bytes(over)} too much" if over > 0 else text


def compare_with_plan(
    current: Imported | Strategy,
    model: ModelGraph | str,
    cluster: Cluster | str,
    *,
    seq_len: int | None = None,
    target: str = "meshwright",
    calibration: CalibrationChoice = "shipped",
    memory_fraction: float = 0.9,
    time_budget_s: float | None = None,
    seed: int = 0,
    kernels: KernelChoice = "as-is",
) -> Comparison:
    """Price a strategy, and plan the same batch with the same precision and optimizer.

    Args:
        current: What is run today.
        model: As for :func:`planner.plan`.
        cluster: The same.
        seq_len: The same.
        target: The same; a launcher's name plans within its limits.
        calibration: The same.
        memory_fraction: The same.
        time_budget_s: The same.
        seed: The same.
        kernels: The same; both plans are priced with them.
    Raises:
        NoFeasiblePlanError: If nothing that could be planned fits.
        StrategyError: If the current strategy breaks a rule.
    """
    strategy = current.strategy if isinstance(current, Imported) else current
    options = PlanOptions(
        global_batch=strategy.global_batch,
        target=target,
        precision=strategy.precision,
        optimizer=strategy.optimizer,
        grad_clip_norm=strategy.grad_clip_norm,
        calibration=calibration,
        memory_fraction=memory_fraction,
        time_budget_s=time_budget_s,
        seed=seed,
        kernels=kernels,
    )
    machines = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    graph = read_model(
        model, None, seq_len=seq_len, dtype=strategy.precision.activation_dtype
    )
    if isinstance(current, Imported):
        strategy = name_stages(current, graph.unit_names)
    priced = predict(
        graph,
        machines,
        strategy,
        recipe=options.recipe,
        target=options.target,
        calibration=calibration,
        memory_fraction=memory_fraction,
        kernels=kernels,
    )
    return Comparison(current=priced, ours=plan_graph(graph, machines, options))
