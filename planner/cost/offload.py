"""Bytes that lie in the hosts' memory, and the seconds that sending them takes.

Each way of a device's link to its host's memory carries :data:`LINK_BYTES_PER_S`. What
is moved, and what computation hides of it, by :class:`planner.schema.Offload`:

optimizer    gradients go out behind the backward, weights come back behind the update:
             nothing hides either
parameters   weights come in under the gathers of ZeRO, gradients go out under the
             backward: what takes longer than forward and backward is exposed
activations  go out under the forward, and what takes longer than it is exposed; come
             back in the backward when they are wanted, which nothing hides

Updates are the host's, bound by its memory, whose bandwidth the devices of a host
share. All of it is part of the step's update. CPU processes update as they do without,
and copy within their memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import PricingContext
from planner.cost.kernels.roofline import update_passes
from planner.cost.optimizer_states import mean_state_bytes
from planner.units import dtype_bytes

__all__ = [
    "HOST_BANDWIDTH_BYTES_PER_S",
    "LINK_BYTES_PER_S",
    "OffloadRows",
    "host_bytes",
    "host_limit_bytes",
    "moving_seconds",
    "update_on_host_seconds",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: PCIe 4.0 x16 each way, 31.5 GB/s less packets' heads and what copies do not reach.
#: Source: CUDA samples' bandwidthTest of pinned memory on A100 hosts, 24 to 26 GB/s.
LINK_BYTES_PER_S = 25e9

#: Memory of a host, reads plus writes. Source: AMD EPYC 7003 datasheet, eight channels
#: of DDR4-3200.
HOST_BANDWIDTH_BYTES_PER_S = 204.8e9

#: Share of it that an update reaches, as in BabelStream's triad.
_REACHED = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRows:
    """Devices of which tensors lie in the hosts' memory. Arrays of shape [n].

    Attributes:
        shards: Scalars of weights that ZeRO leaves on a device.
        trained: Those of them that have a gradient.
        saved_bytes: Saved by one microbatch, of what is offloaded.
        in_flight: Microbatches whose activations are held at once.
        zero_stage: ZeRO's stage.
        num_microbatches: In a step.
        forward_s: Of one microbatch; likewise backward_s.
    """

    shards: Array
    trained: Array
    saved_bytes: Array
    in_flight: Array
    zero_stage: Index
    num_microbatches: Index
    forward_s: Array
    backward_s: Array


def _hosts(context: PricingContext) -> tuple[Array, Array]:
    """Memory of each host and devices in it. Shapes [hosts]."""
    groups = context.cluster.document.hosts
    counts = [group.count for group in groups]
    memory = np.repeat([group.memory_bytes or np.inf for group in groups], counts)
    return memory, np.repeat([float(g.devices_per_host) for g in groups], counts)


def host_limit_bytes(context: PricingContext) -> float:
    """Bytes of its host's memory that one device may use; the least of all devices.

    Each device of a host has an equal part; infinite where no host's memory is known.
    """
    memory, devices = _hosts(context)
    used = np.asarray(context.cluster.host_of_device)[context.order]
    return float((memory / devices)[used].min()) * context.memory_fraction


def host_bytes(rows: OffloadRows, context: PricingContext) -> Array:
    """Bytes of one device that lie in its host's memory. Shape [n].

    Beside its states the optimizer on the host has weights and gradients there.
    """
    offload, optimizer = context.regime.offload, context.optimizer
    found = np.zeros(len(rows.shards))
    if offload.states != "none":
        stored = dtype_bytes(context.precision.parameter)
        states = mean_state_bytes(optimizer, context.graph)
        weights = rows.trained if offload.states == "optimizer" else rows.shards
        found = found + weights * stored + rows.trained * (stored + states)
    if offload.activations:
        found = found + rows.saved_bytes * rows.in_flight
    return found


def update_on_host_seconds(
    trained: Array, context: PricingContext, *, clip: bool
) -> Array:
    """Seconds of an update that the host does, for all of its devices at once.

    Args:
        trained: Scalars that a device's host updates for it. Shape [n].
        context: The request.
        clip: Whether gradients are normed and scaled before.
    """
    _, devices = _hosts(context)
    used = np.asarray(context.cluster.host_of_device)[context.order]
    rate = _REACHED * HOST_BANDWIDTH_BYTES_PER_S / devices[used].max()
    return np.asarray(4 * trained * update_passes(context.optimizer, clip=clip) / rate)


def moving_seconds(rows: OffloadRows, context: PricingContext) -> Array:
    """Seconds of a step in which nothing hides what moves to and from the host. [n].

    On CPU processes the link is their memory.
    """
    offload = context.regime.offload
    rate = LINK_BYTES_PER_S if context.on_gpu else HOST_BANDWIDTH_BYTES_PER_S / 2
    stored = dtype_bytes(context.precision.parameter)
    found = np.zeros(len(rows.shards))
    if offload.states == "optimizer":
        found = found + 2 * stored * rows.trained / rate
    if offload.states == "parameters":
        many = rows.num_microbatches
        gathers = np.where(rows.zero_stage == 3, 2 * many, 1)
        sums = np.where(rows.zero_stage >= 2, many, 1)
        most = np.maximum(rows.shards * gathers, rows.trained * sums) * stored / rate
        busy = many * (rows.forward_s + rows.backward_s)
        found = found + np.maximum(most - busy, 0.0)
    if offload.activations:
        one_way = rows.saved_bytes / rate
        out = np.maximum(one_way - rows.forward_s, 0.0)
        found = found + rows.num_microbatches * (out + one_way)
    return found
