"""What a policy is asked, with what is listed of it before it proposes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from planner.search import Request
from planner.search.arranging.fleets import Choices
from planner.search.arranging.groups import DeviceGroups

__all__ = ["Problem", "share_of"]


@dataclass(frozen=True, eq=False, slots=True)
class Problem:
    """One search.

    Attributes:
        request: The question.
        groups: Of its devices.
        choices: All meshes.
        until: When proposing should be over, by ``time.perf_counter``; None without a
            clock.
        ends: When the search should be, likewise.
    """

    request: Request
    groups: DeviceGroups
    choices: Choices
    until: float | None
    ends: float | None

    @property
    def order_matters(self) -> bool:
        """Whether it makes a difference which devices are which ranks."""
        many = any(len(fleet.sequences) > 1 for fleet in self.choices.fleets)
        return many or len(np.unique(self.groups.sizes)) > 1

    @property
    def late(self) -> bool:
        """Whether it should be over."""
        return self.until is not None and time.perf_counter() >= self.until

    @property
    def over(self) -> bool:
        """Whether there is no time left at all."""
        return self.ends is not None and time.perf_counter() >= self.ends


def share_of(until: float | None, share: float) -> float | None:
    """When a share of the time that is left is over; None without a clock."""
    if until is None:
        return None
    now = time.perf_counter()
    return now + share * (until - now)
