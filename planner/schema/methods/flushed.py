"""Pipelines that are through with all microbatches before weights are updated."""

from __future__ import annotations

from typing import Literal

from planner.schema.methods.method import Asynchrony, Method

__all__ = ["METHODS", "Flushed"]


class Flushed(Asynchrony):
    """All microbatches of a step are through before the weights are updated."""

    kind: Literal["flushed"] = "flushed"


METHODS = (
    Method(
        kind="flushed",
        slot="asynchrony",
        document=Flushed,
        default=True,
        prices="planner.cost.pipelines.flushed:with_a_flush",
        runs="executors.replicas.flushed:with_a_flush",
        page="methods/asynchronous.md",
        test="tests/distributed/test_composition.py",
        source="torch.distributed.pipelining, torch 2.13",
    ),
)
