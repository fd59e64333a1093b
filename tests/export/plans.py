"""Plans written down by hand: what is exported of them changes with exporters alone.

``PLANS`` is the set that golden files and the parsers of other launchers are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.schema import (
    ClusterReference,
    InputSpec,
    Mesh,
    ModelReference,
    Plan,
    Precision,
    Prediction,
    Provenance,
    Stage,
    StageMemory,
    Strategy,
    TensorSharding,
    Workload,
)

__all__ = ["HOSTILE", "LLAMA", "MIXED", "PLANS", "make_plan", "named", "on"]

#: What a shell, YAML, Python or Kubernetes would misread.
HOSTILE = (
    'ev\'il "$(touch pwned)" `id` ; rm -rf *\n#SBATCH --uid=0\n- {a: &b !!x} %s é\\'
)

#: Blocks of a Llama of 32 layers, in order.
LLAMA = (
    "model.embed_tokens",
    *(f"model.layers.{index}" for index in range(32)),
    "model.norm",
    "lm_head",
)

_PATTERNS = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


def _stages(strategy: Mapping[str, Any], layers: tuple[int, ...] | None) -> Any:
    """All blocks, cut after as many layers as are given, evenly if none are."""
    mesh = strategy.get("mesh", Mesh())
    count = mesh.pp * strategy.get("virtual_stages", 1)
    layers = layers or (32 // count,) * count
    bare = Strategy(**strategy)
    stages, first = [], 0
    for index, many in enumerate(layers):
        blocks = list(LLAMA[1 + first : 1 + first + many])
        first += many
        if index == 0:
            blocks.insert(0, LLAMA[0])
        if index == count - 1:
            blocks += LLAMA[-2:]
        stages.append(
            Stage(
                rank=bare.rank_of_stage(index),
                modules=tuple(blocks),
                recompute=strategy.get("recompute", "none"),
            )
        )
    return tuple(stages)


def make_plan(
    hosts: tuple[tuple[int, int], ...] = ((1, 8),),
    device: str = "h100-80",
    *,
    recompute: str = "none",
    layers: tuple[int, ...] | None = None,
    name: str = "llama3-8b",
    **strategy: Any,
) -> Plan:
    """A plan of a Llama with 32 layers.

    Args:
        hosts: Runs of equal hosts: (how many, devices in each).
        device: Type of all devices.
        recompute: Of all stages.
        layers: Layers of each virtual stage; equally many by default.
        name: Of the model.
        strategy: Fields of the strategy; ``mesh`` as a mapping.
    """
    strategy = {"microbatch_size": 1, "num_microbatches": 8, **strategy}
    strategy["mesh"] = mesh = Mesh(**strategy.get("mesh", {}))
    if mesh.tp > 1:
        strategy.setdefault("sharding", TensorSharding(patterns=_PATTERNS))
    bare = Strategy(**strategy)
    stages = _stages(strategy, layers)
    stages = tuple(s.model_copy(update={"recompute": recompute}) for s in stages)
    devices = sum(count * size for count, size in hosts)
    return Plan(
        model=ModelReference(
            name=name,
            ref="llama3-8b",
            parameters=8_030_261_248,
            tensors=291,
            fingerprint="0123456789abcdef",
            attention="causal",
            whole_stream=None,
        ),
        cluster=ClusterReference(
            name=f"{device} x {devices}",
            num_devices=devices,
            device_types={device: devices},
            hosts=hosts,
            fingerprint="fedcba9876543210",
        ),
        workload=Workload(
            global_batch=bare.global_batch,
            seq_len=4096,
            inputs=(
                InputSpec(name="input_ids", shape=(4096,), dtype="int64", high=128_256),
            ),
        ),
        strategy=bare.model_copy(update={"stages": stages}),
        prediction=Prediction(
            step_time_s=1.0,
            breakdown_s={"compute": 1.0},
            memory=tuple(_memory(rank, device) for rank in range(mesh.pp)),
            samples_per_s=float(bare.global_batch),
            fidelity="simulated",
        ),
        provenance=Provenance(
            meshwright_version="0.0.0",
            partitioner="by hand",
            objective="throughput",
            seed=0,
            evaluations={},
            memory_fraction=0.9,
        ),
    )


def _memory(rank: int, device: str) -> StageMemory:
    return StageMemory(
        rank=rank,
        device_type=device,
        parameters_bytes=4e9,
        gradients_bytes=4e9,
        optimizer_bytes=8e9,
        activations_bytes=2e10,
        buffers_bytes=1e9,
        reserve_bytes=2e9,
        limit_bytes=8e10,
    )


def named(plan: Plan, name: str) -> Plan:
    """The same plan with other names of model and cluster."""
    return plan.model_copy(
        update={
            "model": plan.model.model_copy(update={"name": name}),
            "cluster": plan.cluster.model_copy(update={"name": name}),
        }
    )


def on(
    plan: Plan, host_types: tuple[tuple[int, str], ...] = (), **device_types: int
) -> Plan:
    """The same plan on devices of other types; ``_`` in a name stands for ``-``.

    ``host_types`` are runs of hosts with devices of one type: (how many, name).
    """
    kinds = {kind.replace("_", "-"): count for kind, count in device_types.items()}
    update = {"device_types": kinds, "host_types": host_types}
    cluster = plan.cluster.model_copy(update=update)
    return plan.model_copy(update={"cluster": cluster})


#: Each shows one thing that launchers say in their own way.
PLANS: dict[str, Plan] = {
    "replicas": make_plan(
        mesh={"dp_replicate": 8}, precision=Precision(compute="float32")
    ),
    "zero3": make_plan(((2, 8),), mesh={"dp_shard": 16}, zero_stage=3),
    "hybrid": make_plan(
        ((2, 8),), mesh={"dp_replicate": 2, "dp_shard": 8}, zero_stage=3
    ),
    "tensor": make_plan(mesh={"tp": 8}, recompute="full", grad_clip_norm=1.0),
    "pipeline": make_plan(
        ((4, 8),),
        mesh={"pp": 4, "dp_shard": 2, "tp": 4},
        zero_stage=1,
        schedule="1F1B",
        num_microbatches=16,
    ),
    "uneven": make_plan(
        mesh={"pp": 4, "tp": 2}, schedule="1F1B", layers=(7, 9, 9, 7), recompute="full"
    ),
    "interleaved": make_plan(
        mesh={"pp": 4, "dp_shard": 2},
        zero_stage=1,
        schedule="Interleaved1F1B",
        virtual_stages=2,
    ),
    "context": make_plan(
        mesh={"dp_shard": 4, "cp": 2}, zero_stage=3, context_algorithm="ring"
    ),
}

#: Hosts of two types, one of them between two of the other; ranks begin on the H100s.
MIXED = on(
    make_plan(
        ((4, 8),),
        mesh={"pp": 4, "dp_shard": 8},
        schedule="1F1B",
        device_ranges=((16, 24), (0, 16), (24, 32)),
    ),
    ((2, "a100-80"), (1, "h100-80"), (1, "a100-80")),
    a100_80=24,
    h100_80=8,
)
