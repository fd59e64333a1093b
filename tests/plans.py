"""Real plans, made once a process: reading a model takes longer than most tests."""

from __future__ import annotations

import functools
from pathlib import Path

from planner import Cluster, plan
from planner.capture import capture, load_model
from planner.graph import ModelGraph
from planner.schema import Optimizer, Plan, Precision

__all__ = ["TINY", "gpt2_graph", "gpt2_plan", "local_plan", "tiny_graph"]

#: A Llama of 1.6 million parameters, as the README's demo trains.
TINY = Path(__file__).parents[1] / "examples" / "tiny-llama"


@functools.cache
def gpt2_graph() -> ModelGraph:
    return capture(load_model("gpt2", seq_len=128))


@functools.cache
def gpt2_plan(cluster: str = "dgx-a100:1", **pins: int | str) -> Plan:
    return plan(gpt2_graph(), Cluster.parse(cluster), global_batch=64, pin=pins)


@functools.cache
def tiny_graph() -> ModelGraph:
    return capture(load_model(f"hf:{TINY}", seq_len=32), dtype="float32")


@functools.cache
def local_plan(
    processes: int = 2, *, optimizer: Optimizer | None = None, **pins: int | str
) -> Plan:
    """Plan of the tiny Llama on CPU processes of this machine, in float32."""
    return plan(
        tiny_graph(),
        Cluster.detect(processes=processes),
        global_batch=4,
        pin=pins or {"pp": 1},
        precision=Precision(compute="float32"),
        optimizer=optimizer,
    )
