"""The network that orders waiting jobs, its weights in files, and its training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.elastic.costs import ReshardCost
from envs.elastic.pools import HostPool
from envs.elastic.session import ElasticSession
from planner.errors import StrategyError
from policies.elastic.cheapest import CheapestFirst
from policies.elastic.learned import (
    ElasticNetwork,
    NetworkOrder,
    load_network,
    make_network,
    save_network,
)
from policies.elastic.registry import play
from policies.elastic.training import ElasticTrainConfig, fitting_hosts, train_elastic
from policies.run_folder import read_settings
from tests.envs.elastic.small import session, table, trace, write_traces


def _stream(seed: int) -> ElasticSession:
    random = np.random.default_rng(seed)
    return session(
        *(
            (at, at + random.uniform(20, 200), random.uniform(20, 300), 1)
            for at in np.sort(random.uniform(0, 300, 60))
        ),
        source=table({"gpu": (1.0, 1.9, 3.4, 5.0)}, degrees=(1, 2, 4, 8)),
        cluster=(HostPool(kind="gpu", hosts=4, devices=4),),
        cost=ReshardCost(restart_s=3.0, default_bytes=8.0, bytes_per_s=4.0),
    )


def _drawn(seed: int) -> ElasticNetwork:
    network = make_network(4, seed)
    weights = np.random.default_rng(seed).standard_normal(len(network.flat()))
    return network.filled(weights)


def _ends(choose: NetworkOrder | None, seed: int) -> ElasticSession:
    one = _stream(seed)
    play(one, CheapestFirst() if choose is None else CheapestFirst(choose))
    return one


def test_weights_that_ship_are_trained_ones() -> None:
    network = load_network()
    assert network.hidden == 8
    # A network that was never trained decides as the rule does: its last layer is 0.
    assert np.abs(network.out).max() > 0.0
    found = _ends(NetworkOrder(network), 0).summary()
    assert (found.broken, found.late) == ((), 0)


@pytest.mark.parametrize("seed", range(8))
def test_random_weights_break_no_promise(seed: int) -> None:
    found = _ends(NetworkOrder(_drawn(seed)), seed).summary()
    assert (found.broken, found.late) == ((), 0)
    assert found.met + found.declined == 60


def test_a_new_network_decides_as_the_rule_does() -> None:
    rule, network = _ends(None, 1), _ends(NetworkOrder(make_network(4, 0)), 1)
    np.testing.assert_array_equal(rule.end_s, network.end_s)


def test_weights_change_decisions_and_repeat() -> None:
    rule = _ends(None, 1)
    one, other = (_ends(NetworkOrder(_drawn(2)), 1) for _ in range(2))
    np.testing.assert_array_equal(one.end_s, other.end_s)
    assert not np.array_equal(rule.end_s, one.end_s, equal_nan=True)


def test_weights_survive_their_file(tmp_path: Path) -> None:
    network = _drawn(3)
    save_network(network, tmp_path, {"trained_on": "nothing"})
    np.testing.assert_array_equal(load_network(tmp_path).flat(), network.flat())


def test_weights_of_another_version_or_shape_are_refused(tmp_path: Path) -> None:
    save_network(_drawn(3), tmp_path, {})
    path = tmp_path / "config.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "format_version": 99}))
    with pytest.raises(StrategyError, match=r"format_version=99, .* train the policy"):
        load_network(tmp_path)
    path.write_text(json.dumps({**described, "hidden": 5}))
    with pytest.raises(StrategyError, match=r"hidden=5 has .* write both files anew"):
        load_network(tmp_path)


_SMALL = ElasticTrainConfig(
    traces=("one",),
    validation="two",
    jobs=30,
    hidden=2,
    generations=4,
    pairs=2,
    windows=1,
    validate_every=2,
    validation_windows=1,
)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    data = write_traces(tmp_path / "data")
    whole = train_elastic(_SMALL, tmp_path / "whole", data)

    class _Killed(Exception):
        pass

    def kill(stage: str, done: int, of: int, gains: tuple[float, ...]) -> None:
        # After generation 4 is judged and before it is kept.
        if done == 4:
            raise _Killed

    with pytest.raises(_Killed):
        train_elastic(_SMALL, tmp_path / "again", data, watch=kill)
    with np.load(tmp_path / "again" / "state.npz") as held:
        assert held["done"] == 3
    again = train_elastic(_SMALL, tmp_path / "again", data)
    np.testing.assert_array_equal(again.network.flat(), whole.network.flat())
    with (
        np.load(tmp_path / "again" / "state.npz") as ours,
        np.load(tmp_path / "whole" / "state.npz") as theirs,
    ):
        for name in theirs.files:
            np.testing.assert_array_equal(ours[name], theirs[name])
        assert not np.array_equal(theirs["weights"], make_network(2, 0).flat())
    saved = load_network(tmp_path / "again" / "policy")
    np.testing.assert_array_equal(saved.flat(), again.network.flat())


def test_a_run_of_other_settings_is_not_resumed(tmp_path: Path) -> None:
    data = write_traces(tmp_path / "data")
    short = replace(_SMALL, generations=1)
    train_elastic(short, tmp_path / "run", data)
    with pytest.raises(StrategyError, match=r"other settings \(seed differ\)"):
        train_elastic(replace(short, seed=1), tmp_path / "run", data)


def test_bad_settings_and_missingwrite_traces(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"generation": 3}')
    with pytest.raises(StrategyError, match=r"generation.*did you mean 'generations'"):
        read_settings(path, ElasticTrainConfig())
    with pytest.raises(StrategyError, match="pairs=0; give at least 1"):
        ElasticTrainConfig(pairs=0)
    with pytest.raises(StrategyError, match="is not there; set MESHWRIGHT_DATA"):
        train_elastic(_SMALL, tmp_path / "run", tmp_path / "none")


def test_hosts_of_a_window_halve_as_it_may_be_twice_as_crowded() -> None:
    # 512 jobs of 1000 device-seconds by 1000 s: 64 hosts of eight devices.
    jobs = trace(*((0.0, 1000.0, 1000.0, 1),) * 512)
    assert fitting_hosts(jobs, table(), 1.0) == 64
    assert fitting_hosts(jobs, table(), 2.0) == 32
