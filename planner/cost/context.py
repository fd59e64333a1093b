"""Everything that the strategies of one request have in common."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cluster import AxisLevel, Cluster
from planner.cluster.levels import axis_groups
from planner.cluster.network import network_of
from planner.cost.constants import Calibration, DeviceConstants, constants_of
from planner.cost.evidence import Place, Risk
from planner.cost.kept_columns import KeptColumns
from planner.cost.kernels.low_precision import gathered_share
from planner.cost.optimizer_states import mean_state_bytes
from planner.cost.recipes import RECIPES, Recipe
from planner.cost.shared_facts import SharedFacts
from planner.cost.traffic.collectives import (
    Groups,
    LayerLines,
    LinkShares,
    ReplicaGroups,
    layer_lines,
    lines_of,
    replica_groups,
)
from planner.cost.traffic.tables import reached_network, table_lines
from planner.graph import Fusion, ModelGraph
from planner.schema import Optimizer, Precision
from planner.schema.cluster import DeviceType
from planner.simulate.send_tables import Network
from planner.space.regime import Regime
from planner.space.table import StrategyTable
from planner.units import dtype_bytes

__all__ = [
    "Combinations",
    "PricingContext",
    "ScalarBytes",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combinations:
    """Distinct (tp, cp, ep, microbatch, sequence_parallel). Shapes [combinations].

    Attributes:
        order: Which of several orders of devices the groups lie in, see
            :class:`planner.cost.table.orders.Orders`; None for the only one.
        depth: Equal residual blocks that a copy computes; None for all.
    """

    tp: Index
    cp: Index
    ep: Index
    microbatch: Index
    sequence_parallel: Index
    order: Index | None = None
    depth: Index | None = None

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, chosen: Index) -> Combinations:
        """Return some of the combinations."""
        columns = {one.name: getattr(self, one.name) for one in fields(self)}
        given = {name: column for name, column in columns.items() if column is not None}
        return replace(self, **{name: column[chosen] for name, column in given.items()})

    @property
    def orders(self) -> Index:
        """Order of each, 0 where there is one. Shape [combinations]."""
        return np.zeros_like(self.tp) if self.order is None else self.order

    def strides(
        self,
    ) -> tuple[tuple[Index, Index], tuple[Index, Index], tuple[Index, Index]]:
        """Degree and distance in ranks between neighbours along tp, cp and ep."""
        side_by_side = np.ones_like(self.tp)
        return (
            (self.tp, side_by_side),
            (self.cp, self.tp),
            (self.ep, side_by_side),
        )

    def tp_waits_s(self, ranks: int | Index, core_wait_s: float | Array) -> Array:
        """Seconds that a call of tp waits for cores; 0 where one group has all ranks.

        Args:
            ranks: Devices used.
            core_wait_s: What each hop waits, see :attr:`PricingContext.core_wait_s`.
        """
        among = (self.tp > 1) & (self.tp < ranks)
        return np.where(among, 2 * (self.tp - 1) * core_wait_s, 0.0)


#: Links that are slower than this share of those inside a host lie between hosts.
_BETWEEN_HOSTS = 0.5


class ScalarBytes(NamedTuple):
    """Bytes of a scalar by purpose, and what executors keep beside tensors.

    Attributes:
        stored: Bytes of a parameter; likewise compute, reduce.
        states: Bytes of all optimizer states of a parameter.
        swell: Bytes that the allocator takes for one that is asked for.
        reserve: Bytes of contexts and communicators on a device.
        computed_gradients: Whether :attr:`Recipe.gradients` is ``computed``; likewise
            both_gradients.
        gathers_whole: As :attr:`Recipe.gathers_whole`; likewise keeps_graph.
        all_waiting: Whether receive buffers of every microbatch are held.
        gradients_ahead: As :attr:`Recipe.gradients_ahead`.
        keeps_sent: Whether requests hold what they have sent until the pipeline lets go
            of them: gloo's do.
        shard_share: Share of the shards of weights and gradients that lies on devices,
            1 or, where the host has them, 0.
        own_casts: As :attr:`Recipe.own_casts`.
        own_buckets: Whether gradients of replicas are summed in buckets of our own.
        replicas_alike: Whether replicas hold what the only device of a model does:
            ``replicate`` casts as ``fully_shard`` does.
    """

    stored: float
    compute: float
    reduce: float
    states: float
    swell: float
    reserve: float
    computed_gradients: bool
    both_gradients: bool
    gathers_whole: bool
    all_waiting: bool
    gradients_ahead: bool
    keeps_sent: bool
    keeps_graph: bool
    shard_share: float
    own_casts: bool
    own_buckets: bool
    replicas_alike: bool


@dataclass(frozen=True, kw_only=True)
class PricingContext:
    """Model, machines and training recipe that strategies are priced for.

    Attributes:
        graph: The model.
        cluster: The machines.
        order: Device id of every rank; its length is the number of devices used.
        memory_fraction: Share of a device's memory that a plan may fill.
        regime: Methods of training.
        product_dtype: Of matrix products where it is none of the precisions that can
            be planned, for runs of others; None for the compute dtype.
        calibration: Fitted constants of device types; None for what their documents
            say.
        sum_share: Share of the library's seconds that sums over copies take; below 1
            to see what other algorithms could save.
        risk: What is known of prices by measured runs, and how much uncertainty counts
            against a strategy; None where nothing is known.
        shared: Facts of another context, taken over where they are this one's, too.
    """

    graph: ModelGraph
    cluster: Cluster
    order: Index
    precision: Precision = field(default_factory=Precision)
    optimizer: Optimizer = field(default_factory=Optimizer)
    grad_clip_norm: float | None = None
    recipe: Recipe = RECIPES["torch"]
    memory_fraction: float = 0.9
    regime: Regime = field(default_factory=Regime)
    product_dtype: str | None = None
    calibration: Calibration | None = None
    sum_share: float = 1.0
    risk: Risk | None = None
    shared: SharedFacts | None = field(default=None, repr=False, compare=False)

    @cached_property
    def place(self) -> Place:
        """Facts that the evidence for strategies depends on."""
        hosts = self.cluster.document.hosts
        return Place(
            devices_per_host=max(group.devices_per_host for group in hosts),
            seq_len=self.graph.seq_len,
            compute=self.operand_dtype,
            experts=self.graph.num_experts,
        )

    def cautions(self, table: StrategyTable) -> Array | float:
        """Factors by which the uncertainty of rows counts against them. Shape [n]."""
        if self.risk is None or self.risk.quantile == 0.5:
            return 1.0
        spread = self.risk.evidence.spread(self.recipe.name, table, self.place)
        return self.risk.factor(spread)

    @property
    def activation_dtype(self) -> str:
        """Dtype of activations and of gathered weights: float8 keeps bfloat16."""
        compute = self.precision.compute
        return "bfloat16" if compute == "float8" else compute

    @property
    def element_ratio(self) -> float:
        """Bytes of an activation over what it had in the trace."""
        return dtype_bytes(self.activation_dtype) / dtype_bytes(self.graph.dtype)

    @property
    def fusion(self) -> Fusion:
        """Ops that are one kernel; blocks that are compiled fuse theirs."""
        compiled = self.regime.compile and self.recipe.fusion == "none"
        return "compiled" if compiled else self.recipe.fusion

    @property
    def operand_dtype(self) -> str:
        """Dtype of matrix products."""
        return self.product_dtype or self.precision.compute

    @property
    def gathered_share(self) -> tuple[float, float]:
        """Share of bfloat16's bytes that tp gathers for low precision, each way."""
        return gathered_share(
            self.operand_dtype, before=self.recipe.low_precision_gathers
        )

    @cached_property
    def scalar_bytes(self) -> ScalarBytes:
        """Bytes of a scalar by purpose."""
        precision, optimizer, recipe = self.precision, self.optimizer, self.recipe
        states = mean_state_bytes(optimizer, self.graph)
        return ScalarBytes(
            stored=float(dtype_bytes(precision.parameter)),
            compute=float(dtype_bytes(self.activation_dtype)),
            reduce=float(dtype_bytes(precision.reduce)),
            states=float(states) if self.regime.offload.states == "none" else 0.0,
            swell=1.0 + recipe.fragmentation if self.on_gpu else 1.0,
            reserve=float(recipe.reserve_bytes) if self.on_gpu else 0.0,
            computed_gradients=recipe.gradients == "computed",
            both_gradients=recipe.gradients == "both",
            gathers_whole=recipe.gathers_whole,
            all_waiting=recipe.receive_buffers == "all",
            gradients_ahead=recipe.gradients_ahead,
            keeps_sent=not self.on_gpu,
            keeps_graph=recipe.keeps_graph,
            shard_share=float(self.regime.offload.states != "parameters"),
            own_casts=recipe.own_casts,
            own_buckets=self.sums_by_table
            or not isinstance(self.regime.gradient_compression, str),
            replicas_alike=self.activation_dtype != precision.parameter
            and not self.regime.synchronisation.apart,
        )

    @cached_property
    def facts(self) -> SharedFacts:
        """Facts that contexts with other orders of devices share with this one."""
        graph, cluster, recipe = self.graph, self.cluster, self.recipe
        own = SharedFacts(
            graph=graph,
            cluster=cluster,
            compute=self.precision.compute,
            loss_parallel=recipe.loss_parallel or self.regime.loss_chunks > 1,
            experts_on_shards=recipe.experts_on_shards,
            fusion=self.fusion,
            fused_loss=recipe.fused_loss,
            loss_chunks=self.regime.loss_chunks,
        )
        other = self.shared
        if other is None or other.graph is not graph or other.cluster is not cluster:
            return own
        names = {one.name for one in fields(own)} - {"graph", "cluster"}
        kept = all(getattr(other, name) == getattr(own, name) for name in names)
        return other if kept else own

    @property
    def on_gpu(self) -> bool:
        """True where compute and communication run beside each other, and a context and
        an allocator take memory: everywhere but on CPU processes.
        """
        return self.facts.on_gpu

    @cached_property
    def ranks(self) -> tuple[int, ...] | None:
        """Device ids as cluster methods take them: None where ranks are devices."""
        if np.array_equal(self.order, np.arange(self.cluster.num_devices)):
            return None
        return tuple(self.order.tolist())

    @cached_property
    def _device_types(self) -> Index:
        return np.asarray(self.cluster.type_index)[self.order]

    def recalibrated(self, calibration: Calibration, recipe: Recipe) -> PricingContext:
        """Return the context under other constants, with the facts it still has."""
        return replace(self, calibration=calibration, recipe=recipe, shared=self.facts)

    def reordered(self, order: Index) -> PricingContext:
        """Return the context with another order of devices, or on other devices."""
        made = replace(self, order=order, shared=self.facts)
        # Recipe and calibration are the same.
        vars(made).update(_constants=self._constants, link_shares=self.link_shares)
        if len(self.regime.synchronisation.widths) == 1:
            # Else the pace of some types depends on which devices are used.
            vars(made).update(kept_columns=self.kept_columns)
        return made

    @cached_property
    def kept_columns(self) -> dict[str, KeptColumns]:
        """Prices that depend on nothing but degrees, by who works them out."""
        return {}

    @cached_property
    def _by_pp(self) -> dict[int, tuple[Index, Array]]:
        return {}

    def _of_ranks(self, pp: int) -> tuple[Index, Array]:
        if pp not in self._by_pp:
            self._by_pp[pp] = self.types_and_limits(self.order.reshape(pp, -1))
            for found in self._by_pp[pp]:
                found.setflags(write=False)
        return self._by_pp[pp]

    def types_of_ranks(self, pp: int) -> Index:
        """Slowest device type among the devices of each pp rank. Shape [pp]."""
        return self._of_ranks(pp)[0]

    def paces(self, waiting: Collection[int]) -> Index:
        """Device type at whose pace the devices of each type compute. Shape [types].

        Args:
            waiting: Ranks that compute nothing; types that no other rank has keep the
                pace of the slowest that compute.
        """
        kinds = self._device_types
        busy = np.delete(kinds, [rank for rank in waiting if rank < len(kinds)])
        found = np.arange(len(self.cluster.device_types))
        if len(busy):
            slowest = busy[self.facts.speed[busy].argmin()]
            found[np.setdiff1d(kinds, busy)] = slowest
        return found

    def limits_of_ranks(self, pp: int) -> Array:
        """Bytes that a device of each pp rank may use, the smallest counts. [pp]."""
        return self._of_ranks(pp)[1]

    def types_and_limits(self, ids: Index) -> tuple[Index, Array]:
        """Slowest device type, and least bytes that may be used, among some devices.

        Args:
            ids: Devices of the cluster. Shape [..., devices].
        Returns:
            Shapes [...] each.
        """
        kinds = np.asarray(self.cluster.type_index)[ids]
        slowest = self.facts.speed[kinds].argmin(axis=-1)
        types = np.take_along_axis(kinds, slowest[..., None], axis=-1)[..., 0]
        limits = self.facts.memory_bytes[kinds].min(axis=-1) * self.memory_fraction
        return types, np.asarray(limits)

    def types_and_limits_of_runs(
        self, ids: Index, starts: Index
    ) -> tuple[Index, Array]:
        """Slowest type and least bytes of many runs of devices side by side.

        Args:
            ids: Devices of the cluster. Shape [devices].
            starts: First of each run; it ends where the next starts. Shape [runs].
        Returns:
            Shapes [runs] each.
        """
        kinds = np.asarray(self.cluster.type_index)[ids]
        # The first of the slowest, as argmin has it.
        rank = np.unique(self.facts.speed, return_inverse=True)[1].reshape(-1)
        keyed = rank[kinds] * len(ids) + np.arange(len(ids))
        types = kinds[np.minimum.reduceat(keyed, starts) % len(ids)]
        limits = np.minimum.reduceat(self.facts.memory_bytes[kinds], starts)
        return types, np.asarray(limits * self.memory_fraction)

    def constants(self, device: DeviceType) -> DeviceConstants:
        """Shares of its datasheet that a device type reaches."""
        for known, found in self._constants:
            if known is device:
                return found
        found = constants_of(device, self.recipe, self.calibration)
        self._constants.append((device, found))
        return found

    @cached_property
    def _constants(self) -> list[tuple[DeviceType, DeviceConstants]]:
        return []

    @cached_property
    def link_shares(self) -> LinkShares:
        """Shares of links that are reached; the lowest device's count."""
        fastest = max(g.link.bandwidth_bytes_per_s for g in self.cluster.document.hosts)
        constants = [self.constants(device) for device in self.cluster.device_types]
        return LinkShares(
            between_hosts=fastest * _BETWEEN_HOSTS,
            inside=min(one.link_efficiency for one in constants),
            outside=min(one.network_efficiency for one in constants),
            partial_rails=self.recipe.partial_rails,
            lone_factor=float(self.cluster.topology.lone_factor.min()),
        )

    @property
    def sums_by_table(self) -> bool:
        """True if messages of our own sum the gradients of plain replicas."""
        return self.regime.communication.replicas.algorithm != "library"

    @property
    def rings(self) -> bool:
        """True if collectives go as NCCL's do, see :attr:`Groups.rings`."""
        return self.calibration is not None and self.on_gpu

    @property
    def slowest_device(self) -> DeviceType:
        """Slowest type of all devices used."""
        return self.cluster.device_types[int(self.types_of_ranks(1)[0])]

    def total_peak_flops_per_s(self) -> float:
        """Summed over the devices used, in the compute dtype."""
        return float(self.facts.speed[self._device_types].sum())

    def groups(
        self, degree: Index, stride: Index, which: Index | None = None
    ) -> Groups:
        """Communication groups of (degree, stride) pairs.

        Args:
            degree: Ranks of each group. Shape [distinct].
            stride: Distance in ranks between its neighbours. Shape [distinct].
            which: Pair of each strategy; one strategy a pair if None. Shape [n].
        """
        pairs = zip(degree.tolist(), stride.tolist(), strict=True)
        levels = [self.cluster.axis_levels(*pair, self.ranks) for pair in pairs]
        found = Groups.from_levels(levels, which, rings=self.rings)
        return self.link_shares.of_groups(found, stride)

    def layer_lines(self, combos: Combinations) -> LayerLines:
        """Lines of the collectives inside layers, of every combination."""
        strides = combos.strides()
        wait_s = combos.tp_waits_s(len(self.order), self.core_wait_s)
        tp, cp, ep = (self.groups(degree, stride) for degree, stride in strides)
        known = self.cluster.document.collectives
        return layer_lines(tp, cp, ep, self.recipe, measured=known, tp_wait_s=wait_s)

    @cached_property
    def _replicas(self) -> dict[tuple[int, ...], ReplicaGroups]:
        return {}

    def replicas(self, pp: int, ways: int, copies: int, tp: int) -> ReplicaGroups:
        """Groups of data parallelism, the same for each of a strategy's pp ranks.

        Args:
            pp: Pipeline degree.
            ways: Devices that share one copy of the weights.
            copies: Devices that hold the same shard.
            tp: Devices between neighbours of the former.
        """
        key = (pp, ways, copies, tp)
        if key not in self._replicas:

            def of_ranks(degree: int, stride: int) -> Groups:
                same = np.zeros(pp, dtype=np.int64)
                return self.groups(np.array([degree]), np.array([stride]), same)

            second = self.regime.communication.shards.second_copy
            self._replicas[key] = replica_groups(
                of_ranks(ways, tp),
                of_ranks(copies, tp * ways),
                self.recipe,
                measured=self.cluster.document.collectives,
                on_gpu=self.on_gpu,
                core_wait_s=self.core_wait_s,
                sum_share=self.sum_share,
                near=of_ranks(second, tp) if second > 1 else None,
            )
            if copies > 1 and self.sums_by_table:
                mirror = self._own_sums(copies, tp * ways)
                self._replicas[key] = replace(self._replicas[key], mirror=mirror)
        return self._replicas[key]

    def _own_sums(self, copies: int, stride: int) -> Array:
        """Lines of sums over replicas by messages of our own. Shape [1, 2, 2].

        The slowest group's, if there are several.
        """
        table = self.regime.communication.replicas.table(copies)
        step_s = self.core_wait_s
        if not self.on_gpu:
            step_s += self.recipe.collective_overhead_s
        found = [
            table_lines(table, reached_network(network, self.link_shares), step_s)
            for network in self.networks(copies, stride)
        ]
        lines = np.array([np.max(found, axis=0)])
        if self.on_gpu:
            lines[:, :, 1] /= self.recipe.replica_efficiency
        return lines

    def networks(self, degree: int, stride: int) -> list[Network]:
        """Networks of all groups of an axis.

        Args:
            degree: Ranks of each group.
            stride: Distance in ranks between its neighbours.
        """
        groups = self.axis_groups(degree, stride)
        return [network_of(self.cluster.topology, group) for group in groups]

    def axis_groups(self, degree: int, stride: int) -> Index:
        """Device ids of all groups of an axis. Shape [groups, degree].

        Args:
            degree: Ranks of each group.
            stride: Distance in ranks between its neighbours.
        """
        return axis_groups(self.order, degree, stride)

    def boundaries(self, pp: int) -> tuple[Array, Array]:
        """Bandwidth and latency after each pp rank, wrapping round. Shapes [pp]."""
        if pp == 1:
            return np.full(1, np.inf), np.zeros(1)
        stride = len(self.order) // pp
        bandwidth, latency = self.cluster.boundary_links(
            pp, stride, self.ranks, wrap=True
        )
        return self.link_shares.reached(bandwidth), latency + self.core_wait_s

    @property
    def core_wait_s(self) -> float:
        """Seconds that a message waits for its receiver to get a core; 0 on GPUs."""
        return self.recipe.core_wait_s if self.core_contention(1)[1] > 1 else 0.0

    def pair_line(self, pp: int) -> tuple[float, float]:
        """Fixed seconds, and seconds per byte, of an all-reduce between two pp ranks.

        Over the slowest of the pipeline's boundaries, whichever the two are.
        """
        bandwidth, latency = self.boundaries(pp)
        slowest = AxisLevel(
            name="pair",
            members=2,
            bandwidth_bytes_per_s=float(bandwidth.min()),
            latency_s=float(latency.max()) - self.core_wait_s,
        )
        pair = Groups.from_levels([(slowest,)])
        lines = lines_of("all_reduce", pair, self.cluster.document.collectives)[0]
        fixed, per_byte = lines[lines[:, 1].argmin()]
        # A ring of two has two hops.
        return float(fixed) + 2 * self.core_wait_s, float(per_byte)

    @property
    def shares_cores(self) -> bool:
        """True if some host has fewer cores than devices."""
        hosts = self.cluster.document.hosts
        return any(group.compute_slots is not None for group in hosts)

    def core_contention(self, pp: int) -> tuple[float, float]:
        """Factors by which CPU processes that share cores slow each other down.

        Returns:
            Factor on the compute of one pp rank, whose devices all compute at the same
            time; and devices per core of the fullest host if every device computes.
            Both 1 where each device has its own cores.
        """
        if not self.shares_cores:
            return 1.0, 1.0
        groups = self.cluster.document.hosts
        slots = np.repeat(
            [group.compute_slots or np.inf for group in groups],
            [group.count for group in groups],
        )
        hosts = np.asarray(self.cluster.host_of_device)[self.order]
        used = np.bincount(hosts, minlength=len(slots))
        within = max(
            float((np.bincount(block, minlength=len(slots)) / slots).max())
            for block in hosts.reshape(pp, -1)
        )
        return max(1.0, within), max(1.0, float((used / slots).max()))
