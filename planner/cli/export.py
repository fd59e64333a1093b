"""The command ``meshwright export``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from planner.cli.output import emit_json, emit_text

__all__ = ["ExportCommand"]


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Write a plan as another launcher takes it."""

    plan: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    """A plan file."""
    to: Annotated[str, tyro.conf.arg(metavar="TARGET")]
    """json (the plan alone) or torchrun (the plan and a script that starts it)."""
    out: Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")] = "."
    """Folder to write into; it is made if missing."""
    force: bool = False
    """Write over files of the same names with other contents."""
    json: bool = False
    """Print the written paths as JSON."""

    def run(self) -> None:
        """Export and print the paths."""
        from planner.schema import Plan

        paths = Plan.load(self.plan).export(self.to, self.out, force=self.force)
        if self.json:
            emit_json(list(paths))
        else:
            emit_text("\n".join(paths))
