"""Facts of a model, a cluster and a request that the rules compare against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.cluster import Cluster
from planner.graph import ModelGraph
from planner.schema import Optimizer, Precision
from planner.space.layers import LayerRun, find_layers
from planner.space.regime import Regime

__all__ = ["OWN_TARGETS", "Facts", "gather_facts"]

#: Targets that are no launcher: what the executors run, and all that is legal.
OWN_TARGETS = ("meshwright", "any")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The numbers that rules compare against.

    Attributes:
        num_devices: Free devices.
        global_batch: Samples per step.
        seq_len: Tokens per sample; None without a sequence.
        num_units: Pipeline units that the model can be cut into.
        tp_dims: Dimension name to size that tp must divide.
        has_sharding: Whether any module can be split along tp.
        sharding: How, pattern to style.
        whole: Pattern of linear layers that tp cannot split, to why.
        whole_stream: Why sequence parallelism does not apply; None if it does.
        mixing: Patterns of the layers that must be split for it.
        batch_norm_values: Fewest values a channel that a batch norm sees in one
            sample; None without batch norms.
        num_experts: Experts per layer; 0 without.
        attention: Kind of attention that cp would serve; None where it cannot.
        tied: Groups of parameter names that are one tensor.
        backend: Communication backend of the slowest device.
        precision: Dtypes that were asked for.
        optimizer: Optimizer that was asked for.
        regime: Methods that were asked for, and whether blocks are compiled.
        grad_clip_norm: Largest gradient norm that was asked for.
        target: Who will run the plan: ``meshwright`` keeps to what the executors
            can run, ``any`` to what is legal at all, and a name of
            :func:`planner.targets.target_names` to what that launcher can say.
        hosts: Of the cluster, runs of equal ones: (how many, devices in each).
        device_types: Of the cluster, sorted as it names them.
        layers: Which units are layers, for launchers; None where they are none.
    """

    num_devices: int
    global_batch: int
    seq_len: int | None
    num_units: int
    tp_dims: Mapping[str, int] = field(default_factory=dict)
    has_sharding: bool = True
    sharding: Mapping[str, str] = field(default_factory=lambda: {"*": "colwise"})
    whole: Mapping[str, str] = field(default_factory=dict)
    whole_stream: str | None = None
    mixing: tuple[str, ...] = ()
    batch_norm_values: int | None = None
    num_experts: int = 0
    attention: str | None = "causal"
    tied: tuple[tuple[str, ...], ...] = ()
    backend: str = "nccl"
    precision: Precision = field(default_factory=Precision)
    optimizer: Optimizer = field(default_factory=Optimizer)
    regime: Regime = field(default_factory=Regime)
    grad_clip_norm: float | None = None
    target: str = "meshwright"
    hosts: tuple[tuple[int, int], ...] = ()
    device_types: tuple[str, ...] = ()
    layers: LayerRun | None = None


def gather_facts(
    graph: ModelGraph,
    cluster: Cluster,
    *,
    global_batch: int,
    target: str,
    precision: Precision,
    optimizer: Optimizer,
    regime: Regime | None = None,
    grad_clip_norm: float | None = None,
) -> Facts:
    """Facts of a request.

    Args:
        graph: The model.
        cluster: The devices; occupied ones do not count.
        global_batch: Samples per step.
        target: ``meshwright``, ``any`` or a launcher's name; see :class:`Facts`.
        precision: Dtypes.
        optimizer: Optimizer.
        regime: Methods, and whether blocks are compiled; the default if None.
        grad_clip_norm: Largest gradient norm.
    """
    # What only launchers ask of a cluster is not looked up for others.
    machines = None if target in OWN_TARGETS else cluster.reference()
    backends = {device.backend for device in cluster.device_types}
    return Facts(
        num_devices=cluster.num_free,
        global_batch=global_batch,
        seq_len=graph.seq_len,
        num_units=len(graph.units),
        tp_dims=dict(graph.tp_dims),
        has_sharding=any(style != "experts" for style in graph.sharding.values()),
        sharding=dict(graph.sharding),
        whole=dict(graph.whole),
        whole_stream=graph.whole_stream,
        mixing=graph.mixing,
        batch_norm_values=graph.batch_norm_values,
        num_experts=graph.num_experts,
        attention=graph.attention,
        tied=tuple(
            (parameter.name, *parameter.aliases)
            for parameter in graph.parameters
            if parameter.aliases
        ),
        backend="gloo" if "gloo" in backends else "nccl",
        precision=precision,
        optimizer=optimizer,
        regime=regime or Regime(),
        grad_clip_norm=grad_clip_norm,
        target=target,
        hosts=machines.hosts if machines else (),
        device_types=tuple(machines.device_types) if machines else (),
        layers=find_layers(graph.unit_names) if machines else None,
    )
