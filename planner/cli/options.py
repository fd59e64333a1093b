"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from planner.errors import StrategyError
from planner.schema import Optimizer, Precision

__all__ = ["TrainingOptions", "parse_pins"]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How the model is trained: what decides memory beside the strategy."""

    dtype: Literal["bfloat16", "float32", "float8"] = "bfloat16"
    """What matrix products compute in."""
    parameter_dtype: Literal["float32", "bfloat16"] = "float32"
    """What weights are kept in."""
    optimizer: Literal["AdamW", "Adam", "SGD"] = "AdamW"
    """Decides how many states each parameter has."""
    learning_rate: float = 3e-4
    """Of the optimizer."""
    grad_clip_norm: float | None = None
    """Largest norm of the gradients; none for no clipping."""

    def precision(self) -> Precision:
        """As the planner takes it."""
        return Precision(
            parameter=self.parameter_dtype, compute=self.dtype, reduce="float32"
        )

    def build_optimizer(self) -> Optimizer:
        """As the planner takes it; states have the dtype of the weights."""
        return Optimizer(
            name=self.optimizer,
            learning_rate=self.learning_rate,
            state_dtype=self.parameter_dtype,
        )


def parse_pins(texts: Sequence[str]) -> dict[str, Any]:
    """``tp=8`` and ``schedule=1F1B`` as a mapping.

    Raises:
        StrategyError: If a text has no ``=``.
    """
    pins: dict[str, Any] = {}
    for text in texts:
        knob, sign, value = text.partition("=")
        if not sign or not knob or not value:
            raise StrategyError(f"--pin {text!r} is not KNOB=VALUE, for example tp=8")
        pins[knob.strip().replace("-", "_")] = value.strip()
    return pins
