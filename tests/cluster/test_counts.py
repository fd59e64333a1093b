"""Whole numbers that constructors of clusters take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.cluster import Cluster
from planner.cluster.counts import whole_number
from planner.errors import ClusterError


def test_ints_of_any_kind_count() -> None:
    assert whole_number("nodes", np.int32(4)) == 4
    assert whole_number("device", -2, least=None) == -2


@pytest.mark.parametrize("wrong", [1.5, float("nan"), 2.0, "4", True, None])
def test_what_counts_nothing_is_named(wrong: Any) -> None:
    said = "is no whole number; give an int"
    with pytest.raises(ClusterError, match=rf"nodes={wrong!r} {said}"):
        Cluster.from_preset("dgx-h100", wrong)
    with pytest.raises(ClusterError, match=rf"occupied device={wrong!r} {said}"):
        Cluster.from_preset("dgx-h100").with_occupied([0, wrong])
    if wrong is not None:
        with pytest.raises(ClusterError, match=rf"processes={wrong!r} {said}"):
            Cluster.detect(wrong)


def test_too_few_and_too_many() -> None:
    with pytest.raises(ClusterError, match="dgx-h100: nodes=0; use at least 1"):
        Cluster.from_preset("dgx-h100", 0)
    with pytest.raises(ClusterError, match="processes=-3; use at least 1"):
        Cluster.detect(-3)
    with pytest.raises(ClusterError, match=f"device {10**30} does not exist"):
        Cluster.from_preset("dgx-h100").with_occupied([10**30])
