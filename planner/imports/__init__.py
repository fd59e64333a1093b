"""Configs of other launchers as strategies, so that they can be priced.

The other way round than :mod:`planner.export`. One file a source; what means nothing to
a strategy is told, what contradicts itself or is not known is refused.
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
