"""Labels, worlds and validation of the job stream on any cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envs.stream.features import NUM_CANDIDATE_FEATURES
from envs.stream.observation import NUM_SHARED
from planner.errors import StrategyError, UnknownNameError
from policies.baselines import make_baseline
from policies.by_name import make_stream_policy
from policies.fitting import FitConfig, LabelConfig, Labels, fit
from policies.pointer import PointerConfig, PointerNetwork
from policies.scorer import Scorer, ScorerPolicy
from policies.stream.evaluation import StreamCase, play_stream, stream_validation
from policies.stream.labels import StreamWorlds
from policies.stream.lookahead import costs_of
from policies.stream.worlds import (
    HELD_OUT,
    TRAINED_ON,
    StreamWorld,
    draw_stream_law,
    world_jobs,
)

FEW = LabelConfig(futures=3, arrivals=6, labelled=0.5)
SMALL = StreamWorld(cluster="dgx-a100:2", models=("bert-large", "vit-h"))
#: More actions: more shapes, and one to let a job wait.
LARGE = StreamWorld(
    cluster="dgx-a100:4", models=("bert-large", "gpt2-xl"), max_waiting=3
)
WORLDS = StreamWorlds(worlds=(SMALL, LARGE), intervals=30.0)


@pytest.fixture(scope="module")
def labels() -> Labels:
    return WORLDS.draw_labels(None, None, FEW, 8, 0)


@pytest.fixture(scope="module")
def scorer(labels: Labels) -> Scorer:
    return fit(labels, FitConfig(hidden=8, steps=30))[0]


def test_labels_are_differences_in_worlds_of_any_size(labels: Labels) -> None:
    count = len(labels.costs)
    most = int(LARGE.session().observer.action_space.n)
    assert count > 20
    assert labels.features.shape == (count, most, NUM_CANDIDATE_FEATURES)
    assert labels.history.shape == (count, NUM_SHARED)
    assert labels.possible[:, 0].all()
    assert (labels.possible.sum(axis=1) > 1).all()
    assert labels.possible[:, -1].any()
    assert np.abs(labels.costs.sum(axis=1)).max() < 1e-5
    assert not labels.costs[~labels.possible].any()
    assert np.isfinite(labels.costs).all()
    assert np.isfinite(labels.variances).all()
    # To turn a job away costs one job more than to run it, but for what follows.
    assert labels.costs[:, 0].mean() > 0.1


def test_labels_are_drawn_by_seed(labels: Labels, scorer: Scorer) -> None:
    again = WORLDS.draw_labels(None, None, FEW, 8, 0)
    for one, other in zip(labels, again, strict=True):
        np.testing.assert_array_equal(one, other)
    by_scorer = WORLDS.draw_labels(scorer, scorer, FEW, 2, 1)
    assert np.isfinite(by_scorer.costs).all()
    with pytest.raises(StrategyError, match="no decision was labelled"):
        WORLDS.draw_labels(None, None, replace(FEW, labelled=0.0), 1, 0)
    with pytest.raises(StrategyError, match="0 worlds"):
        StreamWorlds(worlds=())


def test_costs_are_jobs_and_their_variances_those_of_differences() -> None:
    rewards = np.array([[1.0, 3.0, -np.inf], [-3.0, -3.0, -np.inf]])
    costs, variances = costs_of(rewards)
    np.testing.assert_allclose(costs, [0.5, 0.0, np.inf])
    # Differences to the mean of the two: 0.5 and 0, halves of which are the first's.
    np.testing.assert_allclose(variances[:2], [0.0625, 0.0625])


def test_a_network_begins_as_a_scorer_that_looks_at_the_job(scorer: Scorer) -> None:
    from policies.compact import PointerDecider
    from policies.pointer import widths_of

    env = StreamCase(world=LARGE, load=1.5, intervals=40.0).env(observe=True)
    network = PointerNetwork(
        env.graphs,
        env.device_graph,
        widths_of(env.observation_space),
        PointerConfig(hidden=8, width=8),
    )
    network.start_from(scorer)
    obs, _ = env.reset(seed=1)
    ended, taken = False, set()
    while not ended:
        mask = env.action_masks()
        action = ScorerPolicy(scorer).predict(obs, mask)
        assert PointerDecider(network).predict(obs, mask) == action
        taken.add(int(action))
        obs, _, ended, *_ = env.step(np.int64(action))
    assert len(taken) > 1
    small = scorer._replace(first=scorer.first[:70])
    with pytest.raises(StrategyError, match="a scorer of 70 inputs"):
        ScorerPolicy(small).predict(env.reset(seed=1)[0], env.action_masks())


def test_gains_are_against_the_best_fixed_policy(scorer: Scorer) -> None:
    cases = [StreamCase(world=SMALL, load=load, intervals=40.0) for load in (0.3, 2.0)]
    judged = stream_validation(cases, (5, 6))
    assert judged.baselines[1] > 0
    for case, name, least in zip(cases, judged.names, judged.baselines, strict=True):
        env = case.env(observe=False)

        def make(env: object, name: str = name) -> object:
            return make_baseline(name, env.tables)  # type: ignore[attr-defined]

        played = play_stream(make, env, (5, 6))  # type: ignore[arg-type]
        assert played.blocking_rate == least
        assert len(played.summaries) == 2
    gains = judged.gains(scorer)
    for case, gain, least in zip(cases, gains, judged.baselines, strict=True):
        env = case.env(observe=True)
        rate = play_stream(lambda _: ScorerPolicy(scorer), env, (5, 6)).blocking_rate
        assert gain == pytest.approx(1 - rate / least if least else -rate)
    with pytest.raises(StrategyError, match="no seeds"):
        play_stream(lambda env: make_baseline("random", env.tables), env, ())


def test_what_is_held_out_is_not_trained_on() -> None:
    for world in TRAINED_ON:
        assert not set(world.models) & set(HELD_OUT)
    generator = np.random.default_rng(0)
    laws = [draw_stream_law(generator) for _ in range(40)]
    assert {law.process for law in laws} == {"poisson", "bursty"}
    assert min(law.load for law in laws) < 0.6 < 1.5 < max(law.load for law in laws)
    with pytest.raises(UnknownNameError, match="gpt5"):
        world_jobs(("gpt5",))
    with pytest.raises(StrategyError, match="at least one job"):
        world_jobs(())


def test_weights_of_the_replay_are_refused() -> None:
    from policies.saved import shipped_folder

    env = StreamCase(world=SMALL, load=1.0, intervals=5.0).env(observe=True)
    with pytest.raises(StrategyError, match="is of a policy for observations"):
        make_stream_policy("learned", env, folder=shipped_folder("job_stream"))
    with pytest.raises(UnknownNameError, match="unknown policy 'best'"):
        make_stream_policy("best", env)
