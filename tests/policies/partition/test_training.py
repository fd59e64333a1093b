"""A training run of the partitioner: stopped or not, it comes to the same weights."""

from __future__ import annotations

import json
import multiprocessing
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.errors import (
    ExecutionError,
    PlanFileError,
    StrategyError,
    UnknownNameError,
)
from policies.partition.network import (
    NetworkConfig,
    SavedNetwork,
    load_network,
    save_network,
)
from policies.partition.settings import (
    LearningConfig,
    PartitionTrainConfig,
)
from policies.partition.training import WatchedStep, train_partition
from policies.run_folder import read_settings
from tests.plans import TINY

#: Three hosts of two kinds, on links of two speeds.
LAB = TINY.parent / "cluster.yaml"


@pytest.fixture(scope="module")
def config() -> PartitionTrainConfig:
    return PartitionTrainConfig(
        clusters=("dgx-a100:1", str(LAB)),
        models=(f"hf:{TINY}",),
        seq_len=32,
        start="new",
        steps=12,
        first_examples=3,
        examples=4,
        example_every=4,
        evaluate_every=4,
        checkpoint_every=2,
        validation_count=2,
        network=NetworkConfig(width=8, layers=1, hidden=8),
        learning=LearningConfig(meshes=2, draws=4, rounds=1),
    )


@pytest.fixture(scope="module")
def trained(
    config: PartitionTrainConfig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, SavedNetwork, list[WatchedStep]]:
    seen: list[WatchedStep] = []
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, train_partition(config, folder, watch=seen.append), seen


def _weights(saved: SavedNetwork) -> dict[str, torch.Tensor]:
    return saved.network.state_dict()


def test_a_run_leaves_weights_and_what_they_were_made_from(
    config: PartitionTrainConfig,
    trained: tuple[Path, SavedNetwork, list[WatchedStep]],
) -> None:
    folder, made, seen = trained
    assert [one.step for one in seen] == list(range(1, 13))
    assert [one.examples for one in seen] == [3] * 4 + [4] * 8
    lines = (folder / "progress.jsonl").read_text().splitlines()
    said = [json.loads(line) for line in lines]
    assert [line["step"] for line in said] == [4, 8, 12]
    validated = made.notes["validated_on"]
    chosen = min(said, key=lambda one: one["regret_at_12"] - one["orders_best"])
    assert validated["best_step"] == chosen["step"]
    assert validated["orders_best"] == chosen["orders_best"]
    # Some validation world has orders that differ, and they were priced.
    assert validated["orders_mean"] != 0.0
    assert validated["orders_best"] >= validated["orders_mean"]
    assert made.notes["trained_on"]["steps"] == 12
    assert made.notes["trained_on"]["worlds"] == 5
    assert made.notes["trained_on"]["clusters"] == list(config.clusters)
    assert made.notes["versions"]["torch"] == torch.__version__
    assert load_network(folder / "policy").checkpoint == made.checkpoint
    assert list((folder / "board").iterdir())
    anew = torch.load(folder / "checkpoint.pt", weights_only=True)["network"]
    assert set(anew) == set(_weights(made))


class _Killed(Exception):
    """Stands for the process being killed."""


def test_a_run_that_is_killed_comes_to_the_same_weights(
    config: PartitionTrainConfig,
    trained: tuple[Path, SavedNetwork, list[WatchedStep]],
    tmp_path: Path,
) -> None:
    def kill(one: WatchedStep) -> None:
        if one.step == 7:
            raise _Killed

    with pytest.raises(_Killed):
        train_partition(config, tmp_path, watch=kill)
    assert not (tmp_path / "policy").exists()
    steps: list[int] = []
    made = train_partition(config, tmp_path, watch=lambda one: steps.append(one.step))
    assert steps == list(range(7, 13))
    assert made.checkpoint == trained[1].checkpoint
    assert made.notes["validated_on"] == trained[1].notes["validated_on"]
    # A run that is done says what it came to, and does no more.
    again = train_partition(config, tmp_path, watch=lambda one: steps.append(one.step))
    assert len(steps) == 6
    assert again.checkpoint == made.checkpoint


@pytest.mark.further
def test_other_processes_prepare_the_same_examples(
    config: PartitionTrainConfig,
    trained: tuple[Path, SavedNetwork, list[WatchedStep]],
    tmp_path: Path,
) -> None:
    before = {*multiprocessing.active_children()}
    made = train_partition(config, tmp_path, workers=2)
    assert made.checkpoint == trained[1].checkpoint
    assert {*multiprocessing.active_children()} <= before


def test_a_run_begins_with_weights(
    config: PartitionTrainConfig,
    trained: tuple[Path, SavedNetwork, list[WatchedStep]],
    tmp_path: Path,
) -> None:
    begun = str(trained[0] / "policy")
    # So small a step that the weights stay what they were.
    still = replace(config, start=begun, steps=1, rate=1e-12, last_rate=1e-12)
    # The sizes are those of the weights.
    still = replace(still, network=NetworkConfig(width=16))
    made = train_partition(still, tmp_path)
    assert made.notes["started_from"] == trained[1].checkpoint
    for name, weight in _weights(made).items():
        torch.testing.assert_close(weight, _weights(trained[1])[name])
    assert made.network.config.width == 8


