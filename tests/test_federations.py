"""``federate`` as people call it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planner import Cluster, Federation, federate
from planner import diagnose as diagnosis
from planner.cluster import device_type
from planner.errors import (
    ClusterError,
    NoFeasiblePlanError,
    StrategyError,
    TopologyError,
    UnknownNameError,
)
from planner.federations import (
    FleetPlanner,
    _moved_shares,
    _share,
    plan_divisions,
    segment_pricer,
)
from planner.request import PlanOptions, make_request
from planner.schema import Precision
from planner.schema.cluster import ClusterDocument
from planner.search.federation import SegmentPricer
from tests.plans import gpt2_graph


def fleet(kinds: list[str], mbit: list[float], memory: float | None = None) -> Cluster:
    speed = np.minimum.outer(mbit, mbit) * 1.25e5
    types = [device_type(kind) for kind in kinds]
    if memory is not None:
        types = [one.model_copy(update={"memory_bytes": memory}) for one in types]
    return Cluster.from_matrices(speed, np.full(speed.shape, 0.01), types)


def small(machines: Cluster, **options: Any) -> Federation:
    return federate(
        gpt2_graph(),
        machines,
        **{"global_batch": 64, "partitioner": "expert"} | options,
    )


UNLIKE = ["rtx4090-24", "t4-16", "rtx3090-24"]


@pytest.fixture(scope="module")
def made() -> Federation:
    return small(fleet(UNLIKE, [1000, 5000, 10000]))


def test_members_share_the_batch_by_speed(made: Federation) -> None:
    assert [member.devices for member in made.members] == [(0,), (1,), (2,)]
    sizes = [member.plan.workload.global_batch for member in made.members]
    assert sum(sizes) == made.global_batch == 64
    assert sizes[0] > sizes[2] > sizes[1]
    assert made.left_out == ()


def test_a_step_is_the_slowest_members_and_its_share_of_the_exchange(
    made: Federation,
) -> None:
    found = made.prediction
    steps = [member.plan.prediction.step_time_s for member in made.members]
    assert found.member_step_times_s == tuple(steps)
    mean = max(steps) + found.exchange_time_s / made.exchange.period
    assert found.step_time_s == pytest.approx(mean)
    assert found.samples_per_s == pytest.approx(64 / mean)


def test_an_exchange_is_that_of_the_slowest_ring(made: Federation) -> None:
    """Alone in its member each device sends 4/3 of all weights to the next."""
    weights = 4 * sum(p.numel for p in gpt2_graph().parameters)
    assert made.prediction.exchange_bytes == pytest.approx((4 / 3 * weights,) * 3)
    pieces = -(-weights // (25 * 2**20))
    expected = 4 / 3 * weights / 1.25e8 + 4 * pieces * 0.01
    assert made.prediction.exchange_time_s == pytest.approx(expected)


def test_the_period_keeps_exchanges_short(made: Federation) -> None:
    found, period = made.prediction, made.exchange.period
    slowest = max(found.member_step_times_s)
    assert period == 512 or found.exchange_time_s <= 0.02 * slowest * period
    assert period == 1 or found.exchange_time_s > 0.02 * slowest * period / 2


def test_the_same_request_gives_the_same_bytes(made: Federation) -> None:
    again = small(fleet(UNLIKE, [1000, 5000, 10000]))
    assert again.canonical_bytes() == made.canonical_bytes()


def test_every_member_holds_the_model() -> None:
    """GPT-2 takes more than 3 GB to train on one device."""
    tight = small(fleet(["t4-16"] * 4, [1000.0] * 4, memory=3.4e9))
    for member in tight.members:
        assert len(member.devices) > 1
        for entry in member.plan.prediction.memory:
            assert entry.total_bytes <= entry.limit_bytes


def test_a_fleet_that_holds_no_model_is_told_what_lacks() -> None:
    with pytest.raises(NoFeasiblePlanError) as caught:
        small(fleet(["t4-16"] * 2, [1000.0] * 2, memory=0.3e9))
    said = str(caught.value)
    assert "not even all devices of matrix as one member" in said
    assert "more than the 270 MB it may use (90% of 300 MB)" in said


def test_members_that_do_not_fit_are_not_diagnosed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    diagnosed: list[object] = []
    diagnose = diagnosis._diagnose
    monkeypatch.setattr(
        diagnosis, "_diagnose", lambda *given: diagnosed.append(1) or diagnose(*given)
    )
    planner = FleetPlanner(
        graph=gpt2_graph(),
        fleet=fleet(["t4-16"] * 2, [1000.0] * 2, memory=2.0e9),
        options=PlanOptions(global_batch=16, any_dtype=True),
        exchange=None,
    )
    with pytest.raises(NoFeasiblePlanError) as caught:
        planner.balanced(((0,), (1,)), None)
    assert not diagnosed
    assert "more than the 1.8 GB it may use" in str(caught.value)
    assert len(diagnosed) == 1


def test_members_can_be_given() -> None:
    machines = fleet(["t4-16"] * 3, [1000.0] * 3)
    made = small(machines, members=[[2], [0, 1]], exchange="diloco:period=100")
    assert [member.devices for member in made.members] == [(2,), (0, 1)]
    assert made.exchange.period == 100
    assert made.exchange.outer_momentum == 0.9
    assert made.formation.method == "given"


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"members": [[0], [0, 1]]}, ClusterError, "device 0 is in two members"),
        ({"members": [[3]]}, ClusterError, "device 3 does not exist"),
        ({"members": []}, ClusterError, "members is empty"),
        ({"members": [[]]}, ClusterError, "no devices of matrix are given"),
        (
            {"members": [[0], [1]], "global_batch": 1},
            StrategyError,
            "global_batch=1 for 2 members; .* use global_batch=2 or more",
        ),
        ({"exchange": "gossip"}, StrategyError, "is no exchange every few steps"),
        ({"exchange": "dilocco"}, UnknownNameError, "did you mean 'diloco'"),
        ({"exchange": "local_steps:fragments=2"}, ValueError, "use fragments=1"),
        ({"most_members": 0}, StrategyError, "most_members=0; give at least 1"),
    ],
)
def test_wrong_requests_are_refused(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        small(fleet(["t4-16"] * 2, [1000.0] * 2), **options)


def test_links_of_one_direction_are_refused() -> None:
    document = fleet(["t4-16"] * 2, [1000.0] * 2).document
    data = document.to_data()
    data["matrices"]["bandwidth_bytes_per_s"][1][0] = None
    with pytest.raises(TopologyError, match="missing link from device 1 to device 0"):
        small(Cluster.from_document(ClusterDocument.from_data(data)))


@pytest.mark.parametrize(
    ("batch", "rates", "sizes"),
    [
        (8, [3.0, 1.0], [6, 2]),
        (5, [1.0, 1.0], [3, 2]),
        (3, [100.0, 1.0, 1.0], [1, 1, 1]),
        (512, [2.0, 1.0], [344, 168]),
        (513, [1.0, 2.0], [168, 345]),
    ],
)
def test_a_batch_is_divided_by_rates(
    batch: int, rates: list[float], sizes: list[int]
) -> None:
    assert _share(batch, rates) == sizes


def test_the_entrance_is_a_function_each_time() -> None:
    import planner.federations

    assert callable(planner.federate)
    assert planner.federate is planner.federations.federate


def test_members_that_wait_take_samples_of_the_slowest() -> None:
    """From equal shares on unlike PCs; the batch stays as it is."""
    planner = FleetPlanner(
        graph=gpt2_graph(),
        fleet=fleet(UNLIKE, [1000, 5000, 10000]),
        options=PlanOptions(global_batch=66, any_dtype=True),
        exchange=None,
    )
    equal = planner.planned(((0,), (1,), (2,)), (22, 22, 22))
    found = planner.evened(equal)
    sizes = [plan.workload.global_batch for plan in found.plans]
    assert sum(sizes) == 66
    assert sizes[0] > sizes[2] > sizes[1]
    assert found.devices == equal.devices
    slowest, before = (
        max(plan.prediction.step_time_s for plan in one.plans) for one in (found, equal)
    )
    assert slowest < 0.7 * before
    assert planner.evened(found).step_time_s == found.step_time_s


@pytest.mark.parametrize(
    ("sizes", "seconds", "first"),
    [
        # 4.8 samples less make both 1.6 s; 4 leave shares that 4 divides.
        ((8, 8), (4.0, 1.0), (4, 12)),
        # 28 make both 2.25 s; 24 leave 40 and 32.
        ((64, 8), (4.0, 0.5), (40, 32)),
        # The fastest is asked first; 12 make both 2.5 s, 8 leave 24 and 16.
        ((32, 8, 8), (4.0, 1.0, 2.0), (24, 16, 8)),
        # The last sample stays; where nobody waits, nothing moves.
        ((1, 8), (4.0, 1.0), None),
    ],
)
def test_samples_that_are_moved_make_two_members_equally_long(
    sizes: tuple[int, ...],
    seconds: tuple[float, ...],
    first: tuple[int, ...] | None,
) -> None:
    plans: list[Any] = [
        SimpleNamespace(
            workload=SimpleNamespace(global_batch=size),
            prediction=SimpleNamespace(step_time_s=one),
        )
        for size, one in zip(sizes, seconds, strict=True)
    ]
    found = [tuple(one) for one in _moved_shares(plans)]
    assert (found or [None])[0] == first
    assert all(sum(one) == sum(sizes) and min(one) > 0 for one in found)


def test_orders_of_the_pointer_make_no_division_worse() -> None:
    kinds = ["t4-16", "rtx3090-24", "l4-24"]
    machines = fleet(kinds, [100.0, 1000.0, 250.0], memory=3.6e9)
    planner = FleetPlanner(
        graph=gpt2_graph(),
        fleet=machines,
        options=PlanOptions(global_batch=8, any_dtype=True),
        exchange=None,
    )
    both = plan_divisions(planner, 2)[0]
    rules = plan_divisions(replace(planner, orderer=None), 2)[0]
    assert {one.devices for one in rules} <= {one.devices for one in both}
    assert both[0].step_time_s <= rules[0].step_time_s


# -- Dtypes ----------------------------------------------------------------------------


def test_members_train_in_dtypes_that_their_devices_compute_in() -> None:
    """A T4 and a V100 have no bfloat16; all weights are in float32."""
    machines = fleet(["rtx4090-24", "t4-16", "v100-16"], [10_000.0] * 3)
    made = small(machines, members=[[0], [1], [2]])
    found = [member.plan.strategy.precision for member in made.members]
    assert [one.compute for one in found] == ["bfloat16", "float16", "float16"]
    assert {one.parameter for one in found} == {"float32"}


def test_a_dtype_that_is_asked_for_is_kept_or_refused() -> None:
    machines = fleet(["rtx4090-24", "t4-16"], [10_000.0] * 2)
    made = small(machines, precision=Precision(compute="float32"))
    for member in made.members:
        assert member.plan.strategy.precision.compute == "float32"
    for members in (None, [[0], [1]]):
        with pytest.raises(StrategyError, match="bfloat16 on t4-16, which has no"):
            small(machines, members=members, precision=Precision())
    alone = small(machines, members=[[0]], precision=Precision())
    assert alone.members[0].plan.strategy.precision.compute == "bfloat16"


def test_segments_are_priced_in_a_dtype_of_all_their_hosts() -> None:
    machines = fleet(["rtx4090-24", "t4-16"], [10_000.0] * 2)

    def planner(**changes: Any) -> FleetPlanner:
        options = PlanOptions(global_batch=32, **changes)
        return FleetPlanner(
            graph=gpt2_graph(), fleet=machines, options=options, exchange=None
        )

    narrow = segment_pricer(planner(any_dtype=True))
    half = segment_pricer(planner(precision=Precision(compute="float16")))
    assert narrow.of((1,)) == half.of((1,))
    assert narrow.of((0, 1)) == half.of((0, 1))
    wide = make_request(gpt2_graph(), machines, PlanOptions(global_batch=32))
    both = SegmentPricer(wide)
    assert narrow.of((0,)) == both.of((0,))
