"""Orders of all device groups of a cluster, drawn from the network.

A division of a fleet into members cuts such an order into parts: see
:mod:`planner.search.federation`. Nothing was trained for that. The network draws the
order in which groups would be the stages and replicas of one plan for the whole fleet,
under the meshes that it scores best.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from envs.partition.features import observe
from planner.search import Request
from planner.search.device_order.groups import group_devices
from planner.search.device_order.subsets import list_choices
from policies.partition.decoding import draw_orders
from policies.partition.network import SavedNetwork

__all__ = ["draw_group_orders"]

Index = NDArray[np.int64]

#: Meshes that orders are drawn for; of each the likeliest order is among them.
_MESHES = 8


@torch.inference_mode()
def draw_group_orders(
    saved: SavedNetwork, request: Request, count: int
) -> tuple[Index, ...]:
    """Draw orders of the free devices' groups.

    Args:
        saved: The network.
        request: Question about the whole fleet; its seed is that of the draws.
        count: Number of draws; equal ones are returned once.

    Returns:
        Orders of all groups, each of shape [groups]; groups that a mesh leaves out
        come last. Empty if no mesh is legal.
    """
    groups = group_devices(request.context)
    choices = list_choices(request, groups)
    if not len(choices):
        return ()
    seen = observe(request, groups, choices)
    encoded = saved.network.encode(seen)
    logits = saved.network.mesh_logits(seen, encoded).numpy()
    held = np.array([one.usable.sum() for one in choices.subsets])[choices.subset]
    devices = np.array([one.count for one in choices.subsets])[choices.subset]
    # Meshes over most hosts first, and over most of their devices.
    ranked = np.lexsort((-logits, -devices, -held))
    ranked = ranked[devices[ranked] == devices[ranked[0]]][: min(_MESHES, count)]
    more = np.sort(np.resize(ranked, max(0, count - len(ranked))))
    drawn = draw_orders(
        saved.network,
        seen,
        encoded,
        groups,
        choices,
        np.concatenate([ranked, more]),
        np.random.default_rng(request.seed),
        greedy=len(ranked),
    )
    found = {}
    for sequence in drawn.sequence:
        taken = sequence[sequence >= 0]
        rest = np.setdiff1d(np.arange(len(groups)), taken)
        order = np.concatenate([taken, rest])
        found[order.tobytes()] = order
    return tuple(found.values())
