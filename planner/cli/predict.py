"""``meshwright predict``"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from planner.cli.output import emit_json, emit_text, working

__all__ = ["PredictCommand"]


@dataclass(frozen=True, kw_only=True)
class PredictCommand:
    """Price a strategy chosen by hand: time and memory by category, nothing launched."""

    strategy: str
    """JSON or YAML file with a strategy's fields, or a plan."""
    model: str
    """As for `meshwright plan`."""
    cluster: str
    """As for `meshwright plan`."""
    global_batch: int | None = None
    """Checked against the strategy; taken from it by default."""
    seq_len: int | None = None
    """Tokens per sample; the model's own by default."""
    memory_fraction: float = 0.9
    """Share of each device's memory that may be filled."""
    fidelity: Literal["analytic", "simulated"] = "simulated"
    """Closed forms, or the schedule's exact order."""
    json: bool = False
    """Print the prediction as JSON."""

    def run(self) -> None:
        """Price and print; exit 2 if memory does not suffice."""
        from planner.api import predict, require_fit

        with working(f"pricing {self.strategy}"):
            made = predict(
                self.model,
                self.cluster,
                self.strategy,
                global_batch=self.global_batch,
                seq_len=self.seq_len,
                memory_fraction=self.memory_fraction,
                fidelity=self.fidelity,
            )
        if self.json:
            emit_json(json.loads(made.to_json()))
        else:
            emit_text(made.explain())
        require_fit(made)
