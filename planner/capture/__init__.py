"""Reading a model: from a torch module, a name or a profile to a ModelGraph."""

from planner.capture.models import LoadedModel
from planner.capture.read import capture

__all__ = ["LoadedModel", "capture"]
