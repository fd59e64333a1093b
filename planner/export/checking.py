"""Whether a target can say a plan; the error that says what it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.errors import ExportError
from planner.targets import Case, Target, nearest_expressible
from planner.targets.rules import is_cpu

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["case_of", "require_expressible"]


def case_of(plan: Plan) -> Case:
    """A plan as the rules of targets see it."""
    return Case(
        strategy=plan.strategy,
        hosts=plan.cluster.hosts,
        tied=plan.model.tied,
        attention=plan.model.attention,
        backend="gloo" if any(map(is_cpu, plan.cluster.device_types)) else "nccl",
        device_types=tuple(plan.cluster.device_types),
    )


def require_expressible(target: Target, plan: Plan) -> None:
    """Refuse a plan that a target cannot say.

    Raises:
        ExportError: Naming every field, why, and the nearest strategy that could be
            said.
    """
    case = case_of(plan)
    found = [str(violation) for violation in target.violations(case)]
    if target.runs == "meshwright" and plan.not_runnable:
        # What the plan itself says of its model counts, and is not told twice.
        found = [f for f in found if not f.startswith("strategy=")]
        found += [
            f"strategy={plan.strategy.label()}: Meshwright's executors do not run it: "
            f"{reason}"
            for reason in plan.not_runnable
        ]
    if not found:
        return
    near = nearest_expressible(target, case)
    hint = "--nearest plans again within its limits"
    if near is not None:
        hint = f"nearest that it can: {near.label()} (not priced); {hint}"
    raise ExportError(
        f"{target.title} {target.version} cannot say this plan: "
        f"{' | '.join(found)}. {hint}"
    )
