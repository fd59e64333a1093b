from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core.caching import CacheImpl, NullCache

from planner.simulate import compiled as room
from planner.simulate.compiled import compiled, inlined, inner


def _double(value: float) -> float:
    return 2 * value


def test_compiles_where_no_place_can_keep_the_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(CacheImpl, "__init__", refuse)
    room._announce.cache_clear()
    with caplog.at_level(logging.INFO):
        made = compiled(_double)
    assert "set NUMBA_CACHE_DIR" in caplog.text
    assert made(4.0) == 8.0
    assert isinstance(made._cache, NullCache)


def test_code_that_names_a_type_which_moved_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert compiled(_double)(4.0) == 8.0
    (index,) = tmp_path.rglob("*.nbi")
    version = pickle.dumps(numba.__version__)
    gone = b"cplanner.no_such_module\nThing\n."
    index.write_bytes(version + gone)
    assert compiled(_double)(4.0) == 8.0
    # The index is whole again.
    assert compiled(_double)(4.0) == 8.0
    assert gone not in index.read_bytes()


def test_a_part_compiles_by_itself_too() -> None:
    assert inlined(_double)(4.0) == 8.0


def test_the_first_compilation_is_announced_and_loading_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    for expected in (1, 0):
        room._announce.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert compiled(_double)(4.0) == 8.0
            assert compiled(_half)(4.0) == 2.0
        assert caplog.text.count("compiling kernels once") == expected


def _half(value: float) -> float:
    return value / 2


def test_an_inner_function_runs_where_compiled_code_calls_it() -> None:
    part = inner(_double)

    @compiled
    def caller(value: float) -> float:
        return part(value) + 1

    assert caller(4.0) == 9.0


_PARTS = """
from planner.simulate.compiled import inner
STEP = {step}

@inner
def part(value):
    return value * {factor}
"""

_WHOLE = """
from parts import STEP, part
from planner.simulate.compiled import compiled

@compiled
def whole(value):
    return part(value) + STEP

print(whole(4.0))
"""


@pytest.mark.parametrize("changed", [{"step": 5}, {"factor": 3}])
def test_code_is_made_anew_when_another_file_that_went_into_it_changes(
    tmp_path: Path, changed: dict[str, int]
) -> None:
    (tmp_path / "whole.py").write_text(_WHOLE)
    for values in ({"step": 1, "factor": 20}, {"step": 1, "factor": 20} | changed):
        text = _PARTS.format(**values)
        (tmp_path / "parts.py").write_text(text)
        told = subprocess.run(
            [sys.executable, "-B", "whole.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert float(told.stdout) == 4.0 * values["factor"] + values["step"]
    assert len([*tmp_path.rglob("whole.whole*.nbi")]) == 1
