from __future__ import annotations

import logging
import pickle
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
