"""The command ``meshwright models``."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cli.output import emit_json, emit_table

__all__ = ["ModelsCommand"]


@dataclass(frozen=True, kw_only=True)
class ModelsCommand:
    """List the built-in model names."""

    json: bool = False
    """Print the list as JSON."""

    def run(self) -> None:
        """Print names and what they stand for."""
        from planner.capture import architectures

        known = sorted(architectures().items())
        if self.json:
            emit_json(
                {
                    name: {"class": made.model, "source": made.source}
                    for name, made in known
                }
            )
            return
        rows = [(name, made.model, made.source) for name, made in known]
        emit_table(("model", "class", "figures from"), rows)
