"""What the network sees, what training wants, and that it gets it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from planner.errors import StrategyError
from policies.piper import training
from policies.piper.candidates import lay_out
from policies.piper.features import CUTS, LAYERS, WHOLE, observe
from policies.piper.learning import (
    Lesson,
    draw_lessons,
    imitation_loss,
    log_shares,
    reward_of,
    set_loss,
    time_loss,
)
from policies.piper.network import NetworkConfig, PiperNetwork, batch_of
from policies.piper.saved import load_policy
from policies.piper.training import TrainConfig, train
from tests.policies.piper.conftest import SMALL

TINY = TrainConfig(
    steps=4,
    tasks=3,
    fewest=3,
    most=8,
    pool=6,
    validation=2,
    every=2,
    network=NetworkConfig(width=8, layers=1),
    world=SMALL,
)


def test_what_is_seen_has_no_units(lessons: list[Lesson]) -> None:
    for lesson in lessons:
        task, seen = lesson.task, lesson.seen
        assert seen.nodes.shape == (len(task), len(LAYERS))
        assert seen.cuts.shape == (len(lesson.layout.has), len(CUTS))
        assert seen.whole.shape == (len(WHOLE),)
        for part in (seen.nodes, seen.cuts, seen.whole):
            assert np.isfinite(part).all()
            assert np.abs(part).max() < 12
        kb, ms = 1024.0, 1000.0
        other = replace(
            task,
            time=task.time * ms,
            bandwidth=task.bandwidth / kb / ms,
            memory_bytes=task.memory_bytes / kb,
            **{
                name: getattr(task, name) / kb
                for name in (
                    "weight_bytes",
                    "memory_each",
                    "memory_once",
                    "edge_bytes",
                    "sync_in",
                    "sync_out",
                )
            },
        )
        again = observe(other, lay_out(other))
        np.testing.assert_allclose(again.nodes, seen.nodes, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(again.cuts, seen.cuts, rtol=1e-4, atol=1e-5)


def test_tasks_side_by_side_are_read_as_alone(
    lessons: list[Lesson], network: PiperNetwork
) -> None:
    seen = [lesson.seen for lesson in lessons[:3]]
    with torch.inference_mode():
        scores, times = network(batch_of(seen))
        for one, row, time in zip(seen, scores, times, strict=True):
            alone, its = network(batch_of([one]))
            torch.testing.assert_close(alone[0], row, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(its[0], time, rtol=1e-4, atol=1e-4)


def test_each_part_of_the_work_gives_one_suffix() -> None:
    scores = torch.randn(10)
    part = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 4])
    share = log_shares(scores, part).exp()
    for k in (0, 1, 2, 4):
        assert float(share[part == k].sum()) == pytest.approx(1.0, abs=1e-5)


def test_slopes_of_sets_point_to_better_ones(lessons: list[Lesson]) -> None:
    """Down the loss by scores alone, the mean reward of a task rises."""
    rng = np.random.default_rng(0)
    lesson = next(lesson for lesson in lessons if len(lesson.used) > 2)
    scores = torch.zeros(len(lesson.layout.has), requires_grad=True)
    rewards = []
    for _ in range(60):
        loss, reward = set_loss(lesson, scores, samples=8, kept=6, rng=rng)
        (slope,) = torch.autograd.grad(loss, scores)
        with torch.no_grad():
            scores -= 3.0 * slope
        rewards.append(reward)
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.01


def test_the_best_cuts_are_learnt_from(lessons: list[Lesson]) -> None:
    lesson = next(lesson for lesson in lessons if len(lesson.used) > 2)
    scores = torch.zeros(len(lesson.layout.has), requires_grad=True)
    before = float(imitation_loss(lesson, scores, 6).detach())
    (slope,) = torch.autograd.grad(imitation_loss(lesson, scores, 6), scores)
    after = (scores - 5 * slope).detach()
    assert float(imitation_loss(lesson, after, 6)) < before
    alone = replace(lesson, used=np.empty(0, dtype=np.int64))
    assert float(imitation_loss(alone, scores, 6).detach()) == 0


def test_rewards_are_nothing_for_the_best_known(lessons: list[Lesson]) -> None:
    for lesson in lessons[:5]:
        even = np.zeros(len(lesson.layout.has))
        assert reward_of(lesson, even, 10**6) == pytest.approx(0.0, abs=6e-3)
    few = [reward_of(x, np.zeros(len(x.layout.has)), 1) for x in lessons]
    assert min(few) < -0.02
    assert max(few) < 6e-3


def test_the_expected_time_is_learnt_from(lessons: list[Lesson]) -> None:
    known = torch.tensor([float(np.log(x.best / x.least)) for x in lessons])
    assert float(time_loss(lessons, known)) == pytest.approx(0.0, abs=1e-6)
    assert float(time_loss(lessons, known + 0.1)) > 0


def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = train(TINY, tmp_path / "whole")
    train(TINY, tmp_path / "parts", stop_after=2)
    parts = train(TINY, tmp_path / "parts")
    for one, other in zip(
        whole.network.parameters(), parts.network.parameters(), strict=True
    ):
        torch.testing.assert_close(one, other)
    assert list((tmp_path / "whole" / "events").iterdir())
    assert load_policy(tmp_path / "parts" / "policy").notes == whole.notes
    with pytest.raises(StrategyError, match=r"other settings \(rate differ\)"):
        train(replace(TINY, rate=1e-4), tmp_path / "whole")


def test_training_learns_the_time(tmp_path: Path, lessons: list[Lesson]) -> None:
    config = replace(TINY, steps=80, every=80, judged=0, tasks=6, pool=24, rate=1e-2)
    made = train(config, tmp_path)
    state = torch.load(tmp_path / "checkpoint" / "run.pt", weights_only=True)
    made.network.load_state_dict(state["network"])
    torch.manual_seed(config.seed)
    fresh = PiperNetwork(config.network)
    batch = batch_of([lesson.seen for lesson in lessons])
    with torch.inference_mode():
        late, before = (
            float(time_loss(lessons, net(batch)[1])) for net in (made.network, fresh)
        )
    assert late < before / 2


def test_tasks_to_learn_from_are_drawn_and_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    for name in ("read_text", "read_bytes", "open"):
        monkeypatch.setattr(Path, name, refuse)
    assert len(draw_lessons(2, "train", SMALL)) == 2


def test_from_the_command_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tmp_path / "settings.json"
    data = {"steps": 1, "pool": 2, "tasks": 1, "validation": 1}
    world = {"least": 12, "most": 20, "devices": 8}
    settings.write_text(json.dumps({**data, "world": world}), encoding="utf-8")
    out = tmp_path / "run"
    with caplog.at_level("INFO"):
        assert training.main(["--out", str(out), "--settings", str(settings)]) == 0
    assert "step 1:" in caplog.text
    assert load_policy(out / "policy").notes["trained_on"]["tasks"] == 2
    settings.write_text(json.dumps({"stpes": 1}), encoding="utf-8")
    assert training.main(["--out", str(out), "--settings", str(settings)]) != 0
    assert "stpes" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"judged": 99},
        {"samples": 1},
        {"fewest": 0},
        {"most": 2},
        {"set_weight": -1.0},
        {"rate": 0.0},
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(StrategyError, match=next(iter(wrong))):
        TrainConfig(**wrong)


def test_a_network_has_a_size() -> None:
    with pytest.raises(StrategyError, match="width=0"):
        NetworkConfig(width=0)
