"""Labels, the fit to them, and rounds of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from envs.ramp.features import NUM_FEATURES
from envs.ramp.history import NUM_HISTORY
from envs.ramp.jobs import RampJobs
from planner.errors import StrategyError
from policies.fitting import (
    FitConfig,
    LabelConfig,
    Labels,
    ScorerNetwork,
    fit,
    fit_loss,
)
from policies.improvement import ImprovementConfig, improve, read_round
from policies.ramp.evaluation import ReplayValidation, play, validation
from policies.ramp.labels import ReplayWorld, draw_labels, draw_law
from policies.scorer import Scorer, ScorerPolicy, averaged, check_scorer, score

FEW = LabelConfig(futures=4, arrivals=8, labelled=0.5, other_laws=0.5)
HORIZON_S = 5e4


@pytest.fixture(scope="module")
def labels(jobs: RampJobs) -> Labels:
    return draw_labels(jobs, None, None, FEW, 6, 0, HORIZON_S)


def test_labels_are_differences_within_a_decision(labels: Labels) -> None:
    count = len(labels.costs)
    assert count > 30
    assert labels.features.shape == (count, 7, NUM_FEATURES)
    assert labels.history.shape == (count, NUM_HISTORY)
    assert labels.possible[:, 0].all()
    assert (labels.possible.sum(axis=1) > 1).all()
    assert np.abs(labels.costs.sum(axis=1)).max() < 1e-5
    assert not labels.costs[~labels.possible].any()
    assert (labels.variances >= 0).all()
    assert labels.variances[labels.possible].any()
    # To turn a job away costs one job more than to run it, but for what follows.
    assert labels.costs[:, 0].mean() > 0.2


def test_labels_are_drawn_by_seed(jobs: RampJobs, labels: Labels) -> None:
    again = draw_labels(jobs, None, None, FEW, 6, 0, HORIZON_S)
    for one, other in zip(labels, again, strict=True):
        np.testing.assert_array_equal(one, other)
    other = draw_labels(jobs, None, None, FEW, 6, 1, HORIZON_S)
    assert not np.array_equal(other.costs, labels.costs)


def test_a_scorer_decides_and_rolls_out(jobs: RampJobs, labels: Labels) -> None:
    scorer, _ = fit(labels, FitConfig(hidden=8, steps=20))
    for base in (None, scorer):
        made = draw_labels(jobs, scorer, base, FEW, 2, 3, HORIZON_S)
        assert np.isfinite(made.costs).all()
    with pytest.raises(StrategyError, match="no decision was labelled"):
        draw_labels(jobs, scorer, scorer, replace(FEW, labelled=0.0), 1, 0, HORIZON_S)


def test_an_averaged_scorer_says_the_mean_of_what_its_parts_say() -> None:
    generator = np.random.default_rng(0)

    def drawn(hidden: int, last: int) -> Scorer:
        shapes = ((7, hidden), (hidden,), (hidden, last), (last,), (last,))
        return Scorer(*(generator.normal(size=s).astype(np.float32) for s in shapes))

    def said(scorer: Scorer) -> float:
        room = (np.zeros_like(scorer.first_bias), np.zeros_like(scorer.second_bias))
        return float(score(scorer, seen[:5], seen[5:], *room))

    parts = [drawn(4, 3), drawn(6, 6), drawn(2, 5)]
    for _ in range(20):
        seen = generator.normal(size=7).astype(np.float32)
        mean = np.mean([said(part) for part in parts])
        assert said(check_scorer(averaged(parts), 7)) == pytest.approx(mean, rel=1e-4)
    for part, same in zip(parts[0], averaged(parts[:1]), strict=True):
        np.testing.assert_array_equal(part, same)


def test_settings_of_labels_are_checked() -> None:
    with pytest.raises(StrategyError, match=r"labelled=1\.5"):
        LabelConfig(labelled=1.5)
    with pytest.raises(StrategyError, match="futures=1"):
        LabelConfig(futures=1)
    with pytest.raises(StrategyError, match="learning_rate=0"):
        FitConfig(learning_rate=0)
    with pytest.raises(StrategyError, match="first_rounds=5 of rounds=2"):
        ImprovementConfig(first_rounds=5, rounds=2)


def test_laws_are_those_of_the_benchmark_and_others() -> None:
    generator = np.random.default_rng(0)
    assert {draw_law(0.0, generator).interval_s for _ in range(20)} == {1000.0}
    others = [draw_law(1.0, generator) for _ in range(40)]
    assert {law.process for law in others} == {"fixed", "poisson", "bursty"}
    assert all(1000 / 1.5 <= law.interval_s <= 2000 for law in others)


def test_loss_counts_what_is_wrong_about_differences() -> None:
    costs = torch.tensor([[0.5, -0.5, 0.0], [1.0, 0.0, -1.0]])
    possible = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    weight = torch.tensor([1.0, 3.0])
    shifted = costs + torch.tensor([[7.0], [-2.0]])
    assert float(fit_loss(shifted, possible, costs, weight)) == pytest.approx(
        0, abs=1e-9
    )
    # Of the first only: off by 0.5 each way, with 2 of 2 + 3 * 3 weights.
    wrong = shifted + torch.tensor([[1.0, 0.0, 9.0], [0.0, 0.0, 0.0]])
    expected = 2 * 0.5**2 / (2 + 9)
    assert float(fit_loss(wrong, possible, costs, weight)) == pytest.approx(expected)


def test_a_fit_finds_a_scorer_again() -> None:
    torch.manual_seed(1)
    teacher = ScorerNetwork(NUM_FEATURES + NUM_HISTORY, 8)
    generator = np.random.default_rng(0)
    features = generator.random((4000, 4, NUM_FEATURES), dtype=np.float32)
    history = generator.random((4000, NUM_HISTORY), dtype=np.float32)
    possible = generator.random((4000, 4)) < 0.7
    possible[:, 0] = True
    with torch.no_grad():
        scores = teacher(torch.from_numpy(features), torch.from_numpy(history)).numpy()
    mean = (scores * possible).sum(axis=1, keepdims=True) / possible.sum(
        axis=1, keepdims=True
    )
    costs = np.where(possible, scores - mean, 0).astype(np.float32) * 10
    made = Labels(features, history, possible, costs, np.zeros_like(costs))
    scorer, loss = fit(made, FitConfig(hidden=16, steps=300, batch=256), seed=2)
    spread = float((costs**2).sum() / possible.sum())
    assert loss < 0.25 * spread
    further, less = fit(made, FitConfig(hidden=16, steps=100), start=scorer, seed=3)
    assert less < loss
    again, _ = fit(made, FitConfig(hidden=16, steps=100), start=scorer, seed=3)
    np.testing.assert_array_equal(further.first, again.first)


@pytest.fixture(scope="module")
def judged(jobs: RampJobs) -> ReplayValidation:
    return validation(jobs, ("A", "C"), range(50, 52), 5e4)


def test_validation_compares_with_the_best_constant(
    jobs: RampJobs, judged: ReplayValidation
) -> None:
    from policies.baselines import Constant

    gains = judged.gains(lambda env: Constant(env.tables, 4))
    assert len(gains) == 2
    assert max(gains) <= 1e-9
    assert all(0 < rate < 1 for rate in judged.baselines)
    with pytest.raises(StrategyError, match="counting up by 1"):
        play(lambda env: Constant(env.tables, 4), jobs, "A", [1, 3])


def test_rounds_go_on_where_they_stopped(
    jobs: RampJobs,
    judged: ReplayValidation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed after one round of two, and then once more from the start."""
    import policies.improvement
    import policies.ramp.labels

    class Here:
        """In this process: the profiles of the test are not in a folder."""

        def __init__(self, *args: object) -> None: ...

        def __enter__(self) -> Here:
            return self

        def __exit__(self, *args: object) -> None: ...

        map = staticmethod(map)

    monkeypatch.setattr(policies.improvement, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(policies.ramp.labels, "read_jobs", lambda *args: jobs)
    world = ReplayWorld(profiles=None, models=(), horizon_s=HORIZON_S)

    def judge(scorer: Scorer) -> tuple[float, ...]:
        return judged.gains(lambda _: ScorerPolicy(scorer))

    config = ImprovementConfig(
        first_rounds=1,
        rounds=2,
        episodes=8,
        first=FEW,
        later=FEW,
        fit=FitConfig(hidden=8, steps=30),
    )
    seen: list[int] = []
    whole = improve(
        config,
        world,
        judge,
        tmp_path / "a",
        seed=5,
        watch=lambda r: seen.append(r.number),
    )
    improve(replace(config, rounds=1), world, judge, tmp_path / "b", seed=5)
    best = improve(config, world, judge, tmp_path / "b", seed=5)
    assert seen == [0, 1]
    assert best.number == whole.number
    for number in range(2):
        one, other = (read_round(tmp_path / name, number) for name in "ab")
        np.testing.assert_array_equal(one.scorer.first, other.scorer.first)
        assert one.gains == other.gains
    assert best.gains == pytest.approx(judge(best.scorer))
    ended = replace(config, last=FitConfig(hidden=4, steps=20), last_fits=2)
    last = improve(ended, world, judge, tmp_path / "b", seed=5)
    assert last.number == 2
    # The first of the two goes on from the last round, and has its size.
    assert len(last.scorer.first_bias) == ended.hidden == 12
    alone = replace(config, last=FitConfig(hidden=4, steps=20))
    first = improve(alone, world, judge, tmp_path / "a", seed=5).scorer
    np.testing.assert_array_equal(last.scorer.first[:, :8], first.first)
    (tmp_path / "b" / "round_002.npz").unlink()
    (tmp_path / "b" / "round_001.npz").write_bytes(b"half")
    with pytest.raises(StrategyError, match=r"round_001\.npz is no round"):
        improve(config, world, judge, tmp_path / "b", seed=5)
