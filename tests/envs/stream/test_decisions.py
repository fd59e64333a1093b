"""Best fit, against a search over all sets of hosts."""

from __future__ import annotations

import itertools

import numpy as np

from envs.stream.decisions import place
from envs.stream.tables import StreamTables
from planner.cluster import Cluster
from planner.schema.cluster import Link
from tests.envs.stream.conftest import MakeTables, job, leaf_spine


def _place(
    tables: StreamTables, free: np.ndarray, choice: int, given: np.ndarray
) -> int:
    return place(
        tables.kind_of_host,
        tables.switches,
        free,
        int(tables.kinds[choice]),
        int(tables.hosts[choice]),
        int(tables.per_host[choice]),
        np.zeros(len(free), dtype=np.bool_),
        given,
    )


def _brute(tables, free: np.ndarray, choice: int) -> tuple[int, tuple[int, ...]]:
    """Innermost level, then the fullest switch, then the fullest hosts."""
    wanted, per_host = int(tables.hosts[choice]), int(tables.per_host[choice])
    able = [
        host
        for host in range(len(free))
        if free[host] >= per_host and tables.kind_of_host[host] == tables.kinds[choice]
    ]
    for level in range(len(tables.switches)):
        if (level == 0) != (wanted == 1):
            continue
        found = []
        for switch in set(tables.switches[level].tolist()):
            under = [h for h in able if tables.switches[level, h] == switch]
            for hosts in itertools.combinations(under, wanted):
                left = sum(free[h] for h in under)
                found.append((left, switch, sum(free[list(hosts)]), hosts))
        if found:
            return level, min(found)[3]
    return -1, ()


def test_best_fit_is_what_a_search_finds(make_tables: MakeTables) -> None:
    tables = make_tables(job("a", 8), cluster=leaf_spine(hosts=8, per_host=4), spread=2)
    generator = np.random.default_rng(0)
    given = np.empty(int(tables.hosts.max()), dtype=np.int64)
    levels = set()
    for _ in range(150):
        free = generator.integers(0, 5, 8)
        for choice in range(len(tables.degrees)):
            level = _place(tables, free, choice, given)
            expected, hosts = _brute(tables, free, choice)
            chosen = tuple(sorted(host for host in given.tolist() if host >= 0))
            assert level == expected
            # Which of equals is taken does not matter, what is left does.
            assert sorted(free[list(chosen)]) == sorted(free[list(hosts)])
            levels.add(level)
    assert levels == {-1, 0, 1, 2}


def test_kinds_are_not_mixed_and_occupied_devices_not_given(
    make_tables: MakeTables,
) -> None:
    link = Link(bandwidth_bytes_per_s=1.0, latency_s=0.0, name="between")
    cluster = Cluster.mixed(
        leaf_spine(hosts=2, device="v100-32"),
        leaf_spine(hosts=2, device="a100-80"),
        level=link,
    ).with_occupied([0])
    tables = make_tables(job("a", 8), cluster=cluster)
    free, given = tables.size_of_host.copy(), np.empty(2, dtype=np.int64)
    assert free.tolist() == [1, 2, 2, 2]
    kinds = set()
    for choice in range(len(tables.degrees)):
        level = _place(tables, free, choice, given)
        assert level >= 0
        hosts = given[given >= 0]
        assert set(tables.kind_of_host[hosts].tolist()) == {tables.kinds[choice]}
        kinds.add((int(tables.kinds[choice]), int(tables.degrees[choice])))
    # Four of the older devices are not to be had: one is occupied.
    assert kinds == {(0, 1), (0, 2), (1, 1), (1, 2), (1, 4)}
    assert tables.speed[:4].max() < 1.0
    assert (tables.speed[4:] == 1.0).all()
