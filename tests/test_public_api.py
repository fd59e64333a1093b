"""Public names are exactly those that ``__all__`` lists."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import executors
import planner

ROOT = Path(planner.__file__).parents[1]
ROOMS = ("capture", "cluster", "cost", "export", "graph", "schema", "search")
ROOMS = (*(f"planner.{room}" for room in (*ROOMS, "simulate", "space")), "executors")


def _modules() -> list[str]:
    return [
        found.name
        for package in (planner, executors)
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]


def _defined(path: Path) -> set[str]:
    """Names without a leading underscore that a module defines, not imports."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return {name for name in names if not name.startswith("_")}


def test_the_entrance() -> None:
    assert planner.__all__ == [
        "Cluster",
        "Federation",
        "ModelGraph",
        "Plan",
        "Strategy",
        "admit",
        "federate",
        "plan",
        "predict",
        "__version__",
    ]
    assert dir(planner) == sorted(planner.__all__)
    assert executors.__all__ == [
        "Callback",
        "FederationResult",
        "LoopState",
        "Prepared",
        "RunResult",
        "Samples",
        "StepReport",
        "Volumes",
        "build_model",
        "launch",
        "learning_rate",
        "prepare",
        "run",
        "run_federation",
    ]
    with pytest.raises(AttributeError, match="has no attribute 'plam'"):
        planner.plam  # noqa: B018


@pytest.mark.parametrize("name", planner.__all__)
def test_names_of_the_entrance_resolve(name: str) -> None:
    assert getattr(planner, name) is not None


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_exports_what_it_lists(room: str) -> None:
    module = importlib.import_module(room)
    listed = list(module.__all__)
    assert len(set(listed)) == len(listed)
    if room == "executors":
        return
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    bound = _defined(Path(str(module.__file__)))
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.module.startswith(room):
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            bound.add(node.target.id)
    internal = {"export_json", "export_torchrun"} if room == "planner.export" else set()
    assert {name for name in bound if not name.startswith("_")} - internal == set(
        listed
    )


@pytest.mark.parametrize("name", _modules())
def test_a_module_lists_what_it_defines(name: str) -> None:
    parts = name.split(".")
    path = ROOT.joinpath(*parts)
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    source = ast.parse(path.read_text(encoding="utf-8"))
    if not any(not isinstance(node, ast.Expr) for node in source.body):
        return
    lists = [
        node
        for node in source.body
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    assert lists, f"{name} has no __all__"
    listed = {
        element.value
        for element in ast.walk(lists[0].value)
        if isinstance(element, ast.Constant)
    }
    if name in {"planner", "executors"}:
        return
    assert _defined(path) <= listed, f"{name}: {sorted(_defined(path) - listed)}"
