"""Graphs that are not chains, split over accelerators and CPUs operator by operator."""

from __future__ import annotations

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
from planner.split.task import SplitTask

__all__ = [
    "Groups",
    "Split",
    "SplitTask",
    "TaskFolder",
    "best_along",
    "best_linear",
    "breaches",
    "group",
    "load_tasks",
    "loads_ms",
    "max_load_ms",
    "one_device",
    "order_by_priority",
    "parse_task",
    "read_task",
    "standard_orders",
]
