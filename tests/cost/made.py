"""Models and clusters small enough to check by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from planner.capture import capture, load_model
from planner.cluster import Cluster
from planner.cost import Cost, CostModel, PricingContext
from planner.cost.result import PARTS
from planner.graph import Block, Edge, Kernel, ModelGraph, Parameter
from planner.schema.cluster import (
    ClusterDocument,
    DeviceType,
    HostGroup,
    Level,
    Link,
    MeasuredCollective,
)
from planner.search import Request
from planner.space import StrategyTable, build_strategy

__all__ = [
    "device",
    "hosts",
    "price_both_ways",
    "real_graph",
    "request_for",
    "row",
    "setting_for",
    "table_of",
    "uniform_graph",
]

TOKENS, HIDDEN = 1024, 512


def device(name: str = "gpu", **changes: Any) -> DeviceType:
    """A device of round numbers: 100 TFLOP/s, 1 TB/s, no overhead, no ramp."""
    numbers: dict[str, Any] = {
        "name": name,
        "peak_flops_per_s": {"float32": 5e13, "bfloat16": 1e14},
        "memory_bytes": 80e9,
        "memory_bandwidth_bytes_per_s": 1e12,
        "matmul_efficiency": 1.0,
        "half_efficiency_flops": 0.0,
        "kernel_overhead_s": 0.0,
        "source": "made up for tests",
    }
    return DeviceType(**{**numbers, **changes})


def hosts(
    *groups: tuple[int, int, DeviceType],
    inside: float = 1e11,
    between: float = 1e10,
    latency: float = 0.0,
    slots: float | None = None,
    collectives: tuple[MeasuredCollective, ...] = (),
) -> Cluster:
    """Hosts of (count, devices in each, type) under one switch."""
    link = Link(bandwidth_bytes_per_s=inside, latency_s=latency)
    types = {kind.name: kind for _, _, kind in groups}
    return Cluster.from_document(
        ClusterDocument(
            name="made",
            device_types=tuple(types.values()),
            hosts=tuple(
                HostGroup(
                    name=f"host{index}",
                    count=count,
                    devices_per_host=each,
                    device=kind.name,
                    link=link,
                    compute_slots=slots,
                )
                for index, (count, each, kind) in enumerate(groups)
            ),
            levels=(
                Level(
                    name="network",
                    link=Link(bandwidth_bytes_per_s=between, latency_s=latency),
                ),
            ),
            collectives=collectives,
        )
    )


def _block(index: int, **changes: Any) -> Block:
    flops = 2.0 * TOKENS * HIDDEN * HIDDEN
    product: dict[str, Any] = {
        "kind": "matmul",
        "m": TOKENS,
        "n": HIDDEN,
        "k": HIDDEN,
        "forward_flops": flops,
        "backward_flops": 2 * flops,
        "forward_bytes": 4.0 * TOKENS * HIDDEN,
        "backward_bytes": 8.0 * TOKENS * HIDDEN,
        "weight_bytes": 2.0 * HIDDEN * HIDDEN,
    }
    stream = 2.0 * TOKENS * HIDDEN
    fields: dict[str, Any] = {
        "index": index,
        "name": f"layers.{index}",
        "layer": f"layers.{index}",
        "kind": "mlp",
        "repeat": "same",
        "forward_flops": 2 * flops,
        "backward_flops": 4 * flops,
        "parameter_count": 2 * HIDDEN * HIDDEN,
        "parameter_bytes": 4.0 * HIDDEN * HIDDEN,
        "saved_bytes": 6 * stream,
        "saved_tensor_bytes": 4 * stream,
        "saved_selective_bytes": 3 * stream,
        "saved_selective_tensor_bytes": 2 * stream,
        "boundary_bytes": stream,
        "transient_bytes": stream / 2,
        "kernels": (
            Kernel(**product, style="colwise"),
            Kernel(**product, style="rowwise"),
            Kernel(kind="memory", forward_bytes=stream, backward_bytes=stream),
        ),
        "tp_collectives": 1,
        "tp_collective_bytes": stream,
    }
    return Block(**{**fields, **changes})


def uniform_graph(
    units: int = 8, *, seq_len: int | None = TOKENS, **changes: Any
) -> ModelGraph:
    """``units`` equal layers of two products of 512 x 512, 1,024 tokens a sample."""
    fields = {
        key: changes.pop(key)
        for key in ("batch", "dtype", "num_experts", "tp_dims", "sharding")
        if key in changes
    }
    defaults: dict[str, Any] = {
        "batch": 1,
        "dtype": "bfloat16",
        "tp_dims": {"features": HIDDEN},
        "sharding": {"layers.*.up": "colwise", "layers.*.down": "rowwise"},
    }
    return ModelGraph(
        name="uniform",
        seq_len=seq_len,
        inputs=(("x", (1, TOKENS, HIDDEN), "bfloat16", None),),
        blocks=tuple(_block(index, **changes) for index in range(units)),
        edges=tuple(
            Edge(
                source=index,
                target=index + 1,
                tensors=(((1, TOKENS, HIDDEN), "bfloat16"),),
                bytes=2.0 * TOKENS * HIDDEN,
            )
            for index in range(units - 1)
        ),
        parameters=tuple(
            Parameter(
                name=f"layers.{index}.{name}.weight",
                shape=(HIDDEN, HIDDEN),
                dtype="bfloat16",
                block=index,
                style=style,
            )
            for index in range(units)
            for name, style in (("up", "colwise"), ("down", "rowwise"))
        ),
        config={"loss": "mean_square"},
        **{**defaults, **fields},
    )


@cache
def real_graph(name: str) -> ModelGraph:
    """A model that people train, read once a process."""
    return capture(load_model(name))


def setting_for(graph: ModelGraph, cluster: Cluster, **changes: Any) -> PricingContext:
    """Return a pricing context with every free device."""
    order = np.asarray(cluster.free, dtype=np.int64)
    return PricingContext(graph=graph, cluster=cluster, order=order, **changes)


def request_for(
    graph: ModelGraph, cluster: Cluster, global_batch: int, **changes: Any
) -> Request:
    """A request; fields of :class:`PricingContext` and :class:`Request` in one list."""
    names = {"precision", "optimizer", "grad_clip_norm", "recipe", "memory_fraction"}
    names.add("regime")
    of_setting = {key: changes.pop(key) for key in names & set(changes)}
    context = setting_for(graph, cluster, **of_setting)
    return Request(context=context, global_batch=global_batch, **changes)


def row(**changes: int) -> dict[str, int]:
    """A row of the table: one device, one microbatch, unless changed."""
    names = StrategyTable.__dataclass_fields__
    zeros = {"zero_stage", "schedule", "recompute", "sequence_parallel"}
    return {name: changes.get(name, 0 if name in zeros else 1) for name in names}


def table_of(*rows: dict[str, int]) -> StrategyTable:
    """A table of rows."""
    return StrategyTable.from_columns(**{k: [r[k] for r in rows] for k in rows[0]})


def price_both_ways(
    context: PricingContext, **degrees: int
) -> tuple[Cost, dict[str, float], float]:
    """One strategy by simulation, then its row of a table by parts and memory."""
    values = row(**degrees)
    stages, units = values["pp"] * values["virtual_stages"], len(context.graph.units)
    strategy = build_strategy(
        values,
        unit_names=context.graph.unit_names,
        bounds=[units * stage // stages for stage in range(stages + 1)],
        sharding=context.graph.sharding,
        precision=context.precision,
        regime=context.regime,
    )
    model = CostModel(context)
    table = model.table(table_of(values))
    parts = dict(zip(PARTS, table.parts_s[0].tolist(), strict=True))
    return model.cost(strategy), parts, float(table.memory_bytes[0])
