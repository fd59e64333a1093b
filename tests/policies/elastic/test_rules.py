"""Schedulers of elastic jobs on small streams, and on published ones."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from envs.elastic.costs import FailureLaw, FreeResize, MeasuredOverheads, ReshardCost
from envs.elastic.pools import HostPool
from envs.elastic.session import ElasticConfig, ElasticSession
from envs.elastic.throughput import elasticflow_throughputs
from envs.elastic.traces import read_trace
from planner.errors import StrategyError, UnknownNameError
from policies.elastic.registry import ELASTIC_RULES, make_rule, play
from tests.envs.elastic.small import session, table

_FOLDER = Path(os.environ.get("MESHWRIGHT_DATA", "none")) / "traces" / "elasticflow"
_needs_traces = pytest.mark.skipif(
    not _FOLDER.is_dir() and not os.environ.get("CI"),
    reason="MESHWRIGHT_DATA has no traces/elasticflow",
)


def test_edf_gives_the_earliest_deadline_all() -> None:
    one = session((0, 30, 30, 1), (0, 20, 30, 1))
    play(one, make_rule("edf"))
    # 30 iterations at 3 per second, one after the other.
    assert one.end_s.tolist() == [20.0, 10.0]


def test_edf_admits_what_ends_in_time_after_all_others() -> None:
    one = session((0, 19, 30, 1), (0, 20, 30, 1), (0, 31, 30, 1))
    play(one, make_rule("edf+admission"))
    found = one.summary()
    # The first two would end at 10 and 20 s; one after the other, the last at 30 s.
    assert (found.met, found.declined, found.broken) == (3, 0, ())
    one = session((0, 19, 30, 1), (0, 19, 30, 1), (0, 31, 30, 1))
    play(one, make_rule("edf+admission"))
    assert one.summary().declined == 1


def test_elasticflow_admits_where_edf_wastes_devices() -> None:
    # Alone, a job runs at 1, 2 and 3 per second on 1, 2 and 4 devices: two jobs of two
    # devices each end in time, and one after the other on four do not.
    jobs = ((0.0, 15.0, 30.0, 1), (0.0, 15.0, 30.0, 1))
    flow, first = session(*jobs), session(*jobs)
    play(flow, make_rule("elasticflow"))
    play(first, make_rule("edf+admission"))
    assert flow.summary().met == 2
    assert first.summary().met == 1


def test_elasticflow_expands_by_diminishing_returns() -> None:
    one = session((0, 100, 30, 1), (0, 100, 30, 1))
    decision = make_rule("elasticflow").decide(one)
    # Two devices each do twice the work; a fourth to one job would do half as much.
    assert decision.degree.tolist() == [2, 2]
    assert sorted(decision.promised.tolist()) == [0, 1]


def test_elasticflow_expands_many_jobs_on_many_devices() -> None:
    # 60 jobs of 2,048 devices: 32 each, and 64 for as many as the rest suffices for.
    degrees = (1, 2, 4, 8, 16, 32, 64)
    source = table({"gpu": tuple(float(n) ** 0.9 for n in degrees)}, degrees=degrees)
    cluster = (HostPool(kind="gpu", hosts=256, devices=8),)
    one = session(*((0.0, 1e4, 3e4, 1),) * 60, source=source, cluster=cluster)
    decision = make_rule("elasticflow").decide(one)
    assert sorted(decision.degree.tolist()) == [32] * 56 + [64] * 4


@pytest.mark.parametrize("rule", ["elasticflow", "elasticflow-published"])
def test_elasticflow_decides_seldom_while_a_job_restarts(rule: str) -> None:
    # The first has 10 ms of work after a restart of 30 s; the plan of the second has a
    # fourth device from 10 ms on. Without a bound there are 3,000 decisions.
    one = session(
        (0, 100, 0.01, 1),
        (0, 100, 295, 1),
        cost=ReshardCost(restart_s=30.0, default_bytes=0.0),
    )
    play(one, make_rule(rule))
    assert one.decisions < 10


def test_published_elasticflow_turns_a_slot_away_together() -> None:
    jobs = ((0.0, 15.0, 30.0, 1), (0.0, 5.0, 30.0, 1))
    alone, together = session(*jobs), session(*jobs)
    play(alone, make_rule("elasticflow"))
    play(together, make_rule("elasticflow-published"))
    assert (alone.summary().met, together.summary().met) == (1, 0)


def test_tiresias_prefers_jobs_with_little_service() -> None:
    one = session((0, 9e4, 9000, 4), (4000, 9e4, 1200, 4))
    play(one, make_rule("tiresias"))
    # By 4000 s the first has had more than 3250 device-seconds, and makes way.
    assert one.end_s[1] == 4400.0 or one.end_s[0] < 4000.0
    long = session((0, 9e4, 15000, 4), (4000, 9e4, 1200, 4))
    play(long, make_rule("tiresias"))
    assert long.end_s.tolist() == [5400.0, 4400.0]


def test_gandiva_ends_where_a_job_asks_for_more_than_the_cluster() -> None:
    small = (HostPool(kind="gpu", hosts=1, devices=2),)
    one = session((0, 10, 5, 1), (0, 50, 5, 4), cluster=small)
    rule = make_rule("gandiva")
    for _ in range(100):
        if not one.over:
            one.apply(rule.decide(one))
    assert one.over
    assert (one.summary().met, one.summary().late) == (1, 1)


def test_gandiva_slices_time_of_a_full_cluster() -> None:
    one = session(*((0.0, 9e4, 600.0, 4) for _ in range(2)))
    play(one, make_rule("gandiva"))
    # 200 s of work each, in turns of 60 s: they end within a turn of each other.
    assert one.end_s.max() == pytest.approx(400.0, abs=61.0)
    assert one.end_s.min() > 250.0


@pytest.mark.parametrize("rule", sorted(ELASTIC_RULES))
def test_every_rule_ends_every_stream(rule: str) -> None:
    """Random streams with failures: all jobs end, and nothing is given twice."""
    random = np.random.default_rng(7)
    for _ in range(3):
        submit = np.sort(random.uniform(0, 500, 25))
        jobs = tuple(
            (at, at + random.uniform(20, 200), random.uniform(10, 200), int(asked))
            for at, asked in zip(submit, random.choice([1, 2, 4], 25), strict=True)
        )
        law = FailureLaw(mean_s=1000.0, repair_s=50.0)
        one = session(
            *jobs, cluster=(HostPool(kind="gpu", hosts=2, devices=4),), failures=law
        )
        play(one, make_rule(rule), seed=1)
        found = one.summary()
        assert found.met + found.late + found.declined == 25
        assert one.room.held == {}
        assert found.met > 0


def test_promises_are_kept_where_resizes_are_free() -> None:
    random = np.random.default_rng(11)
    for rule in ("edf+admission", "elasticflow", "elasticflow-published"):
        submit = np.sort(random.uniform(0, 300, 40))
        jobs = tuple(
            (at, at + random.uniform(5, 80), random.uniform(5, 90), 1) for at in submit
        )
        one = session(*jobs)
        play(one, make_rule(rule))
        found = one.summary()
        assert found.broken == ()
        assert 0 < found.declined < 40


def test_admission_of_two_jobs_is_exact() -> None:
    """ElasticFlow admits a pair whenever some constant degrees meet both deadlines."""
    rates = {1: 1.0, 2: 2.0, 4: 3.0}
    for first, second in itertools.product(range(5, 60, 9), repeat=2):
        fits = any(
            a + b <= 4 and rates[a] * first >= 30 and rates[b] * second >= 30
            for a, b in itertools.product(rates, repeat=2)
        )
        one = session((0, first, 30, 1), (0, second, 30, 1))
        taken = make_rule("elasticflow").decide(one).promised
        assert len(taken) == 2 or not fits


def test_one_type_rules_refuse_mixed_types() -> None:
    source = table({"new": (2.0, 4.0, 8.0), "old": (1.0, 1.5, 0.0)})
    cluster = tuple(HostPool(kind=kind, hosts=1, devices=4) for kind in ("new", "old"))
    jobs = ((0.0, 100.0, 32.0, 1), (0.0, 100.0, 32.0, 4), (1.0, 100.0, 32.0, 2))
    for name, rule in ELASTIC_RULES.items():
        one = session(*jobs, source=source, cluster=cluster)
        if rule.mixed:
            play(one, make_rule(name))
            assert one.summary().met == 3
        else:
            with pytest.raises(StrategyError, match="on 2 device types; it knows one"):
                play(one, make_rule(name))


def test_assignment_gives_the_fast_type_to_who_gains() -> None:
    source = table({"new": (2.0, 4.0, 8.0), "old": (1.0, 1.5, 0.0)})
    cluster = tuple(HostPool(kind=kind, hosts=1, devices=4) for kind in ("new", "old"))
    jobs = ((0.0, 100.0, 32.0, 4), (0.0, 100.0, 32.0, 2))
    one = session(*jobs, source=source, cluster=cluster)
    decision = make_rule("gavel-like").decide(one)
    # Four devices of the old type cannot run the first job at all.
    assert decision.kind is not None
    assert list(zip(decision.kind.tolist(), decision.degree.tolist(), strict=True)) == [
        (0, 4),
        (1, 2),
    ]


def test_unknown_rule() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'elasticflow'"):
        make_rule("elastic_flow")


@_needs_traces
@pytest.mark.parametrize(
    ("rule", "cost", "published"),
    [
        ("edf", FreeResize(), 56.4),
        ("edf+admission", MeasuredOverheads(), 18.5),
        ("tiresias", MeasuredOverheads(unchanged="nothing"), 53.4),
        ("gandiva", MeasuredOverheads(unchanged="all"), 58.7),
        ("elasticflow-published", MeasuredOverheads(), 9.0),
    ],
)
def test_published_figures_of_the_philly_trace(
    rule: str, cost: FreeResize | MeasuredOverheads, published: float
) -> None:
    source = elasticflow_throughputs(_FOLDER / "throughputs_A100")
    trace = read_trace(_FOLDER / "philly_103959.csv", "elasticflow", source)
    cluster = (HostPool(kind="a100", hosts=32, devices=8),)
    one = ElasticSession(
        ElasticConfig(
            trace=trace, source=source, cluster=cluster, cost=cost, slot_s=60.0
        )
    )
    play(one, make_rule(rule))
    assert 100 * one.summary().blocked == pytest.approx(published, abs=1.0)
