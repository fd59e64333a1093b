"""Cases that the default suite leaves to longer ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["cases"]


def cases(
    names: Iterable[str],
    *,
    further: Collection[str] = (),
    slow: Collection[str] = (),
) -> list[Any]:
    """Parameters of a test by name.

    Args:
        names: All cases.
        further: Those that ``make test-further`` runs, and CI.
        slow: Those that ``make test-all`` alone runs.
    """
    everything = list(names)
    unknown = ({*further} | {*slow}) - {*everything}
    assert not unknown, f"no such cases: {sorted(unknown)}"
    assert not {*further} & {*slow}
    marks = {
        **dict.fromkeys(further, pytest.mark.further),
        **dict.fromkeys(slow, pytest.mark.slow),
    }
    return [pytest.param(name, marks=marks.get(name, ())) for name in everything]
