"""Worlds that are read in no time: small models on small machines."""

from __future__ import annotations

from typing import Any

from envs.partition.world import World
from planner.cluster import Cluster
from planner.schema.cluster import DeviceType
from tests.cost.made import device, hosts

__all__ = ["TINY", "slow_device", "small_world", "uneven_machines"]

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def slow_device(**changes: Any) -> DeviceType:
    """A device of two fifths of the speed and half of the memory."""
    peaks = {"float32": 2e13, "bfloat16": 4e13}
    return device(
        "slow", **{"memory_bytes": 40e9, "peak_flops_per_s": peaks, **changes}
    )


def uneven_machines(**changes: Any) -> Cluster:
    """Hosts of 4, 4, 2 and 3 devices, those of the third slow."""
    quick = device("quick", **changes)
    slow = slow_device(**changes)
    return hosts((2, 4, quick), (1, 2, slow), (1, 3, quick), latency=1e-5)


def small_world(**changes: Any) -> World:
    """Four layers on 13 devices of four hosts."""
    fields: dict[str, Any] = {
        "name": "small",
        "model": TINY,
        "seq_len": 32,
        "cluster": uneven_machines().document,
        "global_batch": 24,
    }
    return World(**{**fields, **changes})
