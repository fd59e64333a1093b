"""What each framework does that measurements were taken with, by name."""

from __future__ import annotations

from planner.calibration.frameworks.framework import Framework
from planner.calibration.frameworks.megatron import MEGATRON
from planner.calibration.frameworks.others import OTHERS

__all__ = ["FRAMEWORKS", "Framework"]

FRAMEWORKS: dict[str, Framework] = {**OTHERS, **MEGATRON}
