"""A training run from settings to weights, and one that is killed on the way."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import policies.improvement
import policies.ramp.labels
import policies.ramp.training
from envs.ramp.jobs import RampJobs
from planner.errors import StrategyError
from policies.fitting import FitConfig, LabelConfig
from policies.improvement import ImprovementConfig
from policies.pointer import PointerConfig
from policies.ramp.reinforcement import PPOConfig
from policies.ramp.training import TrainConfig, train
from policies.run_folder import read_settings

FEW = LabelConfig(futures=4, arrivals=8, labelled=0.5)
CONFIG = TrainConfig(
    laws=("A", "B"),
    horizon_s=3e4,
    validation_count=2,
    improvement=ImprovementConfig(
        first_rounds=1,
        rounds=1,
        episodes=8,
        first=FEW,
        later=FEW,
        fit=FitConfig(hidden=8, steps=50),
    ),
    network=PointerConfig(width=8, hidden=8),
    ppo=PPOConfig(
        steps=256,
        value_steps=64,
        evaluate_every=64,
        num_envs=4,
        n_steps=16,
        batch_size=64,
        n_epochs=1,
    ),
)


class _Here:
    """Labels in this process, which has the jobs of the tests."""

    def __init__(self, *args: object) -> None: ...

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *args: object) -> None: ...

    map = staticmethod(map)


@pytest.fixture(autouse=True)
def _jobs_of_the_tests(jobs: RampJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies.improvement, "ProcessPoolExecutor", _Here)
    for module in (policies.ramp.labels, policies.ramp.training):
        monkeypatch.setattr(module, "read_jobs", lambda *args: jobs)


class _Killed(Exception):
    """Stands for the process being killed."""


def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def watch(stage: str, done: int, of: int, gains: tuple[float, ...]) -> None:
        assert len(gains) == 2
        seen.append((stage, done))
        if (stage, done) == ("reinforce", 128) and seen.count((stage, done)) == 1:
            raise _Killed

    run = tmp_path / "run"
    with pytest.raises(_Killed):
        train(CONFIG, run, watch=watch)
    assert seen == [("improve", 1), *(("reinforce", n) for n in (0, 64, 128))]
    seen[:-1] = []
    made = train(CONFIG, run, watch=watch)
    # From the last checkpoint, not from the start.
    assert [done for stage, done in seen if stage == "reinforce"] == [128, 192, 256]
    assert sorted(path.name for path in (run / "policy").iterdir()) == [
        "config.json",
        "policy.safetensors",
    ]
    lines = (run / "progress.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 7
    assert any(path.name.startswith("events.out") for path in run.glob("ppo/**/*"))
    assert made.notes["trained_on"]["laws"] == ["A", "B"]


def test_a_run_of_other_settings_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = replace(CONFIG, ppo=replace(CONFIG.ppo, steps=0))
    train(config, run)
    described = json.loads((run / "config.json").read_text())
    assert described["settings"]["ppo"]["steps"] == 0
    assert described["packages"]["torch"]
    with pytest.raises(StrategyError, match=r"other settings \(seed differ\)"):
        train(replace(config, seed=1), run)
    shutil.rmtree(run / "ppo")
    train(config, run)


def test_settings_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"seed": 3, "ppo": {"steps": 10}, "laws": ["A"]}')
    config = read_settings(path, TrainConfig())
    assert config.seed == 3
    assert config.ppo.steps == 10
    assert config.improvement == ImprovementConfig()
    for text, message in (
        ('{"sead": 3}', "unknown setting 'sead'.*seed"),
        ('{"ppo": {"step": 3}}', "unknown setting of ppo 'step'.*steps"),
        ('{"ppo": {"steps": "many"}}', r"ppo\.steps: Input should be"),
        ("[", "EOF while parsing"),
    ):
        path.write_text(text)
        with pytest.raises(StrategyError, match=message):
            read_settings(path, TrainConfig())
    path.write_text('{"network": {"hidden": 8}}')
    with pytest.raises(
        StrategyError, match="hidden=8, but improvement ends with 32 units"
    ):
        read_settings(path, TrainConfig())
    with pytest.raises(StrategyError, match="cannot be read"):
        read_settings(tmp_path / "none.json", TrainConfig())
