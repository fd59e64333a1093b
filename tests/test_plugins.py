"""Registered plugins are read once, and again when something was installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import plugins
from planner.plugins import entry_points

GROUP = "meshwright.partitioners"


def _install(folder: Path, name: str) -> None:
    made = folder / f"{name}-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (made / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {name}:Made\n")


def _names() -> set[str]:
    return {point.name for point in entry_points(group=GROUP)}


def test_nothing_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    found = entry_points(group=GROUP)
    assert "exhaustive" in {point.name for point in found}
    monkeypatch.setattr(plugins, "read_entry_points", None)
    assert entry_points(group=GROUP) is found


def test_what_is_installed_later_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _names()
    monkeypatch.syspath_prepend(tmp_path)
    _install(tmp_path, "first")
    assert _names() == before | {"first"}
    _install(tmp_path, "second")
    assert _names() == before | {"first", "second"}
    monkeypatch.undo()
    assert _names() == before


def test_folders_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _names()
    monkeypatch.syspath_prepend("/nowhere/at/all")
    assert _names() == before
