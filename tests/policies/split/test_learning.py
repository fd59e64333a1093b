"""What training wants, and that it gets it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from planner.errors import StrategyError
from planner.split import Groups, best_along, standard_orders
from policies.split import learning, training
from policies.split.features import FEATURES, PRIORS, observe
from policies.split.hits import find_hits
from policies.split.learning import credit, draw_lessons, hits_loss, order_slopes
from policies.split.network import NetworkConfig, SplitNetwork, batch_of
from policies.split.saved import load_policy
from policies.split.standing import STANDING, stand
from policies.split.training import TrainConfig, train
from policies.split.worlds import WorldConfig

SMALL = WorldConfig(least=16, most=40)
TINY = TrainConfig(
    steps=12,
    tasks=2,
    examples=8,
    splits=2,
    tries=48,
    pool=24,
    validation=3,
    every=6,
    rate=1e-2,
    network=NetworkConfig(width=8, layers=1),
    world=SMALL,
)


def test_what_is_seen_has_no_units(pool: list[Groups]) -> None:
    for groups in pool:
        seen = observe(groups)
        assert seen.nodes.shape == (len(groups), len(FEATURES))
        assert seen.priors.shape == (len(groups), len(PRIORS))
        assert np.isfinite(seen.nodes).all()
        assert np.abs(seen.nodes).max() < 12
        order = next(iter(standard_orders(groups)))
        split = best_along(groups, order)
        if split is not None:
            standing = stand(groups, order, split)
            assert standing.shape == (len(groups), len(STANDING))
            assert 0 <= standing.min() <= standing.max() <= 2
            assert standing[:, STANDING.index("most_loaded")].any()


def test_work_around_a_group_is_what_must_come_before_and_after() -> None:
    groups = draw_lessons(1, "test", SMALL)[0].groups
    before = observe(groups).nodes[:, FEATURES.index("before")]
    for at in range(len(groups)):
        seen, left = set(), [at]
        while left:
            g = left.pop()
            near = groups.before[groups.before_start[g] : groups.before_start[g + 1]]
            left += [int(u) for u in near if int(u) not in seen]
            seen.update(int(u) for u in near)
        share = groups.accelerator_ms[list(seen)].sum() / groups.accelerator_ms.sum()
        assert before[at] == pytest.approx(share, abs=1e-5)


def test_tasks_side_by_side_are_read_as_alone(
    pool: list[Groups], network: SplitNetwork
) -> None:
    seen = [observe(groups) for groups in pool[:3]]
    together = batch_of(seen)
    parts = together.each(network.orders(together, network.encode(together)))
    for one, part in zip(seen, parts, strict=True):
        alone = batch_of([one])
        torch.testing.assert_close(
            network.orders(alone, network.encode(alone)), part, rtol=1e-4, atol=1e-4
        )


def test_credit_of_the_best_is_what_would_be_lost_without_it() -> None:
    rewards = np.array([[0.0, 0.4], [0.1, 0.1]])
    scale = rewards.std() + 1e-2
    np.testing.assert_allclose(
        credit(rewards, 1.0) * scale, [[0.0, 4 * 0.3], [0.0, 0.0]], atol=1e-12
    )
    np.testing.assert_allclose(
        credit(rewards, 0.0) * scale, [[-0.4, 0.4], [0.0, 0.0]], atol=1e-12
    )


def test_slopes_of_orders_point_to_better_ones() -> None:
    """Up the slopes by scores alone, the mean reward of a task rises."""
    lessons = draw_lessons(12, "test", SMALL)
    lesson = next(x for x in lessons if x.groups.task.name.startswith("towers"))
    scores = np.zeros((2, len(lesson.groups)))
    rng = np.random.default_rng(0)
    rewards = []
    for _ in range(150):
        slope, reward = order_slopes(lesson, scores, samples=8, best_share=0.0, rng=rng)
        scores += 0.5 * slope
        rewards.append(reward)
    assert np.mean(rewards[-20:]) > np.mean(rewards[:20]) + 0.01


def test_hits_make_splits_better_and_are_learnt(network: SplitNetwork) -> None:
    lessons = draw_lessons(6, "train", SMALL, splits=2, tries=48)
    examples = [(lesson.seen, hits) for lesson in lessons for hits in lesson.hits]
    assert len(examples) > 3
    for _, hits in examples:
        assert hits.share.sum() == pytest.approx(1.0, abs=1e-5)
        assert (hits.share >= 0).all()
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
    before = float(hits_loss(network, examples).detach())
    for _ in range(40):
        loss = hits_loss(network, examples)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
    assert float(hits_loss(network, examples).detach()) < before - 0.3


def test_hits_of_an_even_network_cost_the_log_of_the_moves() -> None:
    lesson = next(x for x in draw_lessons(6, "train", SMALL, splits=1) if x.hits)
    loss = hits_loss(SplitNetwork(), [(lesson.seen, lesson.hits[0])])
    assert float(loss.detach()) == pytest.approx(
        math.log(2 * len(lesson.groups)), rel=1e-5
    )


def test_each_split_with_hits_is_better_than_the_one_before() -> None:
    groups = draw_lessons(8, "train", SMALL)[4].groups
    found = list(find_hits(groups, splits=4, tries=64, rng=np.random.default_rng(1)))
    again = list(find_hits(groups, splits=4, tries=64, rng=np.random.default_rng(1)))
    assert found
    assert len(found) == len(again)
    np.testing.assert_array_equal(found[0].share, again[0].share)


def test_training_learns_hits_it_has_not_seen(tmp_path: Path) -> None:
    config = TrainConfig(
        steps=60,
        tasks=1,
        examples=16,
        splits=2,
        tries=64,
        pool=60,
        validation=1,
        every=60,
        rate=5e-3,
        network=NetworkConfig(width=16, layers=1),
        world=SMALL,
    )
    losses: list[float] = []
    made = train(config, tmp_path, watch=lambda *told: losses.append(told[2]))
    state = torch.load(tmp_path / "checkpoint" / "run.pt", weights_only=True)
    made.network.load_state_dict(state["network"])
    lessons = draw_lessons(20, "validation", SMALL, splits=2, tries=64)
    examples = [(lesson.seen, hits) for lesson in lessons for hits in lesson.hits]
    even = hits_loss(SplitNetwork(config.network), examples)
    assert float(hits_loss(made.network, examples).detach()) < float(even.detach())


def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = train(TINY, tmp_path / "whole")
    train(TINY, tmp_path / "parts", stop_after=6)
    parts = train(TINY, tmp_path / "parts")
    for one, other in zip(
        whole.network.parameters(), parts.network.parameters(), strict=True
    ):
        torch.testing.assert_close(one, other)
    assert list((tmp_path / "whole" / "events").iterdir())
    assert parts.notes == whole.notes
    assert load_policy(tmp_path / "parts" / "policy").notes == whole.notes
    with pytest.raises(StrategyError, match=r"other settings \(rate differ\)"):
        train(TrainConfig(**{**_fields(TINY), "rate": 1e-3}), tmp_path / "whole")


def _fields(config: TrainConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_training_draws_its_tasks_and_reads_none() -> None:
    for module in (learning, training):
        names = set(vars(module))
        assert not names & {"load_tasks", "read_task", "parse_task", "read_piper"}


def test_from_the_command_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tmp_path / "settings.json"
    data = {"steps": 1, "pool": 4, "tasks": 1, "validation": 1, "tries": 8}
    world = {"least": 16, "most": 24}
    settings.write_text(json.dumps({**data, "world": world}), encoding="utf-8")
    out = tmp_path / "run"
    with caplog.at_level("INFO"):
        assert training.main(["--out", str(out), "--settings", str(settings)]) == 0
    assert "step 1:" in caplog.text
    assert load_policy(out / "policy").notes["trained_on"]["tasks"] == 4
    settings.write_text(json.dumps({"stpes": 1}), encoding="utf-8")
    assert training.main(["--out", str(out), "--settings", str(settings)]) != 0
    assert "stpes" in caplog.text


def test_settings_that_make_no_sense() -> None:
    for wrong in ({"steps": 0}, {"best_share": 2.0}, {"rate": 0.0}, {"samples": 1}):
        with pytest.raises(StrategyError, match=next(iter(wrong))):
            TrainConfig(**wrong)
    with pytest.raises(StrategyError, match="width=0"):
        NetworkConfig(width=0)
