"""Published tasks where there are some, and solvers as the project file names them."""

from __future__ import annotations

import csv
import os
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from planner.split import GROUP, SplitTask, load_tasks, registry

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
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """What the project registers, by group."""
    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))
    groups: dict[str, dict[str, str]] = project["project"]["entry-points"]

    def found(group: str) -> list[EntryPoint]:
        return [EntryPoint(name, value, group) for name, value in groups[group].items()]

    monkeypatch.setattr(registry, "entry_points", found)
    return groups


@pytest.fixture
def solvers(registered: dict[str, dict[str, str]]) -> dict[str, str]:
    """What splits tasks; a test may add to it."""
    return registered[GROUP]
