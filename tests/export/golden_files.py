"""Files that exporters wrote once and a person has read."""

from __future__ import annotations

import os
from pathlib import Path

from planner import __version__
from planner.export import export_files
from planner.schema import Plan

__all__ = ["check_golden"]

_GOLDEN = Path(__file__).parent / "golden"


def check_golden(
    plan: Plan, target: str, name: str, without: frozenset[str] = frozenset()
) -> None:
    """Hold an export against the files in ``golden/TARGET/NAME``.

    ``UPDATE_GOLDEN=1`` writes them anew; read the difference before it is committed.
    The plan beside them is not kept: it is what ``Plan.to_json`` gives. Nor are files
    named in ``without``, which are the same whatever the plan.
    """
    files = export_files(plan, target)
    assert Plan.from_json(files.pop("plan.json")) == plan
    files = {file: text for file, text in files.items() if file not in without}
    folder = _GOLDEN / target / name
    if os.environ.get("UPDATE_GOLDEN"):
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            bare = text.replace(f"=={__version__}", "==VERSION")
            (folder / file).write_text(bare)
    assert {path.name for path in folder.iterdir()} == set(files)
    for file, text in files.items():
        text = text.replace(f"=={__version__}", "==VERSION")
        assert text == (folder / file).read_text(), f"{target}/{name}/{file}"
