"""What spreading experts costs: tokens go to where theirs are, and come back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.cost.classes import BlockClasses
from planner.cost.collectives import Groups, time_of
from planner.cost.combinations import Combinations
from planner.cost.orders import Orders
from planner.cost.recipes import Recipe

__all__ = ["ExpertTraffic", "expert_traffic", "exposed_exchanges"]

Array = NDArray[np.float64]

#: Links that carry less than this share of what those inside a host do are outside.
_OUTSIDE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraffic:
    """Traffic of ep. Shapes [combinations, classes].

    Attributes:
        seconds: Of the two all-to-alls of a forward, or of a backward.
        sent: Bytes that one device sends in a forward and backward.
        payload: What a rank holds before an all-to-all.
    """

    seconds: Array
    sent: Array
    payload: Array


def expert_traffic(
    orders: Orders, classes: BlockClasses, combos: Combinations, scale: Array
) -> ExpertTraffic:
    """Tokens sent to their experts and back, as long as nothing hides it.

    An exchange lasts until the rank has all that most tokens go to.

    Args:
        orders: What ``combos.order`` refers to.
        classes: Distinct blocks.
        combos: Degrees and microbatches.
        scale: Activation bytes over those of the trace. Shape [combinations].
    """
    setting = orders.setting
    stride = combos.tp
    if setting.recipe.experts_on_shards:
        # Shards of one sequence and replicas alike have experts of their own.
        stride = np.where(combos.sequence_parallel > 0, 1, combos.tp)
    found = orders.groups(combos.ep, stride, combos.orders)
    groups = _once_a_host(found, setting.recipe)
    routed = classes.column("expert_bytes")
    seconds = np.zeros((len(combos), len(routed)))
    measured = setting.cluster.document.collectives
    stream = np.where(combos.sequence_parallel > 0, combos.tp, 1)
    for index, total in enumerate(routed):
        if total:
            one = time_of("all_to_all", total * scale / stream, groups, measured)
            seconds[:, index] = 2 * one * setting.recipe.imbalance
    share = (combos.ep - 1) / combos.ep
    payload = routed * (scale / stream * (combos.ep > 1))[:, None]
    sent = 4 * payload * share[:, None]
    return ExpertTraffic(seconds=seconds, sent=sent, payload=payload)


def _once_a_host(groups: Groups, recipe: Recipe) -> Groups:
    """Groups whose slower levels carry the recipe's share of what is routed."""
    inner = groups.bandwidth[:, :1]
    slower = (groups.bandwidth < _OUTSIDE * inner) & (groups.members > 1)
    share = np.where(slower, recipe.routed_share, 1.0)
    return replace(groups, bandwidth=groups.bandwidth / share)


def exposed_exchanges(
    recipe: Recipe, exchanged: Array, forward: Array, backward: Array
) -> Array:
    """Seconds of exchanges of a direction that hide nowhere.

    exposed = exchanged - min(expert_overlap exchanged, (forward + backward) / 2)

    A unit's forward and backward stand beside as many exchanges each, of the same
    microbatch or of another one, which can hide no longer than these take.

    Args:
        recipe: Of the framework.
        exchanged: Seconds of a forward's exchanges, or of a backward's. [C, units].
        forward: Seconds of compute. [C, units]; likewise backward.
    Returns:
        Shape [C, units].
    """
    beside = (forward + backward) / 2
    hidden = np.minimum(recipe.expert_overlap * exchanged, beside)
    return np.asarray(exchanged - hidden)
