"""Stages that share their messages, proposed where that is predicted to be faster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner import Cluster, Plan, plan
from planner.cluster import device_type
from planner.request import PlanOptions, make_request
from planner.search.base import Candidate
from planner.search.communication.boundaries import with_shared_boundaries
from planner.space import normalize_pins
from tests.plans import gpt2_graph

HOSTS = np.array([0, 0, 1, 1])


def _machines(mbit: float, hosts: np.ndarray = HOSTS) -> Cluster:
    """Hosts with fast links inside, on lines of so many Mb/s."""
    same = np.equal.outer(hosts, hosts)
    speed = np.where(same, 20e9, mbit * 1.25e5)
    kinds = [device_type("rtx4090-24")] * len(hosts)
    wait = np.where(same, 1e-5, 1e-4)
    return Cluster.from_matrices(speed, wait, kinds, hosts.tolist(), name="lines")


def _planned(machines: Cluster, **pins: Any) -> Plan:
    return plan(
        gpt2_graph(),
        machines,
        global_batch=32,
        partitioner="exhaustive",
        pin={"pp": 2, "tp": 2, "sequence_parallel": False, **pins},
    )


def test_messages_on_a_slow_line_are_shared() -> None:
    machines = _machines(1000)
    found = _planned(machines)
    assert found.strategy.communication.boundary == "scattered"
    direct = _planned(machines, boundary="direct")
    pinned = _planned(machines, boundary="scattered")
    assert direct.strategy.communication.boundary == "direct"
    step_s = found.prediction.step_time_s
    assert step_s <= 0.99 * direct.prediction.step_time_s
    assert step_s == pytest.approx(pinned.prediction.step_time_s, rel=0.02)


@pytest.mark.parametrize(
    ("machines", "pins"),
    [
        (_machines(1000, np.zeros(4, dtype=int)), {}),
        (_machines(1e7), {}),
        (_machines(1000), {"tp": 1, "dp_replicate": 2}),
        (_machines(1000), {"pp": 1, "tp": 4}),
    ],
    ids=["one host", "a fast line", "no tp", "no stages"],
)
def test_elsewhere_the_plan_is_unchanged(
    machines: Cluster, pins: dict[str, Any]
) -> None:
    found, direct = (
        _planned(machines, **pins),
        _planned(machines, **pins, boundary="direct"),
    )
    assert found.strategy == direct.strategy
    assert found.prediction == direct.prediction


def test_what_the_executors_or_a_launcher_refuse_is_not_proposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machines = _machines(1000)
    direct = _planned(machines, boundary="direct")
    candidate = _candidate(direct, machines)
    request = make_request(gpt2_graph(), machines, PlanOptions(global_batch=32))
    found = with_shared_boundaries(request, [candidate])
    assert found.strategy.communication.boundary == "scattered"
    assert found.cost.step_time_s < candidate.cost.step_time_s
    launcher = make_request(
        gpt2_graph(), machines, PlanOptions(global_batch=32, target="megatron")
    )
    assert with_shared_boundaries(launcher, [candidate]) is candidate
    monkeypatch.setattr(
        "planner.search.communication.boundaries.executor_violations",
        lambda one: ("no",) if one.communication.boundary == "scattered" else (),
    )
    assert with_shared_boundaries(request, [candidate]) is candidate


def _candidate(made: Plan, machines: Cluster) -> Candidate:
    """The plan's strategy, priced."""
    pins = normalize_pins({"boundary": "direct"})
    request = make_request(
        gpt2_graph(), machines, PlanOptions(global_batch=32, pin=pins)
    )
    context = request.context.reordered(np.array(made.strategy.device_ids()))
    from planner.cost import CostModel

    cost = CostModel(context).cost(made.strategy)
    return Candidate(strategy=made.strategy, cost=cost)
