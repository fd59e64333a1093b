"""Models that measurements name, with their published figures."""

from __future__ import annotations

import re

from planner.calibration.models.known import Known, plain_name
from planner.calibration.models.known_gpt import GPTS
from planner.calibration.models.known_llama import LLAMAS
from planner.calibration.models.known_sparse import SPARSE

__all__ = ["KNOWN", "find_known"]

#: The first whose pattern is found counts.
KNOWN: tuple[Known, ...] = (*SPARSE, *GPTS, *LLAMAS)


def find_known(name: str) -> Known | None:
    """The model that a measurement names; None if it is none of these."""
    # Remarks in brackets may mislead or hold the size: read if nothing else tells.
    for plain in (plain_name(name), plain_name(re.sub(r"[()\[\]]", " ", name))):
        for known in KNOWN:
            if re.search(known.pattern, plain):
                return known
    return None
