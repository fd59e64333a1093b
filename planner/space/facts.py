"""Facts of a model, a cluster and a request that the rules look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from planner.cluster import Cluster
from planner.graph import ModelGraph
from planner.graph.chains import Chain, find_chain
from planner.graph.chunked_loss import unchunkable
from planner.graph.residual import ResidualBlocks, find_residual_blocks
from planner.schema import Optimizer, Precision, Stage, Strategy
from planner.schema.halo import SpatialLayer
from planner.space.regime import Regime
from planner.targets import layers_of_stages

__all__ = ["OWN_TARGETS", "Facts", "LayerRun", "find_layers", "gather_facts"]

#: Targets that are no launcher: strategies that the executors run, and all legal ones.
OWN_TARGETS = ("meshwright", "any")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """Numbers of units of a model before its layers, in its layers, and after them.

    Attributes:
        before: Number of units before the first layer, such as embeddings.
        layers: Number of units that are layers.
        after: Number of units after the last layer, such as the head.
    """

    before: int
    layers: int
    after: int

    def even_bounds(self, stages: int) -> tuple[int, ...] | None:
        """Return the bounds of stages with equally many layers each.

        Units before the layers are in the first stage, units after them in the last.

        Returns:
            Unit at which each stage starts, then the number of units; None if the
            stages do not divide the layers.
        """
        each, rest = divmod(self.layers, stages)
        if rest or not each:
            return None
        inner = [self.before + each * stage for stage in range(1, stages)]
        return (0, *inner, self.before + self.layers + self.after)


def find_layers(unit_names: Sequence[str]) -> LayerRun | None:
    """Find the layers among a model's units; None if they are not a row of layers."""
    whole = Strategy(stages=(Stage(rank=0, modules=tuple(unit_names)),))
    found = layers_of_stages(whole)
    if found is None or not found[0].layers:
        return None
    stage = found[0]
    return LayerRun(
        before=len(stage.before), layers=len(stage.layers), after=len(stage.after)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of a request that the rules of the space look at.

    Attributes:
        num_devices: Free devices.
        global_batch: Samples per step.
        seq_len: Tokens per sample; None without a sequence.
        num_units: Pipeline units that the model can be cut into.
        uncut: Reason why no pipeline can cut the model; None if one can.
        hooked: Parameter with a hook on its gradient; None if there is none.
        tp_dims: Dimension name to size that tp must divide.
        has_sharding: Whether any module can be split along tp.
        sharding: Pattern of modules to the style of their split.
        whole: Pattern of linear layers that tp cannot split, to the reason.
        whole_stream: Reason why sequence parallelism does not apply; None if it does.
        mixing: Patterns of the layers that tp must split for sequence parallelism.
        batch_norm_values: Fewest values a channel that a batch norm sees in one
            sample; None without batch norms.
        spatial: Convolutions and poolings on shards of samples; empty if ranks cannot
            have shards.
        spatial_sizes: Sizes of a sample that ranks can have shards of; likewise.
        own_loss: Values that the model's own loss is a mean over; ``coupled`` keeps the
            batch whole.
        whole_batch: Reason for that, where it is known.
        num_experts: Experts per layer; 0 without.
        attention: Kind of attention if cp applies; None if it does not.
        tied: Groups of parameter names that are one tensor.
        backend: Communication backend of the slowest device.
        precision: Dtypes of the request.
        optimizer: Optimizer of the request.
        regime: Methods of the request, and whether blocks are compiled.
        grad_clip_norm: Largest gradient norm of the request.
        target: ``meshwright`` allows strategies that the executors can run, ``any`` all
            legal ones, a name of :func:`planner.targets.target_names` those that the
            launcher can express.
        hosts: Runs of equal hosts of the cluster: (number of hosts, devices in each).
        device_types: Device types of the cluster, in its order.
        host_types: Runs of hosts with devices of one type, as in
            :class:`planner.schema.ClusterReference`.
        layers: Units that are layers, for launchers; None if there are none.
        residual_blocks: Equal residual blocks, of which copies may skip some.
        chain: What keeps the units from learning by themselves.
        unchunkable: Reason why the loss cannot be computed in chunks; None if it can.
    """

    num_devices: int
    global_batch: int
    seq_len: int | None
    num_units: int
    uncut: str | None = None
    hooked: str | None = None
    tp_dims: Mapping[str, int] = field(default_factory=dict)
    has_sharding: bool = True
    sharding: Mapping[str, str] = field(default_factory=lambda: {"*": "colwise"})
    whole: Mapping[str, str] = field(default_factory=dict)
    whole_stream: str | None = None
    mixing: tuple[str, ...] = ()
    batch_norm_values: int | None = None
    spatial: tuple[SpatialLayer, ...] = ()
    spatial_sizes: tuple[int, ...] = ()
    own_loss: str | None = None
    whole_batch: str = ""
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
    host_types: tuple[tuple[int, str], ...] = ()
    layers: LayerRun | None = None
    residual_blocks: ResidualBlocks = field(default_factory=ResidualBlocks)
    chain: Chain = field(default_factory=Chain)
    unchunkable: str | None = None


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
    """Gather the facts of a request.

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
    # Facts of a cluster for launchers alone are not looked up for other targets.
    machines = None if target in OWN_TARGETS else cluster.reference()
    backends = {device.backend for device in cluster.device_types}
    return Facts(
        num_devices=cluster.num_free,
        global_batch=global_batch,
        seq_len=graph.seq_len,
        num_units=1 if graph.uncut else len(graph.units),
        uncut=graph.uncut,
        hooked=graph.hooked,
        tp_dims=dict(graph.tp_dims),
        has_sharding=any(style != "experts" for style in graph.sharding.values()),
        sharding=dict(graph.sharding),
        whole=dict(graph.whole),
        whole_stream=graph.whole_stream,
        mixing=graph.mixing,
        batch_norm_values=graph.batch_norm_values,
        spatial=graph.spatial,
        spatial_sizes=graph.spatial_sizes,
        own_loss=cast("str | None", graph.config.get("own_loss")),
        whole_batch=graph.whole_batch,
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
        host_types=machines.host_types if machines else (),
        layers=find_layers(graph.unit_names) if machines else None,
        residual_blocks=find_residual_blocks(graph),
        chain=find_chain(graph),
        unchunkable=unchunkable(graph),
    )
