"""The scheduler that lets jobs wait, on devices of several types."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envs.elastic.costs import FailureLaw, FreeResize, ReshardCost
from envs.elastic.pools import HostPool
from envs.elastic.session import ElasticConfig, ElasticSession, Fate
from envs.elastic.throughput import ModelKey, ThroughputTable
from policies.elastic.cheapest import CheapestFirst, _rows, _worth
from policies.elastic.learned import NetworkOrder, make_network
from policies.elastic.registry import make_rule, play
from tests.envs.elastic.small import trace
from tests.policies.elastic.test_cheapest import _drawn_order, _stream

_STALL = ReshardCost(restart_s=3.0, default_bytes=8.0, bytes_per_s=4.0)
_MODELS = tuple(ModelKey(name, 64) for name in ("both", "fast", "slow", "wide"))
_FAST, _SLOW = 0, 1
#: Iterations per second of each model on 1, 2, 4 and 8 devices of each type; "fast" and
#: "slow" run on one type alone, "wide" fits no few devices and is slower on more hosts.
_RATES = (
    ((2.0, 3.8, 6.8, 10.0), (1.0, 1.9, 3.4, 5.0)),
    ((1.0, 1.9, 3.4, 0.0), (0.0,) * 4),
    ((0.0,) * 4, (0.0, 1.9, 3.4, 5.0)),
    ((0.0, 0.0, 4.0, 7.0), (0.0, 0.0, 0.0, 6.0)),
)


def _table(spread: float = 0.0) -> ThroughputTable:
    rates = np.zeros((len(_MODELS), 2, 4, 2))
    rates[..., 0] = _RATES
    rates[3, :, :, 1] = spread * rates[3, :, :, 0]
    return ThroughputTable(
        name="two types",
        models=_MODELS,
        kinds=("fast", "slow"),
        degrees=(1, 2, 4, 8),
        table=rates,
    )


def _of_models(
    models: list[int],
    *jobs: tuple[float, float, float, int],
    hosts: tuple[int, int] = (1, 1),
    spread: float = 0.0,
    **options: object,
) -> ElasticSession:
    """Jobs of some models on hosts of four fast and of eight slow devices."""
    cluster = (
        HostPool(kind="fast", hosts=hosts[0], devices=4),
        HostPool(kind="slow", hosts=hosts[1], devices=8),
    )
    asked = replace(trace(*jobs), model=np.array(models), models=_MODELS)
    fields = {"cost": FreeResize(), "cluster": cluster, **options}
    return ElasticSession(
        ElasticConfig(trace=asked, source=_table(spread), **fields)  # type: ignore[arg-type]
    )


def _mixed(seed: int, jobs: int = 80, **options: object) -> ElasticSession:
    """A crowded stream of all models, with bursts."""
    random = np.random.default_rng(seed)
    submit = np.sort(np.round(random.uniform(0, 300, jobs) / 20.0) * 20.0)
    drawn = (
        (at, at + random.uniform(20, 200), random.uniform(20, 500), 1) for at in submit
    )
    models = random.integers(len(_MODELS), size=jobs).tolist()
    fields = {"hosts": (4, 2), "cost": _STALL, **options}
    return _of_models(models, *drawn, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("spread", [0.0, 0.6])
@pytest.mark.parametrize("seed", range(10))
def test_no_promise_is_broken_on_two_types(seed: int, spread: float) -> None:
    """Whatever the order, and where some jobs are slower on more hosts."""
    one = _mixed(seed, spread=spread)
    play(one, CheapestFirst(_drawn_order(seed)))
    found = one.summary()
    assert (found.broken, found.late) == ((), 0)
    assert found.met + found.declined == 80
    assert found.resizes > found.met > 10


@pytest.mark.parametrize("seed", range(8))
def test_no_promise_is_broken_where_sizes_do_not_pack(seed: int) -> None:
    """Hosts of six and three devices: on more hosts some jobs would be slow."""
    odd = (
        HostPool(kind="fast", hosts=5, devices=6),
        HostPool(kind="slow", hosts=3, devices=3),
    )
    one = _mixed(seed, spread=0.3, cluster=odd)
    play(one, CheapestFirst(_drawn_order(seed)))
    found = one.summary()
    assert (found.broken, found.late) == ((), 0)
    assert found.met > 10


@pytest.mark.parametrize("slot_s", [0.0, 10.0])
def test_to_follow_the_rows_is_always_safe_on_two_types(slot_s: float) -> None:
    one = _mixed(3, slot_s=slot_s)
    one.begin()
    rule = CheapestFirst()
    paused, switched = 0, 0
    while not one.over:
        decision = rule.decide(one)
        assert decision.kind is not None
        held = one.degree[decision.jobs] > 0
        other = one.kind[decision.jobs] != decision.kind
        switched += int((held & (decision.degree > 0) & other).sum())
        one.apply(decision)
        rows = _rows(rule._needs(one), slot_s)
        promised = one.fate[one.alive] == Fate.PROMISED
        assert (rows.level[promised] >= 0).all()
        assert rows.hold(before=True)
        assert np.isfinite(rows.due_s).all()
        paused += int((one.degree[one.alive[promised]] == 0).sum())
    assert one.summary().broken == ()
    assert paused > 10
    assert switched > 2


@pytest.mark.parametrize("rule", ["cheapest-first", "learned"])
def test_a_job_that_fits_one_type_goes_there(rule: str) -> None:
    one = _of_models([1, 2], (0, 100, 30, 1), (0, 100, 30, 1))
    decision = make_rule(rule).decide(one)
    assert decision.kind is not None
    assert sorted(decision.promised.tolist()) == [0, 1]
    assert decision.kind.tolist() == [_FAST, _SLOW]
    # Each gets the number of devices at which it is fastest.
    assert decision.degree.tolist() == [4, 8]


def test_a_job_that_fits_one_type_waits_for_it() -> None:
    # The fast devices are taken for 10 s by a job that is due then.
    one = _of_models([1, 1], (0, 10.01, 34, 1), (0, 30, 34, 1))
    play(one, make_rule("cheapest-first"))
    assert one.end_s.tolist() == [10.0, 20.0]
    one = _of_models([1, 1], (0, 10.01, 34, 1), (0, 15, 34, 1))
    play(one, make_rule("cheapest-first"))
    assert one.fate.tolist() == [Fate.DONE, Fate.DECLINED]


def test_a_job_goes_to_the_other_type_for_one_that_cannot() -> None:
    # At 1 s the first has the four fast devices and 93.2 iterations left: 13.7 s there,
    # for which it cannot wait, or 18.6 s on slow ones; the second needs all fast ones.
    one = _of_models([0, 1], (0, 20, 100, 1), (1, 11.01, 34, 1))
    rule = make_rule("cheapest-first")
    first = rule.decide(one)
    assert (first.kind, first.degree) == ([_FAST], [4])
    one.apply(first)
    second = rule.decide(one)
    assert second.kind is not None
    assert second.kind.tolist() == [_SLOW, _FAST]
    assert second.degree.tolist() == [8, 4]
    assert second.promised.tolist() == [1]
    play(one, make_rule("cheapest-first"))
    assert one.summary().met == 2


@pytest.mark.parametrize(
    ("restart_s", "end_s"), [(0.5, 10.5 + 0.5 + 40 / 6.8), (1.5, 1.5 + 90 / 5.0)]
)
def test_a_job_moves_to_freed_devices_if_three_restarts_are_paid(
    restart_s: float, end_s: float
) -> None:
    # Both start at restart_s; the first has the fast devices for 10 s, the second slow
    # ones, on which it has 40 iterations, or 8 s, left when these are free. There it
    # would need 5.9 s and a restart, and two more are to be gained.
    cost = ReshardCost(restart_s=restart_s, default_bytes=0.0)
    one = _of_models([1, 0], (0, 10.01 + restart_s, 34, 1), (0, 200, 90, 1), cost=cost)
    play(one, make_rule("cheapest-first"))
    assert one.end_s == pytest.approx([10.0 + restart_s, end_s])


def test_idle_devices_of_all_types_are_given_where_jobs_end_sooner() -> None:
    # On four fast devices the first ends first, on eight slow ones the second.
    one = _of_models([0, 3], (0, 100, 68, 1), (0, 100, 60, 8))
    play(one, make_rule("cheapest-first"))
    assert one.end_s.tolist() == [10.0, 10.0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slot_s", [0.0, 10.0])
def test_learned_orders_jobs_of_two_types(seed: int, slot_s: float) -> None:
    """The weights that ship know one type; random ones know nothing."""
    network = make_network(4, seed)
    drawn = np.random.default_rng(seed).standard_normal(len(network.flat()))
    for rule in (
        make_rule("learned"),
        CheapestFirst(NetworkOrder(network.filled(drawn))),
    ):
        one = _mixed(seed, slot_s=slot_s)
        play(one, rule)
        found = one.summary()
        assert (found.broken, found.late) == ((), 0)
        assert found.met + found.declined == 80


@pytest.mark.parametrize("seed", range(4))
def test_streams_end_where_devices_of_two_types_die(seed: int) -> None:
    """A job that lost its devices goes on where it runs at all, late or not."""
    one = _mixed(seed, failures=FailureLaw(mean_s=600.0, repair_s=100.0))
    play(one, make_rule("cheapest-first"), seed)
    found = one.summary()
    assert found.failures > 5
    assert found.met + found.declined + found.late == 80


def test_two_types_of_which_the_cluster_has_one() -> None:
    slow = (HostPool(kind="slow", hosts=2, devices=8),)
    one = _of_models([0, 2], (0, 100, 30, 1), (0, 100, 30, 1), cluster=slow)
    decision = make_rule("cheapest-first").decide(one)
    assert decision.kind is not None
    assert decision.kind.tolist() == [_SLOW, _SLOW]
    assert decision.degree.tolist() == [8, 8]


def test_a_type_that_the_cluster_has_not_changes_nothing() -> None:
    two, three = _mixed(5), _mixed(5)
    table = _table()
    more = replace(
        table,
        kinds=("absent", *table.kinds),
        table=np.concatenate([9.0 * table.table[:, :1], table.table], axis=1),
    )
    three = ElasticSession(replace(three.config, source=more))
    for one in (two, three):
        play(one, make_rule("cheapest-first"))
    np.testing.assert_allclose(two.end_s, three.end_s)
    assert two.summary().met > 30


def test_a_device_is_worth_what_jobs_gain_by_it() -> None:
    # Two jobs need half the device-seconds on the first type, one a fourth; one has no
    # choice. The three devices are worth three.
    cost_s = np.array([[5.0, 10.0], [3.0, 6.0], [1.0, 4.0], [np.inf, 9.0]])
    found = _worth(cost_s, np.array([1, 2]))
    np.testing.assert_allclose(found, [1.5, 0.75])
    assert _worth(cost_s[:, :1], np.array([7])) == [1.0]


#: Jobs met, jobs declined, resizes, decisions and mean completion time of streams on
#: one type, as decided before several types were known.
_ONE_TYPE = {
    ("cheapest-first", 0, 0.0): (36, 24, 85, 66, 114.660673),
    ("cheapest-first", 5, 0.0): (37, 23, 96, 69, 103.499381),
    ("cheapest-first", 9, 10.0): (37, 23, 70, 34, 99.359373),
    ("learned", 0, 0.0): (35, 25, 89, 66, 107.193582),
    ("learned", 5, 10.0): (35, 25, 66, 34, 100.256853),
    ("learned", 9, 0.0): (36, 24, 106, 71, 102.778785),
}


@pytest.mark.parametrize(("case", "wanted"), _ONE_TYPE.items())
def test_one_type_is_decided_as_before(
    case: tuple[str, int, float], wanted: tuple[int, int, int, int, float]
) -> None:
    rule, seed, slot_s = case
    one = _stream(seed, slot_s=slot_s)
    play(one, make_rule(rule))
    found = one.summary()
    counts = (found.met, found.declined, found.resizes, found.decisions)
    assert counts == wanted[:-1]
    assert found.mean_jct_s == pytest.approx(wanted[-1], abs=1e-5)


def test_fewer_are_blocked_and_jobs_end_sooner_than_by_published_rules() -> None:
    found = {}
    for rule in ("cheapest-first", "gavel-like", "sia-like", "arena-like"):
        figures = []
        for seed in range(3):
            one = _mixed(seed, jobs=40)
            play(one, make_rule(rule))
            figures.append((one.summary().blocked, one.summary().mean_jct_s))
        found[rule] = np.mean(figures, axis=0)
    ours = found.pop("cheapest-first")
    for theirs in found.values():
        assert (ours < theirs).all()
