"""Data types that devices have."""

from __future__ import annotations

import pytest

from planner.cluster import Cluster
from planner.errors import StrategyError
from planner.request import default_precision
from planner.schema import Precision


@pytest.mark.parametrize(
    ("cluster", "compute"), [("dgx-v100:1", "float32"), ("dgx-a100:1", "bfloat16")]
)
def test_no_plan_is_in_a_data_type_that_a_device_lacks(
    cluster: str, compute: str
) -> None:
    found, why = default_precision(Cluster.parse(cluster))
    assert found.compute == compute
    assert bool(why) == (compute == "float32")


def test_devices_that_are_occupied_do_not_count() -> None:
    machines = Cluster.parse("dgx-v100:1")
    taken = machines.with_occupied(range(8))
    assert default_precision(taken)[0].compute == "bfloat16"


def test_bfloat16_where_there_is_none_is_refused() -> None:
    machines = Cluster.parse("dgx-v100:1")
    with pytest.raises(
        StrategyError, match="v100-32, which has no bfloat16; use float"
    ):
        default_precision(machines, Precision())
    half = Precision(compute="float16")
    assert default_precision(machines, half)[0] == half
