"""Graphs that are not chains, split over accelerators and CPUs operator by operator."""

from __future__ import annotations

from planner.split.loads import breaches, loads_ms, max_load_ms, one_device
from planner.split.read import TaskFolder, load_tasks, parse_task, read_task
from planner.split.task import SplitTask

__all__ = [
    "SplitTask",
    "TaskFolder",
    "breaches",
    "load_tasks",
    "loads_ms",
    "max_load_ms",
    "one_device",
    "parse_task",
    "read_task",
]
