"""Documents that cross a boundary: standard library and pydantic only."""

from planner.schema.base import Document, write_atomically
from planner.schema.plan import (
    Alternative,
    ClusterReference,
    InputSpec,
    ModelReference,
    Plan,
    Prediction,
    Provenance,
    StageMemory,
    Workload,
)
from planner.schema.strategy import (
    AXES,
    SCHEDULES,
    SPLIT_BACKWARD_SCHEDULES,
    V_SCHEDULES,
    Mesh,
    Optimizer,
    Precision,
    Recompute,
    Schedule,
    Stage,
    Strategy,
    TensorSharding,
)

__all__ = [
    "AXES",
    "SCHEDULES",
    "SPLIT_BACKWARD_SCHEDULES",
    "V_SCHEDULES",
    "Alternative",
    "ClusterReference",
    "Document",
    "InputSpec",
    "Mesh",
    "ModelReference",
    "Optimizer",
    "Plan",
    "Precision",
    "Prediction",
    "Provenance",
    "Recompute",
    "Schedule",
    "Stage",
    "StageMemory",
    "Strategy",
    "TensorSharding",
    "Workload",
    "write_atomically",
]
