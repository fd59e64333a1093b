"""Sets of devices to choose from where some have no bfloat16."""

from __future__ import annotations

from typing import Any

import pytest

from planner import Cluster, Plan, plan
from planner.cluster import device_type
from planner.schema import Precision
from planner.schema.cluster import ClusterDocument

_MODEL = {
    "model_type": "gpt2",
    "n_embd": 512,
    "n_layer": 8,
    "n_head": 8,
    "vocab_size": 4096,
}


def _mixed(*hosts: tuple[str, int]) -> Cluster:
    """Hosts of GPU types on one switch, slow beside NVLink."""
    link = {"name": "NVLink", "bandwidth_bytes_per_s": 3e11, "latency_s": 2e-6}
    switch = {"name": "switch", "bandwidth_bytes_per_s": 3e9, "latency_s": 2e-5}
    return Cluster.from_document(
        ClusterDocument.model_validate(
            {
                "name": "laboratory",
                "device_types": [device_type(kind) for kind, _ in hosts],
                "hosts": [
                    {
                        "name": kind,
                        "device": kind,
                        "count": 1,
                        "devices_per_host": count,
                        "link": link,
                    }
                    for kind, count in hosts
                ],
                "levels": [{"name": "switch", "link": switch}],
            }
        )
    )


def _planned(cluster: Cluster, precision: Precision | None = None, **more: Any) -> Plan:
    return plan(
        _MODEL,
        cluster,
        global_batch=64,
        seq_len=512,
        partitioner="expert",
        precision=precision,
        risk="none",
        **more,
    )


def test_gpus_without_bfloat16_are_left_out_where_that_is_faster() -> None:
    cluster = _mixed(("h100-80", 4), ("v100-16", 2))
    chosen = _planned(cluster)
    everyone = _planned(cluster, Precision(compute="float32"))
    assert chosen.strategy.precision.compute == "bfloat16"
    assert set(chosen.strategy.device_ids()) == {0, 1, 2, 3}
    assert chosen.prediction.step_time_s < everyone.prediction.step_time_s
    assert chosen.provenance.idle == {"v100-16": 2}
    (told,) = [one for one in chosen.provenance.device_sets if one.compute == "float32"]
    assert told.step_time_s == everyone.prediction.step_time_s
    assert told.label == everyone.strategy.label()


def test_a_plan_names_its_idle_devices_and_their_price() -> None:
    chosen = _planned(_mixed(("h100-80", 4), ("v100-16", 2)))
    (line,) = [
        line for line in chosen.summary().splitlines() if line.startswith("idle")
    ]
    assert line.split(None, 1)[1].startswith("2 v100-16; with them in float32 a step")


def test_what_idle_devices_would_cost_is_told_of_plans_that_use_them() -> None:
    """One GPU wins in every dtype here; none of those plans is one "with them"."""
    cluster = _mixed(("h100-80", 1), ("a100-80", 3), ("v100-16", 4))
    chosen = plan(
        _MODEL,
        cluster,
        global_batch=64,
        seq_len=512,
        devices="any",
        partitioner="exhaustive",
        evaluation_budget=12,
    )
    assert chosen.strategy.mesh.num_devices == 1
    every, *others = chosen.provenance.device_sets
    # The four that have bfloat16.
    assert every.compute == "bfloat16"
    assert sum(every.devices.values()) == 4
    assert [sum(one.devices.values()) for one in others] == [1, 1]
    lines = chosen.summary().splitlines()
    (idle,) = [line for line in lines if line.startswith("idle")]
    (dtype,) = [line for line in lines if line.startswith("dtype")]
    assert "with them" not in idle
    assert idle.count("times as long") == 1
    assert dtype.count("; on 1 ") == 2


def test_idle_devices_have_a_price_where_the_search_priced_no_plan_with_them() -> None:
    chosen = plan(
        _MODEL,
        _mixed(("h100-80", 1), ("a100-80", 4)),
        global_batch=64,
        seq_len=512,
        devices="any",
        partitioner="learned",
        evaluation_budget=12,
    )
    assert sum(chosen.provenance.idle.values()) == 4
    (every,) = chosen.provenance.device_sets
    assert every.devices == {"h100-80": 1, "a100-80": 4}
    assert every.step_time_s is not None
    assert every.step_time_s > chosen.prediction.step_time_s


def test_a_plan_is_for_the_whole_cluster_whatever_it_leaves_idle() -> None:
    cluster = _mixed(("h100-80", 4), ("v100-16", 2))
    assert _planned(cluster).cluster == cluster.reference()


def test_a_dtype_that_is_asked_for_is_kept() -> None:
    cluster = _mixed(("h100-80", 4), ("v100-16", 2))
    chosen = _planned(cluster, Precision(compute="float32"))
    assert chosen.strategy.precision.compute == "float32"
    assert all(one.compute == "float32" for one in chosen.provenance.device_sets)


def test_all_work_in_float16_where_no_device_has_bfloat16() -> None:
    cluster = _mixed(("v100-16", 4))
    chosen = _planned(cluster)
    assert chosen.strategy.precision.compute == "float16"
    assert chosen.not_runnable == ()
    assert chosen.provenance.idle == {}
    # What is the default is the same when it is pinned.
    pinned = _planned(cluster, pin={"asynchrony": "flushed"})
    assert pinned.strategy == chosen.strategy
    gossip = _planned(cluster, pin={"synchronisation": "gossip"})
    assert gossip.strategy.precision.compute == "float32"


@pytest.mark.parametrize(
    ("target", "computes"),
    [("meshwright", {"float32", "bfloat16", "float16"}), ("torchtitan", None)],
)
def test_float16_is_for_executors_that_scale_the_loss(
    target: str, computes: set[str] | None
) -> None:
    chosen = _planned(_mixed(("h100-80", 4), ("v100-16", 2)), target=target)
    seen = {one.compute for one in chosen.provenance.device_sets}
    seen.add(chosen.strategy.precision.compute)
    assert seen == (computes or {"float32", "bfloat16"})


def test_devices_with_bfloat16_give_one_answer() -> None:
    chosen = _planned(_mixed(("h100-80", 2), ("a100-40", 2)))
    assert chosen.strategy.precision.compute == "bfloat16"
    assert {one.compute for one in chosen.provenance.device_sets} <= {"bfloat16"}