def test_runs_that_call_their_examples_lessons_go_on(
    config: PartitionTrainConfig,
    trained: tuple[Path, SavedNetwork, list[WatchedStep]],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    text = (trained[0] / "config.json").read_text()
    for new, old in (
        ("first_examples", "first_lessons"),
        ("examples", "lessons"),
        ("example_every", "lesson_every"),
    ):
        assert f'"{new}"' in text
        text = text.replace(f'"{new}"', f'"{old}"')
    (run / "config.json").write_text(text)
    state = torch.load(trained[0] / "checkpoint.pt", weights_only=True)
    state["lessons"] = state.pop("examples")
    torch.save(state, run / "checkpoint.pt")
    assert train_partition(config, run).checkpoint == trained[1].checkpoint


def test_minutes_end_a_run(config: PartitionTrainConfig, tmp_path: Path) -> None:
    short = replace(config, minutes=1e-6)
    seen: list[WatchedStep] = []
    made = train_partition(short, tmp_path, watch=seen.append)
    assert made.notes["trained_on"]["steps"] == 1
    assert seen[-1].judged is not None


def test_a_folder_keeps_to_its_settings(
    config: PartitionTrainConfig,
    trained: tuple[Path, SavedNetwork, list[WatchedStep]],
) -> None:
    with pytest.raises(StrategyError, match="other settings \\(seed differ"):
        train_partition(replace(config, seed=1), trained[0])


def test_a_damaged_checkpoint_is_named(
    config: PartitionTrainConfig, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"no checkpoint")
    with pytest.raises(StrategyError, match=r"checkpoint\.pt is damaged"):
        train_partition(config, tmp_path)
    torch.save([1], tmp_path / "checkpoint.pt")
    with pytest.raises(StrategyError, match=r"checkpoint\.pt is damaged"):
        train_partition(config, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StrategyError, match="does not hold the settings of a run"):
        train_partition(config, tmp_path)


def test_weights_that_are_not_finite_are_refused(
    trained: tuple[Path, SavedNetwork, list[WatchedStep]], tmp_path: Path
) -> None:
    made = deepcopy(trained[1].network)
    with torch.no_grad():
        next(made.parameters())[0] = torch.nan
    save_network(made, {}, tmp_path)
    with pytest.raises(StrategyError, match="numbers that are not finite"):
        load_network(tmp_path)


def test_a_step_draws_at_least_one_order() -> None:
    with pytest.raises(StrategyError, match="draws=0 of learning is below 1"):
        LearningConfig(draws=0)


def test_what_cannot_be_read_leaves_no_folder(
    config: PartitionTrainConfig, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(UnknownNameError, match="did you mean 'dgx-a100'"):
        train_partition(replace(config, clusters=("dgx-a10:2",)), run)
    with pytest.raises(UnknownNameError, match="did you mean 'llama3-8b'"):
        train_partition(replace(config, models=("llama3-8",), seq_len=None), run)
    file = tmp_path / "cluster.json"
    file.write_text('{"name": "mine"}')
    with pytest.raises(PlanFileError, match=r"cluster\.json"):
        train_partition(replace(config, clusters=(str(file),)), run)
    with pytest.raises(StrategyError, match="nowhere"):
        train_partition(replace(config, start="nowhere"), run)
    assert not run.exists()


@pytest.mark.slow
def test_examples_that_a_ray_cluster_prepares_give_the_same_weights(
    config: PartitionTrainConfig,
    trained: tuple[Path, SavedNetwork, list[WatchedStep]],
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    made = train_partition(config, tmp_path, ray="local")
    assert made.checkpoint == trained[1].checkpoint
    with pytest.raises(ExecutionError, match="no Ray cluster answers at address="):
        train_partition(config, tmp_path / "other", ray="auto")


def test_ray_that_is_not_installed_is_asked_for(
    config: PartitionTrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "policies.ray_pool", None)
    with pytest.raises(StrategyError, match="pip install 'meshwright"):
        train_partition(config, tmp_path / "run", ray="auto")


def test_weights_of_another_feature_version_do_not_begin(
    config: PartitionTrainConfig,
    trained: tuple[Path, SavedNetwork, list[WatchedStep]],
    tmp_path: Path,
) -> None:
    old = tmp_path / "old"
    save_network(trained[1].network, {}, old)
    described = json.loads((old / "config.json").read_text())
    described["feature_version"] += 1
    (old / "config.json").write_text(json.dumps(described))
    with pytest.raises(StrategyError, match=r"feature_version=.* train the policy"):
        train_partition(replace(config, start=str(old)), tmp_path / "run")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kinds": []}, "kinds is empty"),
        ({"kinds": ["transfer"]}, "unknown kind of worlds to train on 'transfer'"),
        ({"steps": 0}, "steps=0 is below 1"),
        ({"examples": 3}, "examples=3 is below first_examples=24"),
        ({"minutes": 0}, "minutes=0"),
        ({"rate": -1.0}, "rate=-1.0"),
        ({"seed": -1}, "seed=-1"),
        ({"stepz": 3}, "did you mean 'steps'"),
        ({"learning": {"draw": 3}}, "unknown setting of learning 'draw'"),
        ({"steps": "many"}, "steps: Input should be a valid integer"),
    ],
)
def test_settings_are_checked(
    wrong: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(wrong))
    with pytest.raises(StrategyError, match="settings"):
        read_settings(file, PartitionTrainConfig())
    with pytest.raises(StrategyError) as caught:
        read_settings(file, PartitionTrainConfig())
    assert message in str(caught.value)


def test_settings_are_read(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    given = {"kinds": ["sites"], "minutes": 5, "learning": {"draws": 4}}
    file.write_text(json.dumps(given))
    read = read_settings(file, PartitionTrainConfig())
    assert read.kinds == ("sites",)
    assert read.minutes == 5
    assert read.learning == LearningConfig(draws=4)
    assert read.source == "new"
    assert read.first_rate == 1e-3
    own = replace(read, models=("llama3-8b",))
    assert own.source == "shipped"
    assert own.first_rate < read.first_rate
