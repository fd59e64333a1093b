"""Limits of a launcher on cuts and devices, which rows of the table do not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.schema import Mesh, Stage, Strategy
from planner.space import LayerRun
from planner.targets import Case, Target, Violation

__all__ = ["LauncherLimits", "rank_ranges"]

Index = NDArray[np.int64]


def rank_ranges(order: Index) -> tuple[tuple[int, int], ...]:
    """Device ids by rank as half-open ranges; empty if ranks are devices."""
    if np.array_equal(order, np.arange(len(order))):
        return ()
    breaks = np.flatnonzero(np.diff(order) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(order, breaks))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class LauncherLimits:
    """Limits of a launcher, for one model on one cluster.

    Attributes:
        target: The launcher.
        hosts: Runs of equal hosts of the cluster: (number of hosts, devices in each).
        host_of_device: Host of every device. Shape [devices].
        layers: Units that are layers; None if the model has none.
        tied: Groups of parameter names that are one tensor.
        backend: ``gloo`` or ``nccl``.
        attention: The kind of attention, as in :class:`planner.schema.ModelReference`.
        spatial_sizes: The same.
        device_types: Names of all device types in the cluster.
        host_types: Runs of hosts with devices of one type, in order.
        num_experts: Experts of a layer; 0 without.
    """

    target: Target
    hosts: tuple[tuple[int, int], ...]
    host_of_device: Index
    layers: LayerRun | None
    tied: tuple[tuple[str, ...], ...]
    backend: str
    attention: str | None
    spatial_sizes: tuple[int, ...]
    device_types: tuple[str, ...] = ()
    host_types: tuple[tuple[int, str], ...] = ()
    num_experts: int = 0
    _orders: dict[bytes, Violation | None] = field(default_factory=dict, repr=False)

    def violations(self, strategy: Strategy) -> tuple[Violation, ...]:
        """Return the limits that a strategy exceeds, with its cut and devices."""
        return self._violations(strategy, layers=True, placed=True)

    def _violations(
        self, strategy: Strategy, *, layers: bool, placed: bool
    ) -> tuple[Violation, ...]:
        return self.target.violations(
            Case(
                strategy=strategy,
                hosts=self.hosts,
                layers=layers,
                placed=placed,
                tied=self.tied,
                backend=self.backend,
                attention=self.attention,
                spatial_sizes=self.spatial_sizes,
                device_types=self.device_types,
                host_types=self.host_types,
                num_experts=self.num_experts,
            )
        )

    @property
    def mixes_recompute(self) -> bool:
        """True if the launcher can express another recomputation for each stage."""
        same, mixed = (
            Strategy(
                mesh=Mesh(pp=2),
                schedule="1F1B",
                num_microbatches=2,
                stages=(
                    Stage(rank=0, modules=("0",), recompute=first),
                    Stage(rank=1, modules=("1",)),
                ),
            )
            for first in ("none", "full")
        )
        before = {
            violation.field
            for violation in self._violations(same, layers=False, placed=False)
        }
        return all(
            violation.field in before
            for violation in self._violations(mixed, layers=False, placed=False)
        )

    def even_bounds(self, stages: int) -> tuple[int, ...] | None:
        """Return the cut into stages of equally many layers; None if there is none."""
        return None if self.layers is None else self.layers.even_bounds(stages)

    # -- Devices -----------------------------------------------------------------

    def violation_of_order(self, order: Index) -> Violation | None:
        """Return the limit that an order of devices exceeds; None for none.

        Args:
            order: Device id by rank. Shape [ranks].
        """
        key = np.ascontiguousarray(order, dtype=np.int64).tobytes()
        if key not in self._orders:
            # The axis does not matter here: replicas stand for any mesh.
            bare = Strategy(mesh=Mesh(dp_replicate=len(order)))
            there = bare.model_copy(update={"device_ranges": rank_ranges(order)})
            before = {
                one.field for one in self._violations(bare, layers=False, placed=False)
            }
            found = self._violations(there, layers=False, placed=True)
            self._orders[key] = next(
                (one for one in found if one.field not in before), None
            )
        return self._orders[key]

    def allows_order(self, order: Index) -> bool:
        """Return True if the launcher can express an order of devices."""
        return self.violation_of_order(order) is None

    def mask(self, orders: Index) -> NDArray[np.bool_]:
        """Return a mask of the orders that the launcher can express. Shape [n].

        Args:
            orders: Device id by rank, -1 after the last. Shape [n, most ranks].
        """
        each = (self.allows_order(order[order >= 0]) for order in orders)
        return np.fromiter(each, dtype=bool, count=len(orders))

    def allowed(self, orders: Sequence[Index]) -> list[Index]:
        """Return the orders that the launcher can express."""
        return [order for order in orders if self.allows_order(order)]

    def alike_hosts(self, free: Index) -> list[Index]:
        """Return sets of devices that are the same on every host, the largest first.

        Args:
            free: Ids of devices that may be used. Shape [n].
        """
        first = np.searchsorted(self.host_of_device, self.host_of_device[free])
        local: dict[int, set[int]] = {}
        for host, place in zip(
            self.host_of_device[free].tolist(), (free - first).tolist(), strict=True
        ):
            local.setdefault(host, set()).add(place)
        found = {}
        for places in {tuple(sorted(each)) for each in local.values()}:
            ids = [
                np.searchsorted(self.host_of_device, host) + place
                for host in sorted(local)
                if local[host] >= set(places)
                for place in places
            ]
            found[tuple(ids)] = np.array(ids, dtype=np.int64)
        return sorted(found.values(), key=lambda ids: (-len(ids), ids.tolist()))
