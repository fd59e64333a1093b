"""Plans get messages of their own for sums where links are unlike, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from planner import Cluster, plan, predict
from planner.api import plan_graph
from planner.errors import NoFeasiblePlanError
from planner.request import PlanOptions
from planner.schema import Plan
from planner.schema.cluster import Link
from tests.cost.made import device, hosts, uniform_graph

_PLAIN = {"pp": 1, "tp": 1, "cp": 1, "dp_shard": 1}


def _plan(cluster: str, **options: object) -> Plan:
    pins = {**_PLAIN, **options.pop("pin", {})}  # type: ignore[dict-item]
    made: Plan = plan(
        "gpt2",
        cluster,
        global_batch=64,
        seq_len=128,
        pin=pins,
        partitioner="exhaustive",
        certify=False,
        **options,  # type: ignore[arg-type]
    )
    return made


def test_regions_apart_sum_by_messages_of_their_own() -> None:
    chosen = _plan("dtfm-5")
    library = _plan("dtfm-5", pin={"replicas": "library"})
    assert chosen.strategy.communication.replicas.algorithm != "library"
    assert library.strategy.communication.replicas.algorithm == "library"
    assert chosen.prediction.step_time_s < 0.9 * library.prediction.step_time_s
    assert "sums" in chosen.strategy.label()
    assert not chosen.not_runnable


def test_its_price_is_the_one_that_predict_gives() -> None:
    chosen = _plan("dtfm-5")
    again = predict(
        "gpt2", "dtfm-5", chosen.strategy, global_batch=64, seq_len=128
    ).prediction
    assert again.step_time_s == pytest.approx(chosen.prediction.step_time_s)
    table = chosen.strategy.communication.replicas.table(64)
    gradients = 4 * 124_439_808
    sent = max(table.bytes_sent(gradients))
    assert again.collective_bytes["send"] == pytest.approx(sent)
    assert "all_reduce" not in again.collective_bytes


@pytest.mark.parametrize("cluster", ["dgx-a100:1", "dgx-h100:2"])
def test_equal_links_are_left_to_the_library(cluster: str) -> None:
    chosen = _plan(cluster)
    library = _plan(cluster, pin={"replicas": "library"})
    assert chosen.strategy == library.strategy
    assert chosen.prediction == library.prediction


def test_launchers_that_cannot_say_it_keep_the_library() -> None:
    made = _plan("dtfm-5", target="accelerate")
    assert made.strategy.communication.replicas.algorithm == "library"


@pytest.mark.parametrize("name", ["ring", "halving", "direct", "tree"])
def test_a_pin_says_which(name: str) -> None:
    made = _plan("local:4", pin={"replicas": name})
    assert made.strategy.communication.replicas.algorithm == name


def _unlike(samples: int, **options: Any) -> Plan:
    """Plan for four hosts of two devices, of which one has a slow interface."""
    made = hosts((4, 2, device())).document
    (alike,) = made.hosts
    groups = tuple(
        alike.model_copy(
            update={
                "name": f"host{index}",
                "count": 1,
                "nic": Link(bandwidth_bytes_per_s=rate, latency_s=0.0),
            }
        )
        for index, rate in enumerate((2.5e8, 2e9, 2e9, 2e9))
    )
    cluster = Cluster.from_document(made.model_copy(update={"hosts": groups}))
    pin = {**_PLAIN, "recompute": "none", "microbatch_size": samples // 8}
    asked = PlanOptions(global_batch=samples, pin=pin, seed=0, **options)
    return plan_graph(uniform_graph(16), cluster, asked)


def test_sums_that_backward_leaves_go_on_beside_the_next_forward() -> None:
    chosen = _unlike(512)
    assert chosen.strategy.communication.replicas.algorithm != "library"
    assert chosen.strategy.communication.buckets == "needed"
    assert not chosen.not_runnable


@pytest.mark.parametrize(
    ("samples", "options"), [(8, {}), (512, {"grad_clip_norm": 1.0})]
)
def test_sums_are_waited_for_where_a_forward_hides_little_or_nothing(
    samples: int, options: dict[str, Any]
) -> None:
    chosen = _unlike(samples, **options)
    assert chosen.strategy.communication.replicas.algorithm != "library"
    assert chosen.strategy.communication.buckets == "filled"


def test_a_pin_without_plain_replicas_is_refused() -> None:
    with pytest.raises(NoFeasiblePlanError, match="messages of our own sum"):
        _plan("local:4", pin={"replicas": "ring", "dp_shard": 4})
