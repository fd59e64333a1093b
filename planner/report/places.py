"""Where the forms of a report are written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from planner.errors import PlanFileError, UnknownNameError
from planner.report.sheet import require_matplotlib
from planner.schema.base import require_writable

__all__ = ["require_places"]


def require_places(
    paths: Mapping[str, str | os.PathLike[str]], forms: Iterable[str]
) -> None:
    """Refuse forms and files before the long work.

    Args:
        paths: Of each form its file.
        forms: That there are.

    Raises:
        UnknownNameError: If a form is not known.
        PlanFileError: If a file cannot be written, or is named twice, or if matplotlib
            is asked for and not there.
    """
    forms = tuple(forms)
    taken: dict[Path, str] = {}
    for form, path in paths.items():
        if form not in forms:
            raise UnknownNameError("form of a report", form, forms)
        if form in {"png", "svg"}:
            require_matplotlib()
        require_writable(path)
        place = Path(path).resolve()
        other = taken.setdefault(place, form)
        if other != form:
            raise PlanFileError(
                f"{path} is named for both {other} and {form}; name a file for each"
            )
