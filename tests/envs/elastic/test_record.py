"""Records of elastic streams."""

from __future__ import annotations

import numpy as np
import pytest

from envs.elastic.costs import FailureLaw, ReshardCost
from envs.elastic.pools import HostPool
from envs.elastic.record import RecordedSession
from envs.elastic.session import ElasticSession
from planner.schema.elastic import ElasticRecord
from policies.elastic.registry import make_rule, play
from tests.envs.elastic.small import config, give, recorded


def test_record_has_answers_and_pieces() -> None:
    found = recorded().record("by hand", 1.5)
    assert (found.policy, found.trace_load, found.end_s) == ("by hand", 1.5, 40.0)
    jobs = found.jobs
    assert jobs.answer == ("promised", "promised", "declined", "declined")
    assert jobs.told_s == (0.0, 10.0, 10.0, 35.0)
    assert jobs.end_s == (40.0, 30.0, None, None)
    assert jobs.outcome == ("met", "met", "declined", "declined")
    rows = zip(*found.pieces.to_data().values(), strict=True)
    assert list(rows) == [
        (0, 0, 2, 1, 0.0, 10.0, 0.0, "started", False),
        (1, 0, 4, 1, 10.0, 30.0, 0.0, "started", False),
        (0, 0, 1, 1, 30.0, 40.0, 0.0, "resumed", False),
    ]
    assert found.models[0].rates == ((1.0, 2.0, 3.0),)
    assert found.devices == ((0.0, (4,)),)
    assert ElasticRecord.from_json(found.to_json()) == found


def test_record_of_an_episode_that_goes_on() -> None:
    one = RecordedSession(config((0, 100, 30, 1), (10, 60, 60, 1), (50, 99, 1, 1)))
    one.apply(give((0, 1)))
    found = one.record()
    # The third job is not there yet.
    assert found.jobs.outcome == ("open", "open")
    assert (found.pieces.end_s, found.jobs.end_s) == ((10.0,), (None, None))


def test_jobs_that_make_room_are_moved() -> None:
    one = RecordedSession(
        config(
            *((0, 99, 9, 1), (0, 99, 30, 1), (0, 99, 30, 1), (5, 99, 30, 2)),
            cluster=(HostPool(kind="gpu", hosts=2, devices=2),),
            cost=ReshardCost(restart_s=4.0, default_bytes=0.0),
        )
    )
    one.apply(give((0, 1), (1, 1), (2, 1)))
    one.apply(give((0, 0), (3, 2)))
    pieces = one.record().pieces
    at = pieces.change.index("moved")
    assert pieces.job[at] in (1, 2)
    assert (pieces.start_s[at], pieces.degree[at], pieces.stall_s[at]) == (5.0, 1, 4.0)


@pytest.mark.parametrize("rule", ["elasticflow", "edf"])
def test_recorded_episodes_are_the_same(rule: str) -> None:
    random = np.random.default_rng(0)
    jobs = [
        (at, at + random.uniform(5, 60), random.uniform(5, 90), 1) for at in range(40)
    ]
    made = config(
        *jobs,
        failures=FailureLaw(mean_s=200.0, repair_s=20.0, checkpoint_s=5.0),
        cost=ReshardCost(restart_s=0.5, default_bytes=0.0),
    )
    plain, kept = ElasticSession(made), RecordedSession(made)
    play(plain, make_rule(rule), seed=3)
    play(kept, make_rule(rule), seed=3)
    assert kept.summary() == plain.summary()
    found = kept.record()
    assert (found.seed, found.summary["blocked"]) == (3, plain.summary().blocked)
    # Devices times time of the pieces is what the session has charged.
    pieces = found.pieces
    held = np.subtract(pieces.end_s, pieces.start_s) * pieces.degree
    np.testing.assert_allclose(
        np.bincount(pieces.job, held, minlength=40), plain.served_s, atol=1e-6
    )
    # What a failure ended begins again as resumed, and devices are fewer from then on.
    alive = dict(found.devices)
    hit = [at for at in range(len(pieces)) if pieces.failed[at]]
    assert len(hit) >= 3
    for at in hit:
        assert alive[pieces.end_s[at]][0] < 4
        later = [
            n for n in range(at + 1, len(pieces)) if pieces.job[n] == pieces.job[at]
        ]
        assert not later or pieces.change[later[0]] == "resumed"
