"""Plans for launchers: tests/export's, cores, a rack, unlike hosts, odd names."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from checking import ROOT

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["launcher_plans"]


def launcher_plans() -> dict[str, Plan]:
    """Name to plan."""
    sys.path.insert(0, str(ROOT))
    from tests.export.plans import HOSTILE, MIXED, PLANS, make_plan, named

    cores = make_plan(((2, 4),), "cpu", mesh={"dp_replicate": 8})
    rack = make_plan(((2, 72),), "gb200-186", mesh={"dp_shard": 144}, zero_stage=3)
    amd = make_plan(device="mi300x-192", mesh={"tp": 8})
    return {
        **PLANS,
        "cores": cores,
        "racks": rack,
        "amd": amd,
        "mixed": MIXED,
        **{
            f"hostile {index}": named(PLANS["zero3"], name)
            for index, name in enumerate((HOSTILE, "", "- null", "日本語", "a" * 300))
        },
    }
