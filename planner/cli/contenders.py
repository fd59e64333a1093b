"""Every partitioner's plan of the same request, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from planner.cli.output import emit_table
from planner.errors import MeshwrightError, NoFeasiblePlanError
from planner.schema import Plan

if TYPE_CHECKING:
    from planner.graph import ModelGraph
    from planner.request import PlanOptions

__all__ = ["Contender", "as_data", "compare", "emit_contenders"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """What one partitioner came to.

    Attributes:
        partitioner: Its registered name.
        step_time_s: Predicted; None if it has no plan.
        over_best: By how much its plan is worse than the best one by the objective, as
            a share.
        devices: That the plan uses.
        strategy: In short.
        evaluations: Strategies priced, by fidelity.
        seconds: Wall time of the search.
        why_none: Why there is no plan.
    """

    partitioner: str
    step_time_s: float | None = None
    over_best: float | None = None
    devices: int | None = None
    strategy: str | None = None
    evaluations: Mapping[str, int] | None = None
    seconds: float | None = None
    why_none: str | None = None


def compare(
    model: str | ModelGraph,
    cluster: str,
    partitioner: str | Sequence[str],
    options: PlanOptions,
    *,
    seq_len: int | None,
) -> tuple[Plan, tuple[Contender, ...]]:
    """Plan with each of several partitioners, each with the whole budget.

    Args:
        model: Read once.
        cluster: A name, as for :func:`planner.api.plan`.
        partitioner: Names; ``auto`` stands for all that are installed.
        options: Further arguments of ``plan``.
        seq_len: Tokens a sample.
    Returns:
        The best plan, which names all contenders, and one entry each, best first.
    Raises:
        MeshwrightError: If none of them has a plan.
    """
    from planner.api import plan_graph, read_model
    from planner.cluster import Cluster
    from planner.portfolio import names_of
    from planner.search import partitioner_names

    names = partitioner_names() if partitioner == "auto" else names_of(partitioner)
    machines = Cluster.parse(cluster)
    graph = read_model(
        model, None, seq_len=seq_len, dtype=options.precision.activation_dtype
    )
    plans: dict[str, Plan] = {}
    refused: dict[str, MeshwrightError] = {}
    for name in names:
        try:
            plans[name] = plan_graph(graph, machines, options, partitioner=name)
        except MeshwrightError as error:
            refused[name] = error
    if not plans:
        raise _reason(list(refused.values()))
    # Sums of equal parts in another order differ in their last bits.
    ranked = sorted(plans, key=lambda name: float(f"{_score(plans[name]):.10g}"))
    best = plans[ranked[0]]
    found = [_contender(name, plans[name], _score(best)) for name in ranked]
    found += [Contender(partitioner=n, why_none=str(e)) for n, e in refused.items()]
    asked = tuple(c for name in ranked for c in plans[name].provenance.contenders)
    provenance = best.provenance.model_copy(update={"contenders": asked})
    return best.model_copy(update={"provenance": provenance}), tuple(found)


def _reason(errors: Sequence[MeshwrightError]) -> MeshwrightError:
    """Why there is no plan at all: that nothing fits, if anyone found that out."""
    lacking = (error for error in errors if isinstance(error, NoFeasiblePlanError))
    return next(lacking, errors[0])


def _score(plan: Plan) -> float:
    """What the plan's objective makes small."""
    objective, prediction = plan.provenance.objective, plan.prediction
    if objective == "memory":
        return max(entry.total_bytes for entry in prediction.memory)
    if objective == "throughput_per_device":
        return prediction.step_time_s * plan.strategy.mesh.num_devices
    return prediction.step_time_s


def _contender(name: str, plan: Plan, best: float) -> Contender:
    return Contender(
        partitioner=name,
        step_time_s=plan.prediction.step_time_s,
        over_best=_score(plan) / best - 1,
        devices=plan.strategy.mesh.num_devices,
        strategy=plan.strategy.label(),
        evaluations=plan.provenance.evaluations,
        seconds=plan.timing_s["search"],
    )


def as_data(contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    """As JSON values."""
    return [asdict(one) for one in contenders]


def emit_contenders(contenders: Sequence[Contender]) -> None:
    """Print a table, one line each."""
    emit_table(
        (
            "partitioner",
            "step time",
            "over the best",
            "devices",
            "simulated",
            "closed form",
            "seconds",
            "strategy",
        ),
        [_cells(one) for one in contenders],
    )


def _cells(one: Contender) -> tuple[str, ...]:
    if one.step_time_s is None or one.over_best is None or one.evaluations is None:
        return (one.partitioner, "none", *[""] * 5, one.why_none or "")
    return (
        one.partitioner,
        f"{one.step_time_s:.4g} s",
        f"{one.over_best:.2%}",
        str(one.devices),
        f"{one.evaluations['simulated']:,}",
        f"{one.evaluations['analytic']:,}",
        f"{one.seconds:.2f}",
        str(one.strategy),
    )
