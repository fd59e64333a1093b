"""The runtime model against step times that a paper prints."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gossip_runtime import METHODS, fitted, model_s, printed, report


def test_all_cells_of_the_figure_are_there() -> None:
    rows = printed()
    assert len({(row.cluster, row.copies) for row in rows}) == len(rows) == 9
    assert all(row.seconds.shape == (len(METHODS),) for row in rows)
    (row,) = (one for one in rows if (one.cluster, one.copies) == ("A40", 32))
    # 2.78 times as fast, as the paper says.
    assert row.seconds[0] / row.seconds[3] == pytest.approx(2.78, abs=0.005)


@pytest.mark.parametrize("cluster", ["T4", "A100", "A40"])
def test_three_constants_tell_who_is_faster_and_by_how_much(cluster: str) -> None:
    fit = fitted(cluster)
    assert len(fit.constants) == 3
    assert fit.ordered == 2 * len(fit.rows)
    assert np.abs(fit.errors).mean() <= 0.25
    for row, errors in zip(fit.rows, fit.errors, strict=True):
        found = model_s(row, fit.constants)
        assert found / row.seconds - 1 == pytest.approx(errors)


def test_the_report_counts_pairs_and_cells() -> None:
    fits = [fitted(cluster) for cluster in ("T4", "A100", "A40")]
    within = sum(int((np.abs(fit.errors) <= 0.25).sum()) for fit in fits)
    text = report(fits)
    assert text.startswith("18 of 18 pairs")
    assert f"{within} of 36 step times are within 25 %" in text
