"""Model and cluster of a plan, read again; no code is imported on a plan's word."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from planner.api import read_model
from planner.cluster import Cluster
from planner.cost import CostModel
from planner.errors import MeshwrightError, PlanFileError
from planner.graph import ModelGraph
from planner.graph.fused_kernels import with_fused_kernels
from planner.measurements.store import CalibrationChoice, has_shipped, shipped
from planner.request import make_context
from planner.schema import Plan
from planner.schema.base import fingerprint_parameters
from planner.space import Regime

__all__ = ["PlanSource", "read_source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSource:
    """Cost model and cluster that a plan was made with, read again.

    Attributes:
        pricing: None if model, cluster or constants cannot be had.
        cluster: None if it cannot be read, or is another one than the plan's.
        problem: Why there is no ``pricing``, a sentence; empty if there is.
    """

    pricing: CostModel | None
    cluster: Cluster | None
    problem: str = ""


def read_source(
    plan: Plan,
    *,
    model: ModelGraph | str | None = None,
    cluster: Cluster | str | None = None,
    calibration: CalibrationChoice = None,
) -> PlanSource:
    """Read what a plan was made from, as far as it can be.

    Args:
        plan: Its references are followed, unless they name code to import.
        model: Instead of the plan's own reference; a user's own word, so that
            ``module:factory`` is followed.
        cluster: The same.
        calibration: Constants it was priced with, where those are not the shipped ones.

    Raises:
        MeshwrightError: If what was passed in, not what the plan names, is wrong.
    """
    machines, why = _cluster(plan, cluster)
    if machines is None:
        return PlanSource(pricing=None, cluster=None, problem=why)
    graph, why = _model(plan, model)
    if graph is None:
        return PlanSource(pricing=None, cluster=machines, problem=why)
    chosen, why = _calibration(plan, calibration)
    if why:
        return PlanSource(pricing=None, cluster=machines, problem=why)
    if plan.provenance.kernels is not None:
        graph = with_fused_kernels(graph)
    strategy = plan.strategy
    context = make_context(
        graph,
        machines,
        precision=strategy.precision,
        optimizer=strategy.optimizer,
        grad_clip_norm=strategy.grad_clip_norm,
        recipe=(chosen and plan.provenance.recipe) or "torch",
        calibration=chosen,
        memory_fraction=plan.provenance.memory_fraction,
        regime=Regime.of(strategy),
    )
    order = np.array(strategy.device_ids(), dtype=np.int64)
    return PlanSource(
        pricing=CostModel(replace(context, order=order)), cluster=machines
    )


def _cluster(plan: Plan, given: Cluster | str | None) -> tuple[Cluster | None, str]:
    """The cluster, or why there is none."""
    reference = plan.cluster
    if given is not None:
        machines = Cluster.parse(given) if isinstance(given, str) else given
        if machines.fingerprint != reference.fingerprint:
            raise PlanFileError(
                f"cluster {machines.name} is not the one the plan was made for "
                f"({reference.name}, fingerprint {reference.fingerprint[:12]}); name "
                f"that one, or leave it out"
            )
        return machines, ""
    if reference.ref is None:
        return None, (
            f"The cluster {reference.name} was built in Python, and the plan does not "
            f"say how; pass it with cluster=, or name it with --cluster."
        )
    # A plan from elsewhere may name a pipe or a device, which has no end.
    path = Path(reference.ref)
    if path.exists() and not path.is_file() and os.sep in reference.ref:
        return (
            None,
            f"{reference.ref}, which the plan names as its cluster, is no file.",
        )
    try:
        machines = Cluster.parse(reference.ref)
    except (MeshwrightError, OSError) as error:
        return None, (
            f"The cluster cannot be read again from {reference.ref} ({error}); name it "
            f"with --cluster."
        )
    if machines.fingerprint != reference.fingerprint:
        return None, (
            f"The cluster that {reference.ref} names here is not the one that the plan "
            f"was made for; name that one with --cluster."
        )
    return machines, ""


def _model(plan: Plan, given: ModelGraph | str | None) -> tuple[ModelGraph | None, str]:
    """The model's graph, or why there is none."""
    reference = plan.model
    dtype = plan.strategy.precision.activation_dtype

    def read(source: ModelGraph | str) -> ModelGraph:
        return read_model(
            source,
            None,
            seq_len=plan.workload.seq_len,
            dtype=dtype,
            images_per_sample=plan.workload.images_per_sample,
        )

    if given is not None:
        graph = read(given)
        if _fingerprint(graph) != reference.fingerprint:
            raise PlanFileError(
                f"model {graph.name} is not the one the plan was made for "
                f"({reference.name}); name that one, or leave it out"
            )
        return graph, ""
    ref = reference.ref
    if ref is None:
        return None, (
            f"The model {reference.name} was passed to Meshwright as an object, and "
            f"the plan does not say how to build it; pass it with model=, or name it "
            f"with --model."
        )
    if ":" in ref and not ref.startswith("hf:"):
        return None, (
            f"The model comes from code ({ref}), which is imported only if you name it "
            f"yourself: --model {ref}"
        )
    try:
        graph = read(ref)
    except (MeshwrightError, OSError) as error:
        return None, (
            f"The model cannot be read again from {ref} ({error}); name it with "
            f"--model."
        )
    if _fingerprint(graph) != reference.fingerprint:
        return None, (
            f"The model that {ref} names here is not the one that the plan was made "
            f"for; name that one with --model."
        )
    return graph, ""


def _fingerprint(graph: ModelGraph) -> str:
    return fingerprint_parameters((p.name, p.shape) for p in graph.parameters)


def _calibration(plan: Plan, given: CalibrationChoice) -> tuple[CalibrationChoice, str]:
    """Constants to price with, and why that cannot be."""
    if given is not None:
        return given, ""
    name = plan.provenance.calibration
    if name is None or (has_shipped() and shipped().name == name):
        return (None if name is None else "shipped"), ""
    return None, (
        f"The plan was priced with the constants {name!r}, which are not the ones that "
        f"came with this Meshwright; name their file with --calibration."
    )
