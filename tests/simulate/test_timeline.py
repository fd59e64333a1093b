from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from planner.simulate import actions, check_sharing, evaluate, simulate_shared, timeline
from tests.simulate.cases import legal


@pytest.mark.parametrize("case", legal((1, 3, 4), (1, 2), (8, 12)))
@pytest.mark.parametrize("shared", [False, True])
def test_actions_of_a_rank_follow_each_other(
    case: tuple[str, int, int, int], shared: bool
) -> None:
    table = actions(*case)
    rng = np.random.default_rng(4)
    times = [rng.uniform(0.5, 1.5, table.num_stages) for _ in range(3)]
    links = np.zeros(table.num_stages - 1, dtype=int)
    sharing = check_sharing(table, links, links) if shared else None
    found = timeline(table, *times, 0.2, 0.2, sharing=sharing)
    expected = (
        simulate_shared(
            table, *times, 0.2, 0.2, link_of_forward=links, link_of_backward=links
        )
        if shared
        else evaluate(table, *times, 0.2, 0.2)
    )
    assert found.makespan_s == pytest.approx(float(expected.makespan_s))
    np.testing.assert_allclose(
        found.bubble_fraction, expected.bubble_fraction, atol=1e-12
    )
    assert len(found) >= len(table)
    for rank in range(table.pp):
        own = found.rank == rank
        assert (found.start_s[own][1:] >= found.end_s[own][:-1] - 1e-12).all()
    forward = found.kind == 0
    np.testing.assert_allclose(
        (found.end_s - found.start_s)[forward], times[0][found.stage[forward]]
    )


def test_slots_stretch_actions() -> None:
    table = actions("GPipe", 2, 1, 2)
    sharing = check_sharing(table, slots_of_host=[1.0])
    found = timeline(table, 1.0, 1.0, sharing=sharing)
    own = found.rank == 1
    np.testing.assert_allclose(found.start_s[own], [1.0, 3.0, 4.0, 5.0])
    np.testing.assert_allclose(found.end_s[own], [3.0, 4.0, 5.0, 7.0])


def test_chrome_trace_opens_as_one_track_a_rank(tmp_path: Path) -> None:
    found = timeline(actions("DualPipeV", 2, 2, 4), 1e-3, 2e-3, 1e-3)
    path = tmp_path / "trace.json"
    found.save_chrome_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["pp rank 0", "pp rank 1"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(found)
    first = min(spans, key=lambda event: event["ts"])
    assert first["name"] == "0F0"
    assert first["dur"] == pytest.approx(1000.0)
