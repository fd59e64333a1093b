"""Documents that cross a boundary: standard library and pydantic only."""

from planner.schema.base import Document, write_atomically
from planner.schema.federation import Federation, FederationPrediction, Member
from planner.schema.methods import GradientCompression
from planner.schema.plan import Plan
from planner.schema.plan_parts import (
    Alternative,
    ClusterReference,
    Contender,
    InputSpec,
    ModelReference,
    Prediction,
    Provenance,
    StageMemory,
    Workload,
)
from planner.schema.schedules import (
    Schedule,
    ScheduleSpec,
    register_schedule,
    schedule_names,
    schedule_spec,
)
from planner.schema.strategy import PINNABLE, Recompute, Strategy
from planner.schema.strategy_parts import (
    AXES,
    Communication,
    ContextAlgorithm,
    Mesh,
    Offload,
    Optimizer,
    Overlap,
    Precision,
    Stage,
    TensorSharding,
)

__all__ = [
    "AXES",
    "PINNABLE",
    "Alternative",
    "ClusterReference",
    "Communication",
    "Contender",
    "ContextAlgorithm",
    "Document",
    "Federation",
    "FederationPrediction",
    "GradientCompression",
    "InputSpec",
    "Member",
    "Mesh",
    "ModelReference",
    "Offload",
    "Optimizer",
    "Overlap",
    "Plan",
    "Precision",
    "Prediction",
    "Provenance",
    "Recompute",
    "Schedule",
    "ScheduleSpec",
    "Stage",
    "StageMemory",
    "Strategy",
    "TensorSharding",
    "Workload",
    "register_schedule",
    "schedule_names",
    "schedule_spec",
    "write_atomically",
]
