"""Records of an episode agree with its events."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from envs.stream.arrivals import StreamLaw
from envs.stream.env import JobStreamEnv
from envs.stream.events import Stream
from envs.stream.log import StreamLog
from envs.stream.session import StreamConfig, StreamSession, stream_record
from planner.errors import StrategyError
from planner.report.stream.data import StreamData, stream_sums
from planner.schema.stream import StreamRecord
from policies.baselines import make_baseline
from policies.stream.worlds import world_jobs
from tests.envs.stream.conftest import Episode, MakeTables, job

MODELS = ("bert-large", "vit-h")


class Followed(Episode):
    """An episode that is kept as a session would keep it."""

    log: StreamLog | None = None

    def _go_on(self) -> None:
        if self.log is None:
            places = len(self.state.waiting.model)
            self.log = StreamLog(self.tables, self.stream, places)
        super()._go_on()
        self.log.went_on(self.state)

    def decide(self, action: int) -> int:
        from envs.stream.decisions import decide

        outcome = decide(self.tables, self.state, self.options, self.rewards, action)
        assert self.log is not None
        self.log.decided(self.state, action - 1, outcome)
        self._go_on()
        return outcome

    @property
    def kept(self) -> StreamLog:
        assert self.log is not None
        return self.log


def test_ends_that_others_put_off_are_kept(make_tables: MakeTables) -> None:
    # The closed forms of test_contention: two jobs take turns on one uplink.
    tables = make_tables(
        job("talk", 80), share={"talk": 1.0}, oversubscription=2.0, spread=3
    )
    episode = Followed(tables, [(0.0, 0, 0.6), (10.0, 0, 1.0), (11.0, 0, 1.0)])
    both = episode.choice(2, 2)
    for action in (both, both, 0):
        episode.decide(action)
    first, second, third = episode.kept.jobs
    assert (first.start_s, first.end_s) == (0.0, pytest.approx(70.0))
    assert (second.start_s, second.end_s) == (10.0, pytest.approx(80.0))
    # Due at 48 s, put off to 70 s by the second.
    assert (first.outcome, second.outcome) == ("late", "met")
    assert (third.outcome, third.asked, third.decided_s) == ("refused", 0, 11.0)
    assert not set(first.devices) & set(second.devices)
    assert first.done == second.done == 1.0


def test_jobs_that_wait_are_told_apart(make_tables: MakeTables) -> None:
    # One place to run at a time: eight devices for every job.
    tables = make_tables(job("all", 80), least={"all": 8})
    jobs = [(0.0, 0, 1.0), (1.0, 0, 0.2), (2.0, 0, 1.0), (3.0, 0, 1.0), (3.5, 0, 1.0)]
    episode = Followed(tables, jobs, horizon_s=25.0, max_waiting=3)
    whole = episode.choice(8, 4)
    episode.decide(whole)
    while not episode.over:
        if episode.options.possible[whole - 1]:
            episode.decide(whole)
        else:
            episode.wait()
    told = [(one.outcome, one.decided_s) for one in episode.kept.jobs]
    # The second may take 16 s and must begin by 7 s; the last finds no place to wait.
    # At 10 s the first ends: the second is given up, the third begins, then the fourth.
    assert told == [
        ("met", 0.0),
        ("late", 10.0),
        ("met", 10.0),
        ("unfinished", 20.0),
        ("no_room", 3.5),
    ]
    episode.kept.measure(episode.state)
    assert episode.kept.jobs[3].done == pytest.approx(0.5)


@pytest.mark.parametrize("waiting", [0, 1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_is_kept(
    make_tables: MakeTables, waiting: int, seed: int
) -> None:
    """Crowded clusters with slow links and random decisions, some at equal times."""
    generator = np.random.default_rng(seed)
    tables = make_tables(
        job("talk", 80),
        job("half", 30),
        share={"talk": 0.9, "half": 0.5},
        spread=3,
        oversubscription=4.0,
    )
    times = np.sort(np.round(generator.uniform(0, 600, 80) * 2) / 2)
    rows = [
        (time, int(generator.integers(2)), float(generator.uniform(0.2, 1.0)))
        for time in times.tolist()
    ]
    episode = Followed(tables, rows, horizon_s=500.0, max_waiting=waiting)
    last = len(tables.degrees) + (1 if waiting else 0)
    while not episode.over:
        possible = 1 + np.flatnonzero(episode.options.possible)
        choices = [*possible.tolist() * 2, int(generator.integers(last + 1))]
        episode.decide(int(generator.choice(choices)))
    found = Counter(one.outcome for one in episode.kept.jobs)
    summary = asdict(episode.summary())
    assert len(episode.kept.jobs) == summary["arrived"]
    for name in ("met", "late", "refused", "no_room", "unfinished", "undecided"):
        assert found[name] == summary[name], name
    spans = [
        (first, one.start_s, one.end_s or 500.0)
        for one in episode.kept.jobs
        for run in one.devices
        for first in range(run[0], run[1] + 1)
    ]
    for device in range(8):
        mine = sorted((a, b) for d, a, b in spans if d == device and a is not None)
        assert all(b <= start + 1e-6 for (_, b), (start, _) in pairwise(mine))


@cache
def _env(waiting: int) -> JobStreamEnv:
    return JobStreamEnv(
        cluster="dgx-a100:2",
        jobs=world_jobs(MODELS),
        law=StreamLaw(load=1.3, sizes=(0.5, 1.0)),
        max_waiting=waiting,
        observe=False,
        record=True,
    )


def _played(env: JobStreamEnv, policy: str, seed: int) -> StreamRecord:
    made = make_baseline(policy, env.tables, seed)
    obs, info = env.reset(seed=seed)
    while not env.session.over:
        action = made.predict(obs, env.action_masks())
        obs, _, _, _, info = env.step(np.int64(action))
    record = info["record"]
    assert isinstance(record, StreamRecord)
    np.testing.assert_equal(record.summary, info["summary"])
    return record


@pytest.mark.parametrize("waiting", [0, 3])
@pytest.mark.parametrize("policy", ["min_feasible", "random", "constant_8", "para_max"])
def test_rows_come_to_the_summary(policy: str, waiting: int) -> None:
    env = _env(waiting)
    for seed in range(2):
        record = _played(env, policy, seed)
        # Names, numbers and validation survive a file.
        again = StreamRecord.from_json(record.to_json())
        assert again == record
        sums = stream_sums(StreamData(record=again, name=policy))
        for name, value in record.summary.items():
            counted = float(value).is_integer() and abs(value) < 1e6
            expected = value if counted else pytest.approx(value, rel=1e-9)
            if name.startswith("mean") or not counted:
                expected = pytest.approx(value, rel=1e-9, nan_ok=True)
            assert sums[name] == expected, name


def test_the_record_says_where_it_was() -> None:
    session = StreamSession(
        StreamConfig(cluster="dgx-a100:2", jobs=world_jobs(MODELS), record=True)
    )
    stream = Stream(
        time_s=np.array([0.0, 5.0]),
        model=np.array([1, 0]),
        beta=np.array([1.0, 1.0]),
        size=np.array([1.0, 1.0]),
    )
    session.start(stream, 100.0, 10.0)
    first = int(np.flatnonzero(session.options.possible)[0])
    session.decide(1 + first)
    _, info = session.decide(0)
    record = info["record"]
    assert record.cluster.hosts == ((2, 8),)
    assert [model.name for model in record.models] == list(MODELS)
    assert record.jobs.outcome == ("unfinished", "refused")
    (plan,) = record.plans
    assert (plan.model, plan.degree) == (1, session.shapes[first].devices)
    assert plan.label.endswith("on 1 host")
    assert record.jobs.done[0] == pytest.approx(100.0 / plan.alone_s)
    assert record.to_json() == stream_record(session).to_json()


def test_nothing_is_kept_unless_asked() -> None:
    session = StreamSession(
        StreamConfig(cluster="dgx-a100:2", jobs=world_jobs(MODELS), observe=False)
    )
    session.begin(np.random.default_rng(0))
    assert session.log is None
    with pytest.raises(StrategyError, match="give record=True"):
        stream_record(session)
