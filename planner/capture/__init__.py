"""Reading a model: from a torch module, a name or a profile to a ModelGraph."""

from planner.capture.inputs import InputShape
from planner.capture.models import (
    Architecture,
    LoadedModel,
    architectures,
    built_in_models,
    load_config,
    load_model,
    model_names,
)
from planner.capture.pipedream import parse_profile, read_profile
from planner.capture.read import capture

__all__ = [
    "Architecture",
    "InputShape",
    "LoadedModel",
    "architectures",
    "built_in_models",
    "capture",
    "load_config",
    "load_model",
    "model_names",
    "parse_profile",
    "read_profile",
]
