"""Layers that choose a parallelism each, put into the stages of a pipeline."""

from __future__ import annotations

from planner.split.piper.plan import PiperPlan, PiperStage
from planner.split.piper.solve import solve_piper
from planner.split.piper.solver import PIPER_GROUP, piper_solver_names
from planner.split.piper.task import GIB, PiperTask, parse_piper, read_piper

__all__ = [
    "GIB",
    "PIPER_GROUP",
    "PiperPlan",
    "PiperStage",
    "PiperTask",
    "parse_piper",
    "piper_solver_names",
    "read_piper",
    "solve_piper",
]
