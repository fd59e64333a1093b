"""The plan itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["export_json"]


def export_json(plan: Plan) -> dict[str, str]:
    """``plan.json``, as :meth:`planner.schema.Plan.save` writes it."""
    return {"plan.json": plan.to_json()}
