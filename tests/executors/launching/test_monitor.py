"""The launcher's answer to ranks that end while it looks elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from executors.launching.monitor import Monitor, Rank
from planner.errors import RankFailedError


def _attend(ends: list[dict[str, object]]) -> list[int | None]:
    """Exit codes of ranks whose spawner told of their ends and is gone already."""
    control, control_end = os.pipe()
    ranks, open_ends = [], [control_end]
    for index in range(2):
        messages, messages_end = os.pipe()
        output, output_end = os.pipe()
        ranks.append(Rank(index=index, messages=messages, output=output))
        open_ends += [messages_end, output_end]
    for end in ends:
        os.write(control_end, json.dumps({"kind": "ended", "value": end}).encode())
        os.write(control_end, b"\n")
    spawner = subprocess.Popen(
        [sys.executable, "-c", ""], stdout=subprocess.PIPE, start_new_session=True
    )
    spawner.wait()
    for end in open_ends:
        os.close(end)
    try:
        Monitor(spawner, ranks, control, None).watch(10.0)
    finally:
        assert spawner.stdout is not None
        spawner.stdout.close()
        for rank in ranks:
            os.close(rank.messages)
            os.close(rank.output)
        os.close(control)
    return [rank.code for rank in ranks]


def test_a_spawner_that_went_right_after_its_ranks_is_no_failure() -> None:
    assert _attend([{"rank": 0, "code": 0}, {"rank": 1, "code": 0}]) == [0, 0]


def test_a_spawner_that_went_before_a_rank_is() -> None:
    with pytest.raises(RankFailedError, match="lost their parent"):
        _attend([{"rank": 0, "code": 0}])
