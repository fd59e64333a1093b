"""Limits of a launcher beyond rows of the table: cuts and devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.schema import Mesh, Stage, Strategy
from planner.space import LayerRun
from planner.targets import Case, Refusal, Target

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
    """A launcher's limits, for one model on one cluster.

    Attributes:
        target: The launcher.
        hosts: Of the cluster, runs of equal ones.
        host_of_device: Of every device. Shape [devices].
        layers: Which units are layers; None where they are none.
        tied: Groups of parameter names that are one tensor.
        backend: ``gloo`` or ``nccl``.
        attention: As of :class:`planner.schema.ModelReference`.
        device_types: Of the cluster.
    """

    target: Target
    hosts: tuple[tuple[int, int], ...]
    host_of_device: Index
    layers: LayerRun | None
    tied: tuple[tuple[str, ...], ...]
    backend: str
    attention: str | None
    device_types: tuple[str, ...] = ()
    _orders: dict[bytes, Refusal | None] = field(default_factory=dict, repr=False)

    def refusals(self, strategy: Strategy) -> tuple[Refusal, ...]:
        """All that the launcher cannot say of a strategy with its cut and devices."""
        return self._ask(strategy, layers=True, placed=True)

    def _ask(
        self, strategy: Strategy, *, layers: bool, placed: bool
    ) -> tuple[Refusal, ...]:
        return self.target.refusals(
            Case(
                strategy=strategy,
                hosts=self.hosts,
                layers=layers,
                placed=placed,
                tied=self.tied,
                backend=self.backend,
                attention=self.attention,
                device_types=self.device_types,
            )
        )

    @property
    def mixes_recompute(self) -> bool:
        """True if each stage may have its own recomputation."""
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
            refusal.field for refusal in self._ask(same, layers=False, placed=False)
        }
        return all(
            refusal.field in before
            for refusal in self._ask(mixed, layers=False, placed=False)
        )

    def even_bounds(self, stages: int) -> tuple[int, ...] | None:
        """The cut into stages of equally many layers; None if there is none."""
        return None if self.layers is None else self.layers.even_bounds(stages)

    # -- Devices -----------------------------------------------------------------

    def why_not_order(self, order: Index) -> Refusal | None:
        """Why the launcher cannot give ranks these devices; None if it can.

        Args:
            order: Device id by rank. Shape [ranks].
        """
        key = np.ascontiguousarray(order, dtype=np.int64).tobytes()
        if key not in self._orders:
            # Sharded by any axis that the launcher knows: which one is another matter.
            bare = Strategy(mesh=Mesh(dp_replicate=len(order)))
            there = bare.model_copy(update={"device_ranges": rank_ranges(order)})
            before = {r.field for r in self._ask(bare, layers=False, placed=False)}
            refused = self._ask(there, layers=False, placed=True)
            self._orders[key] = next(
                (r for r in refused if r.field not in before), None
            )
        return self._orders[key]

    def allows_order(self, order: Index) -> bool:
        """True if the launcher can give ranks these devices."""
        return self.why_not_order(order) is None

    def mask(self, orders: Index) -> NDArray[np.bool_]:
        """Mask of the orders that it can express, -1 after the last. Shape [n]."""
        each = (self.allows_order(order[order >= 0]) for order in orders)
        return np.fromiter(each, dtype=bool, count=len(orders))

    def allowed(self, orders: Sequence[Index]) -> list[Index]:
        """Return the orders that it can express."""
        return [order for order in orders if self.allows_order(order)]

    def alike_hosts(self, free: Index) -> list[Index]:
        """The same devices on as many hosts as have them, the most devices first.

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
