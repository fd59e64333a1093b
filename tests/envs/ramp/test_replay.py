"""The benchmark's golden figures, reproduced; and what its world refuses."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import numpy as np
import pytest

from envs.ramp.arrivals import LAWS, ArrivalLaw, BetaLaw, read_arrivals
from envs.ramp.jobs import RampJobs
from envs.ramp.placement import block_table, requested_sizes, servers_given
from envs.ramp.topology import RampTopology
from envs.ramp.world import Arrival, RampWorld
from planner.errors import StrategyError, UnknownNameError
from tests.envs.ramp.conftest import MODELS

_DATA = Path(os.environ.get("MESHWRIGHT_DATA", "none"))
_GOLDEN = _DATA / "pacml" / "golden.csv"
needs_data = pytest.mark.skipif(
    not _GOLDEN.is_file(), reason="MESHWRIGHT_DATA has no pacml/golden.csv"
)


def _degree(world: RampWorld, policy: str) -> int:
    """The fixed policies that the golden figures are of."""
    head, jobs = world.head, world.jobs
    assert head is not None
    valid = [d for d, ok in zip(jobs.degrees, world.mask(), strict=True) if ok]
    if policy == "para_max":
        return max(valid, default=0)
    if policy == "para_min":
        enough = [d for d in valid if d >= math.ceil(1 / head.beta)]
        return min(enough) if enough else max(valid, default=0)
    if policy.startswith("constant_"):
        return int(policy.removeprefix("constant_"))
    limit = head.beta * jobs.jobs[head.model].sequential_jct_s
    in_time = [d for d in valid if jobs.empty_jct_s(head.model, d) <= limit]
    return min(in_time, default=0)


def _rows() -> list[dict[str, str]]:
    if not _GOLDEN.is_file():
        return []
    with _GOLDEN.open(newline="") as stream:
        return list(csv.DictReader(stream))


@needs_data
@pytest.mark.parametrize(
    "row", _rows(), ids=lambda r: f"{r['beta']}{r['seed']}-{r['policy']}"
)
def test_every_column_of_the_golden_figures(
    jobs: RampJobs, row: dict[str, str]
) -> None:
    trace = _DATA / "pacml" / f"arrivals_{row['beta']}_{row['seed']}.csv"
    # The job that arrives as the episode ends is counted, and not decided.
    last = Arrival(time_s=1e6, model="gnmt", beta=1.0)
    world = RampWorld(jobs, [*read_arrivals(trace), last])
    while world.head is not None:
        world.decide(_degree(world, row["policy"]))
    found = world.summary()
    assert found.blocked == int(row["blocked"])
    assert found.arrived == int(row["arrived"])
    for column in list(row)[5:]:
        expected = float(row[column])
        assert getattr(found, column) == pytest.approx(expected, rel=1e-9), column


@needs_data
def test_requests_give_the_servers_that_placing_op_by_op_does(jobs: RampJobs) -> None:
    topology, generator = jobs.topology, np.random.default_rng(0)
    table = block_table(topology)
    assert table is not None
    roomy = 0
    for _ in range(60):
        busy = generator.random(topology.num_servers) < 0.7 * generator.random()
        held = np.uint64(sum(1 << int(s) for s in np.flatnonzero(busy)))
        for name in MODELS:
            for degree in jobs.degrees:
                sizes = requested_sizes(jobs.split(name, degree), topology)
                assert sizes is not None
                placed = jobs.place(name, degree, busy)
                used = [] if placed is None else np.unique(placed[placed >= 0])
                expected = sum(1 << int(server) for server in used)
                assert servers_given(sizes, table, held) == expected
                roomy += placed is not None
    assert roomy > 500


def test_blocks_of_the_benchmark() -> None:
    topology = RampTopology()
    assert topology.degrees.tolist() == [1, 2, 4, 6, 8, 16]
    assert list(topology.shapes(8)) == [(2, 2, 2), (4, 1, 2), (4, 2, 1)]
    assert list(topology.shapes(10)) == []
    assert topology.blocks(16).shape == (2, 16)


def test_laws_are_those_of_the_benchmark() -> None:
    """Means as PAC-ML's pools have them, to what 10 pools of 1,005 jobs vary."""
    for name, mean in {"A": 0.55, "B": 0.277, "C": 0.487, "D": 0.714}.items():
        drawn = [
            arrival.beta
            for seed in range(10)
            for arrival in LAWS[name].draw(MODELS, 1e6, seed)
        ]
        assert np.mean(drawn) == pytest.approx(mean, abs=0.03)
        assert min(drawn) >= 0.1
    again = LAWS["B"].draw(MODELS, 1e6, 3)
    assert again == LAWS["B"].draw(MODELS, 1e6, 3)
    assert again != LAWS["B"].draw(MODELS, 1e6, 4)
    assert len(again) == 1001


@pytest.mark.parametrize("process", ["poisson", "bursty"])
def test_random_arrivals_keep_their_mean_interval(process: str) -> None:
    law = ArrivalLaw(beta=BetaLaw(values=(0.5,)), process=process)  # type: ignore[arg-type]
    counts = [len(law.draw(("a",), 1e6, seed)) for seed in range(20)]
    assert np.mean(counts) == pytest.approx(1000, rel=0.1)


def test_what_is_no_law_or_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"values=\(0\.0,\)"):
        BetaLaw(values=(0.0,))
    with pytest.raises(StrategyError, match="weights"):
        BetaLaw(values=(0.5, 1.0), weights=(1.0, -1.0))
    with pytest.raises(StrategyError, match="interval_s=0"):
        ArrivalLaw(beta=LAWS["A"].beta, interval_s=0.0)
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,model,beta\n0,gnmt,half\n")
    with pytest.raises(StrategyError, match=r"line 2: .*'half'"):
        read_arrivals(path)
    with pytest.raises(StrategyError, match="cannot be read"):
        read_arrivals(tmp_path / "none.csv")
    path.write_bytes(b"arrival_s,model,beta\n0,\xff,0.5\n")
    with pytest.raises(StrategyError, match=r"trace\.csv: byte 23 is not UTF-8"):
        read_arrivals(path)
    path.write_text("arrival_s,model,beta\n0,gnmt,0.5\n", encoding="utf-8-sig")
    assert [arrival.model for arrival in read_arrivals(path)] == ["gnmt"]


@needs_data
@pytest.mark.parametrize(
    ("arrival", "error"),
    [
        (Arrival(time_s=0.0, model="gmnt", beta=0.5), UnknownNameError),
        (Arrival(time_s=0.0, model="gnmt", beta=0.0), StrategyError),
        (Arrival(time_s=-1.0, model="gnmt", beta=0.5), StrategyError),
        (Arrival(time_s=math.nan, model="gnmt", beta=0.5), StrategyError),
    ],
)
def test_impossible_arrivals_are_refused(
    jobs: RampJobs, arrival: Arrival, error: type[Exception]
) -> None:
    with pytest.raises(error):
        RampWorld(jobs, [arrival])
