"""Graphs that are not chains, split over accelerators and CPUs operator by operator."""

from __future__ import annotations

from planner.split.exact import Outcome, best_exact
from planner.split.groups import Groups, group
from planner.split.linear import (
    Split,
    best_along,
    best_linear,
    order_by_priority,
    standard_orders,
)
from planner.split.loads import breaches, loads_ms, max_load_ms, one_device
from planner.split.read import TaskFolder, load_tasks, parse_task, read_task
from planner.split.refine import refine
from planner.split.solve import solve
from planner.split.solver import GROUP, Solution, get_solver, solver_names
from planner.split.task import SplitTask

__all__ = [
    "GROUP",
    "Groups",
    "Outcome",
    "Solution",
    "Split",
    "SplitTask",
    "TaskFolder",
    "best_along",
    "best_exact",
    "best_linear",
    "breaches",
    "get_solver",
    "group",
    "load_tasks",
    "loads_ms",
    "max_load_ms",
    "one_device",
    "order_by_priority",
    "parse_task",
    "read_task",
    "refine",
    "solve",
    "solver_names",
    "standard_orders",
]
