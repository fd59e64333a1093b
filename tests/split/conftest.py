"""Published tasks where there are some, and solvers as the project file names them."""

from __future__ import annotations

import csv
import os
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from planner.split import GROUP, SplitTask, load_tasks, solver

_DATA = Path(os.environ.get("MESHWRIGHT_DATA", "none"))
_PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture(scope="session")
def published() -> dict[str, SplitTask]:
    folder = _DATA / "dnn-partitioning"
    if not folder.is_dir():
        pytest.skip("MESHWRIGHT_DATA has no dnn-partitioning folder")
    return dict(load_tasks(folder).tasks)


@pytest.fixture(scope="session")
def golden() -> dict[tuple[str, str], float]:
    """Load in ms by instance and method."""
    path = _DATA / "dnn-partitioning" / "GOLDEN_max_load.csv"
    if not path.is_file():
        pytest.skip("MESHWRIGHT_DATA has no dnn-partitioning/GOLDEN_max_load.csv")
    with path.open(encoding="utf-8") as file:
        return {
            (row["instance"], row["method"]): float(row["max_load_ms"])
            for row in csv.DictReader(file)
        }


@pytest.fixture
def solvers(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is registered; a test may add to it."""
    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))
    points: dict[str, str] = dict(project["project"]["entry-points"][GROUP])

    def found(group: str) -> list[EntryPoint]:
        return [EntryPoint(name, value, group) for name, value in points.items()]

    monkeypatch.setattr(solver, "entry_points", found)
    return points
