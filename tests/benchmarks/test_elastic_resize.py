"""The two figures of a resize that fit what was measured."""

from __future__ import annotations

import pytest

from benchmarks.elastic_resize import Resize, fit


def _resize(after: int, size_bytes: int, moved_s: float) -> Resize:
    return Resize(
        model="net",
        before=4,
        after=after,
        size_bytes=size_bytes,
        step_s=1.0,
        write_s=0.75 * moved_s,
        end_s=1.0,
        start_s=4.0,
        read_s=0.25 * moved_s,
        first_s=2.0,
        cpu_s=0.0,
    )


def test_fit_finds_restart_and_rate() -> None:
    # 8 s, and 50 bytes per second and device.
    each = [_resize(2, 1000, 10.0), _resize(4, 1000, 5.0)]
    assert each[0].total_s == 18.0
    assert fit(each) == pytest.approx((8.0, 50.0))


def test_nothing_is_not_fitted() -> None:
    with pytest.raises(ValueError, match="measure one at least"):
        fit([])
