"""Models that measurements name, with their published figures."""

from __future__ import annotations

import re

from planner.calibration.known import Known, plain_name
from planner.calibration.known_gpt import GPTS
from planner.calibration.known_llama import LLAMAS
from planner.calibration.known_sparse import SPARSE

__all__ = ["KNOWN", "find_known"]

#: The first whose pattern is found counts.
KNOWN: tuple[Known, ...] = (*SPARSE, *GPTS, *LLAMAS)


def find_known(name: str) -> Known | None:
    """The model that a measurement names; None if it is none of these."""
    plain = plain_name(name)
    return next((known for known in KNOWN if re.search(known.pattern, plain)), None)
