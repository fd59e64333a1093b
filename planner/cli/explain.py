"""The command ``meshwright explain``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from planner.cli.options import OptionalFile
from planner.cli.output import emit_json, emit_text

__all__ = ["ExplainCommand"]


@dataclass(frozen=True, kw_only=True)
class ExplainCommand:
    """Say why a plan is what it is, or how two plans differ."""

    plan: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    """A plan file."""
    against: OptionalFile = None
    """A second plan: say only in which fields they differ."""
    json: bool = False
    """Print prediction and provenance (or the differences) as JSON."""

    def run(self) -> None:
        """Load and print."""
        from planner.schema import Plan

        plan = Plan.load(self.plan)
        if self.against is not None:
            differences = plan.diff(Plan.load(self.against))
            if self.json:
                emit_json(list(differences))
            else:
                emit_text("\n".join(differences) or "the plans are equal")
            return
        if self.json:
            data = plan.to_data()
            emit_json({part: data[part] for part in ("prediction", "provenance")})
        else:
            emit_text(plan.explain())
