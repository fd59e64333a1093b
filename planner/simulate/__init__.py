"""Pipeline schedules in time: exact orders, their makespans, their memory.

Knows nothing of models or clusters: takes durations and bytes, returns times and bytes.
"""

from planner.simulate.actions import Action, ActionKind, ActionTable
from planner.simulate.closed_form import (
    bubble_coefficients,
    closed_form_makespan,
    closed_form_of_stages,
)
from planner.simulate.engine import Evaluation, evaluate, makespan
from planner.simulate.in_flight import peak_activation_bytes, peak_in_flight
from planner.simulate.schedules import actions, why_not
from planner.simulate.shared import simulate_shared

__all__ = [
    "Action",
    "ActionKind",
    "ActionTable",
    "Evaluation",
    "actions",
    "bubble_coefficients",
    "closed_form_makespan",
    "closed_form_of_stages",
    "evaluate",
    "makespan",
    "peak_activation_bytes",
    "peak_in_flight",
    "simulate_shared",
    "why_not",
]
