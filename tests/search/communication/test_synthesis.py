"""Schedules found for a topology reach what is published, and are never worse."""

from __future__ import annotations

import numpy as np
import pytest

from planner.errors import StrategyError
from planner.schema.send_tables import SendTable, ring, tree
from planner.search.communication.synthesis import (
    Rounds,
    all_reduce_of,
    gather_bounds,
    synthesize_all_reduce,
    synthesize_gather,
)
from planner.simulate.send_tables import Network, table_seconds

#: NVLink cables between the GPUs of a DGX-1 with V100s. Source: NVIDIA, DGX-1 system
#: architecture white paper, figure 4.
CABLES = {
    **dict.fromkeys(
        [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)], 1
    ),
    **dict.fromkeys(
        [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)], 2
    ),
}


def _dgx1() -> np.ndarray:
    links = np.zeros((8, 8))
    for (one, other), count in CABLES.items():
        links[one, other] = links[other, one] = count
    return links


def _loads(table: SendTable) -> dict[int, np.ndarray]:
    """Chunks over each link in each step."""
    found: dict[int, np.ndarray] = {}
    for send in table.sends:
        load = found.setdefault(send.step, np.zeros((table.ranks, table.ranks)))
        load[send.source, send.destination] += 1
    return found


def test_every_gpu_of_a_dgx1_has_six_cables() -> None:
    assert (_dgx1().sum(axis=0) == 6).all()
    assert gather_bounds(_dgx1()) == (2, 7 / 6)


@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 3, 2), (3, 7, 6)])
def test_published_schedules_of_a_dgx1_are_found(shape: tuple[int, int, int]) -> None:
    """Source: Cai et al. 2021: all-gathers of a DGX-1 on the Pareto front."""
    steps, rounds, chunks = shape
    asked = Rounds(steps=steps, rounds=rounds, chunks=chunks)
    table = synthesize_gather(_dgx1(), asked)
    assert table is not None
    table.check()
    assert table.steps == steps
    links = _dgx1()
    needed = [
        np.ceil((load[links > 0] / links[links > 0]).max())
        for load in _loads(table).values()
    ]
    assert sum(needed) <= rounds
    assert all((load[links == 0] == 0).all() for load in _loads(table).values())
    assert len(table.sends) == 8 * 7 * chunks
    all_reduce_of(table, table).check()


def test_there_is_none_below_the_bounds() -> None:
    assert synthesize_gather(_dgx1(), Rounds(steps=1, rounds=2, chunks=1)) is None
    assert synthesize_gather(_dgx1(), Rounds(steps=3, rounds=6, chunks=6)) is None


def _random(seed: int) -> Network:
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(3, 7))
    fast = rng.random((ranks, ranks)) < 0.5
    bandwidth = np.where(fast, 25e9 * rng.integers(1, 3, (ranks, ranks)), 4e9)
    return Network(
        bandwidth=bandwidth.astype(float), latency=np.full((ranks, ranks), 5e-6)
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1e4, 1e8])
def test_what_is_found_is_never_worse_than_a_ring_or_a_tree(
    seed: int, size: float
) -> None:
    network = _random(seed)
    found = synthesize_all_reduce(network, [], size, time_limit_s=1.0)
    found.table.check()
    for table in (ring(range(network.ranks)), tree(range(network.ranks))):
        assert found.seconds <= float(table_seconds(table, network, size))


def test_links_of_several_speeds_are_used_by_their_speed() -> None:
    links = np.zeros((3, 3))
    links[0, 1] = links[1, 2] = links[2, 0] = 1
    links[0, 2] = links[2, 1] = links[1, 0] = 2
    table = synthesize_gather(links, Rounds(steps=2, rounds=2, chunks=2))
    assert table is not None
    for load in _loads(table).values():
        assert (load <= links).all()


def test_topologies_that_cannot_be_are_refused() -> None:
    apart = np.zeros((4, 4))
    apart[0, 1] = apart[1, 0] = apart[2, 3] = apart[3, 2] = 1
    with pytest.raises(StrategyError, match="do not join all ranks"):
        gather_bounds(apart)
    with pytest.raises(StrategyError, match="2 to 8 ranks"):
        synthesize_gather(np.ones((9, 9)), Rounds(steps=1, rounds=1, chunks=1))
    gather = synthesize_gather(
        np.ones((3, 3)) - np.eye(3), Rounds(steps=1, rounds=1, chunks=1)
    )
    assert gather is not None
    with pytest.raises(StrategyError, match="two all_gathers"):
        all_reduce_of(gather, ring(range(3)))
