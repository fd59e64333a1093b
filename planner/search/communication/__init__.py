"""Choose algorithm, order and parts of a sum over ranks, on their links."""

from planner.search.communication.choose import (
    Choice,
    candidates,
    choose,
    choose_for_all,
)
from planner.search.communication.fractions import (
    balanced_fractions,
    balanced_parts,
)
from planner.search.communication.orders import ring_order, slowest_link_s

__all__ = [
    "Choice",
    "balanced_fractions",
    "balanced_parts",
    "candidates",
    "choose",
    "choose_for_all",
    "ring_order",
    "slowest_link_s",
]
