"""Predictions beside steps that were measured on one GPU."""

from __future__ import annotations

import json
import statistics

from benchmarks.one_gpu import _DATA, errors


def test_steps_and_memory_are_near_what_an_h200_measured() -> None:
    document = json.loads((_DATA / "one_gpu.json").read_text(encoding="utf-8"))
    found = errors(document)
    assert len(found) == 18
    steps, memory = (
        [abs(error) for error in part] for part in zip(*found.values(), strict=True)
    )
    assert statistics.mean(steps) <= 0.07
    assert max(steps) <= 0.16
    assert statistics.mean(memory) <= 0.01
    assert max(memory) <= 0.05
