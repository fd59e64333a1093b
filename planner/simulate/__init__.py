"""Pipeline schedules in time: exact orders, their makespans, their memory.

Knows nothing of models or clusters: takes durations and bytes, returns times and bytes.
"""

from planner.simulate.actions import (
    Action,
    ActionKind,
    ActionTable,
    actions,
    rank_of_stages,
    schedule_columns,
)
from planner.simulate.chains import bubble_coefficients
from planner.simulate.closed_form import closed_form_makespan, closed_form_of_stages
from planner.simulate.engine import Evaluation, evaluate, makespan
from planner.simulate.in_flight import (
    PeakCounts,
    peak_activation_bytes,
    peak_counts,
    peak_held_bytes,
    peak_in_flight,
)
from planner.simulate.relayed import relay_starts
from planner.simulate.shared import Sharing, check_sharing, simulate_shared
from planner.simulate.timeline import Timeline, timeline

__all__ = [
    "Action",
    "ActionKind",
    "ActionTable",
    "Evaluation",
    "PeakCounts",
    "Sharing",
    "Timeline",
    "actions",
    "bubble_coefficients",
    "check_sharing",
    "closed_form_makespan",
    "closed_form_of_stages",
    "evaluate",
    "makespan",
    "peak_activation_bytes",
    "peak_counts",
    "peak_held_bytes",
    "peak_in_flight",
    "rank_of_stages",
    "relay_starts",
    "schedule_columns",
    "simulate_shared",
    "timeline",
]
