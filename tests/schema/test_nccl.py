"""Plans whose sums NCCL does itself, and the variable that tells it."""

from __future__ import annotations

from typing import Any

import pytest

from planner.schema import Communication, Strategy
from planner.schema.nccl import nccl_environment, nccl_violation
from planner.schema.strategy_parts import Collective


def _strategy(mesh: dict[str, int] | None = None, **replicas: Any) -> Strategy:
    values: dict[str, Any] = {
        "mesh": {"dp_replicate": 4, **(mesh or {})},
        "communication": Communication(replicas=Collective(**replicas)),
    }
    if (mesh or {}).get("cp", 1) > 1:
        values |= {"context_algorithm": "halo", "spatial": [2]}
    return Strategy(**values)


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_ring_and_tree_are_named_for_sums_alone(algorithm: str) -> None:
    found = nccl_environment(_strategy(algorithm=algorithm))
    assert found == {"NCCL_ALGO": f"allreduce:{algorithm}"}
    # Its gathers and reduce-scatters stay NCCL's choice.
    sharded = _strategy({"dp_shard": 2}, algorithm=algorithm)
    assert nccl_environment(sharded) == found


def test_nothing_is_set_where_the_library_chooses() -> None:
    assert nccl_environment(Strategy(mesh={"dp_replicate": 4})) == {}


OTHERS: dict[str, tuple[dict[str, int], dict[str, Any], str]] = {
    "direct": ({}, {"algorithm": "direct"}, "no direct"),
    "halving": ({}, {"algorithm": "halving"}, "no halving"),
    "order": ({}, {"algorithm": "ring", "order": (0, 2, 1, 3)}, "order of its own"),
    "tp": ({"tp": 2}, {"algorithm": "ring"}, "tp=2 leaves sums inside layers"),
    "spatial": ({"cp": 2}, {"algorithm": "ring"}, "batch norms"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_plans_say_why_they_are_not_left_to_nccl(name: str) -> None:
    mesh, replicas, reason = OTHERS[name]
    strategy = _strategy(mesh, **replicas)
    assert nccl_environment(strategy) == {}
    assert reason in str(nccl_violation(strategy))
