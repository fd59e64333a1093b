"""Limits that several frameworks share."""

from __future__ import annotations

from planner.targets.base import Case, Refusal

__all__ = ["experts_apart_from_tensors", "no_float8", "one_recompute"]


def one_recompute(case: Case) -> Refusal | None:
    """A rule: every stage recomputes the same."""
    kinds = [stage.recompute for stage in case.strategy.stages]
    if len(set(kinds)) <= 1:
        return None
    return Refusal(
        field="stages.recompute",
        value="[" + ", ".join(kinds) + "]",
        why="activation checkpointing is set once for the whole model",
        remedy="recompute the same in all stages (pin recompute)",
    )


def experts_apart_from_tensors(case: Case) -> Refusal | None:
    """A rule: ep and tp do not meet.

    Experts of a plan are whole on every tp rank; frameworks split them along tp or deal
    them out to tp ranks, too.
    """
    mesh = case.strategy.mesh
    if mesh.ep == 1 or mesh.tp == 1:
        return None
    return Refusal(
        field="mesh.ep",
        value=str(mesh.ep),
        why=f"with tp={mesh.tp} it splits the experts over tp ranks or deals them out "
        f"to these, and the plan keeps them whole on each",
        remedy="use ep=1 or tp=1",
    )


def no_float8(case: Case) -> Refusal | None:
    """A rule: products are not in float8."""
    if case.strategy.precision.compute != "float8":
        return None
    return Refusal(
        field="precision.compute",
        value="float8",
        why="it has several float8 recipes, and a plan does not say which",
        remedy="use bfloat16, and switch float8 on in the framework yourself",
    )
