from __future__ import annotations

from typing import Any

import numba
import pytest

from planner.simulate.compiled import compiled, inlined


def _double(value: float) -> float:
    return 2 * value


def test_compiles_where_no_place_can_keep_the_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, asked = numba.njit, []

    def njit(*arguments: Any, **options: Any) -> Any:
        asked.append(options.get("cache", False))
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(*arguments, **options)

    monkeypatch.setattr(numba, "njit", njit)
    assert compiled(_double)(4.0) == 8.0
    assert asked == [True, False]


def test_a_part_compiles_by_itself_too() -> None:
    assert inlined(_double)(4.0) == 8.0
