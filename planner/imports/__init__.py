"""Configs of other launchers as strategies, so that they can be priced.

The reverse of :mod:`planner.export`. One file a source; keys that mean nothing to a
strategy are listed, contradictions and unknown keys are refused.
"""

from planner.imports.base import Ignored, Imported, Wanted, name_stages
from planner.imports.reading import SOURCES, detect_source, import_text

__all__ = [
    "SOURCES",
    "Ignored",
    "Imported",
    "Wanted",
    "detect_source",
    "import_text",
    "name_stages",
]
