"""Runners-up that a plan lists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.cost import Cost, CostModel
from planner.schema import Strategy
from planner.search import Candidate, Objective, SearchResult, preference
from planner.search.refine import candidates_of_row
from planner.search.runners_up import runners_up
from tests.cost.made import (
    device,
    hosts,
    request_for,
    row,
    setting_for,
    uniform_graph,
)

GRAPH, CLUSTER = uniform_graph(8), hosts((2, 4, device()))
SETTING = setting_for(GRAPH, CLUSTER)


def candidate(**changes: int) -> Candidate:
    values = row(num_microbatches=2, dp_replicate=8, **changes)
    return candidates_of_row(CostModel(SETTING), values, free_recompute=False)[0]


def priced(base: Candidate, mark: int, **changes: Any) -> Candidate:
    """The same candidate at another price, and a label of its own."""
    cost: Cost = replace(base.cost, **changes)
    strategy: Strategy = base.strategy.model_copy(update={"num_microbatches": mark})
    return Candidate(strategy=strategy, cost=cost)


def slower(base: Candidate, mark: int, **seconds: float) -> Candidate:
    """Parts of the step changed by so many seconds."""
    parts = dict(base.cost.breakdown_s)
    for part, more in seconds.items():
        parts[part] += more
    return priced(base, mark, breakdown_s=parts, step_time_s=float(sum(parts.values())))


def heavier(base: Candidate, mark: int, more: float, **changes: Any) -> Candidate:
    memory = base.cost.memory
    return priced(
        base,
        mark,
        memory=replace(memory, activations=memory.activations + more),
        **changes,
    )


def reasons(
    best: Candidate, *others: Candidate, objective: Objective = "throughput"
) -> list[str]:
    result = SearchResult(
        partitioner="made",
        candidates=(best, *others),
        nearest=None,
        evaluations={},
        seconds=0.0,
    )
    request = replace(request_for(GRAPH, CLUSTER, 16), objective=objective)
    return [other.reason for other in runners_up(request, [result], best)]


PARTS = ("compute", "recompute", "tensor", "pipeline_bubble", "optimizer")
BEST = heavier(
    candidate(),
    99,
    20e9,
    step_time_s=1.0,
    breakdown_s=dict.fromkeys(PARTS, 0.2),
    link_bytes={"dp": 1e9},
)


def test_what_grew_and_what_shrank_is_named_with_its_seconds() -> None:
    other = slower(BEST, 1, tensor=0.175, compute=0.05, recompute=-0.1, optimizer=0.001)
    assert reasons(BEST, other) == [
        "12.6% slower: tensor-parallel communication +175 ms, compute +50 ms, "
        "recomputation -100 ms"
    ]
    assert reasons(BEST, slower(BEST, 1, compute=2.0)) == [
        "takes 3.0 times as long: compute +2 s"
    ]


@pytest.mark.parametrize(
    ("more", "changes", "said"),
    [
        (-94.5e6, {}, "as fast, with 94.5 MB less memory per device"),
        (2e9, {}, "as fast, with 2 GB more memory per device"),
        (0.0, {}, "as fast, with as much memory"),
        (
            -14e9,
            {"link_bytes": {"dp": 3e9}},
            "as fast, with 14 GB less memory per device, but 2 GB more to send",
        ),
        (0.0, {"link_bytes": {"dp": 3e9}}, "as fast, with 2 GB more to send"),
        (
            50e6,
            {"step_time_s": 1.0001},
            "as fast, with 50 MB more memory per device",
        ),
    ],
)
def test_equally_fast_ones_differ_in_memory_or_traffic(
    more: float, changes: dict[str, Any], said: str
) -> None:
    assert reasons(BEST, heavier(BEST, 1, more, **changes)) == [said]


def test_other_objectives_say_their_own_price() -> None:
    faster = heavier(BEST, 1, 3e9, step_time_s=0.8)
    assert reasons(BEST, faster, objective="memory") == [
        "3 GB more memory per device, 20.0% faster"
    ]
    fewer = Candidate(
        strategy=BEST.strategy.model_copy(
            update={"mesh": BEST.strategy.mesh.model_copy(update={"dp_replicate": 2})}
        ),
        cost=replace(BEST.cost, step_time_s=6.0),
    )
    assert reasons(BEST, fewer, objective="throughput_per_device") == [
        "takes 6.0 times as long on 2 devices instead of 8"
    ]


def test_of_a_family_the_best_other_one_is_shown() -> None:
    others = [slower(BEST, mark, compute=mark / 100) for mark in range(1, 6)]
    assert reasons(BEST, *others) == ["1.0% slower: compute +10 ms"]


def test_data_parallelism_alone_is_priced_if_nobody_did() -> None:
    request = request_for(GRAPH, CLUSTER, 16)
    best = candidates_of_row(
        CostModel(SETTING), row(pp=2, dp_replicate=4, num_microbatches=2)
    )[0]
    result = SearchResult(
        partitioner="made",
        candidates=(best,),
        nearest=None,
        evaluations={},
        seconds=0.0,
    )
    plain = runners_up(request, [result], best)[0]
    assert plain.family == "data parallel alone"
    given = replace(result, partitioner="given")
    assert runners_up(request, [given], best) == ()
    pinned = replace(request, pins={"pp": 2})
    assert runners_up(pinned, [result], best) == ()


def test_what_does_not_fit_says_what_it_lacks() -> None:
    (said,) = reasons(BEST, heavier(BEST, 1, 1e12))
    assert said.startswith("does not fit: 9")


def test_among_equals_less_traffic_then_less_memory_comes_first() -> None:
    chatty = heavier(BEST, 1, -1e9, link_bytes={"dp": 2e9})
    lean = heavier(BEST, 2, -1e6)
    order = sorted(
        [chatty, BEST, lean], key=lambda found: preference(found, "throughput")
    )
    assert order == [lean, BEST, chatty]
    # The last bits of a sum do not decide.
    noise = priced(BEST, 3, step_time_s=1.0 + 1e-15, link_bytes={"dp": 0.0})
    assert min([BEST, noise], key=lambda c: preference(c, "throughput")) is noise
