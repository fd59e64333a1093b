"""Federations by hand, of members that train tiny models."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from planner.schema import ClusterReference, Federation, FederationPrediction, Plan
from planner.schema.federation import Formation, Member
from planner.schema.methods.local_steps import LocalSteps
from tests.distributed.cases import make_plan

__all__ = ["free_ports", "make_federation", "member_plan"]


def free_ports(count: int) -> list[int]:
    """Ports of this machine at which nobody listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def member_plan(name: str = "perceptron", samples: int = 4, **changes: Any) -> Plan:
    """A plan by hand for so many samples a step; see :func:`make_plan`."""
    data = make_plan(name, **changes).to_data()
    strategy = data["strategy"]
    mesh = strategy["mesh"]
    ways = mesh["dp_replicate"] * mesh["dp_shard"] * strategy["num_microbatches"]
    assert samples % ways == 0
    strategy["microbatch_size"] = samples // ways
    data["workload"]["global_batch"] = samples
    return Plan.from_data(data)


def make_federation(*plans: Plan, **changes: Any) -> Federation:
    """Members on devices side by side, in the order given."""
    members, first = [], 0
    for index, plan in enumerate(plans):
        count = plan.cluster.num_devices
        devices = tuple(range(first, first + count))
        members.append(Member(name=f"member{index}", devices=devices, plan=plan))
        first += count
    fields: dict[str, Any] = {
        "cluster": ClusterReference(
            name="local", num_devices=first, device_types={}, fingerprint=""
        ),
        "members": tuple(members),
        "global_batch": sum(plan.workload.global_batch for plan in plans),
        "exchange": LocalSteps(period=2),
        "prediction": FederationPrediction(
            step_time_s=1.0,
            member_step_times_s=(1.0,) * len(plans),
            exchange_time_s=0.5,
            exchange_bytes=(8.0,) * len(plans),
            samples_per_s=1.0,
        ),
        "formation": Formation(meshwright_version="0", method="given"),
    }
    return Federation(**{**fields, **changes})
