"""meshwright train and evaluate job-stream."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from planner.cli.main import main

PROFILES = pytest.mark.skipif(
    "MESHWRIGHT_DATA" not in os.environ, reason="the jobs are read from its folder"
)


@PROFILES
def test_evaluate_prints_what_a_policy_comes_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["evaluate", "job-stream", "--policy", "constant_4", "--laws", "A"]
    words += ["--seeds", "600:2", "--horizon-s", "5e4"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["A"]
    rates = found["blocking_rates"]
    assert len(rates) == 2
    assert found["blocking_rate"] == pytest.approx(sum(rates) / 2)
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "ms a decision" in printed
    assert f"{found['blocking_rate']:.4f}" in printed


@PROFILES
def test_training_writes_a_policy_that_can_be_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"futures": 2, "arrivals": 4, "labelled": 0.3}
    settings = {
        "laws": ["C"],
        "horizon_s": 2e4,
        "validation_count": 1,
        "improvement": {
            "first_rounds": 1,
            "rounds": 1,
            "episodes": 8,
            "first": few,
            "later": few,
            "fit": {"hidden": 8, "steps": 20},
        },
        "network": {"hidden": 8, "width": 8},
        "ppo": {"steps": 0},
    }
    file, run = tmp_path / "settings.json", tmp_path / "run"
    file.write_text(json.dumps(settings))
    words = ["train", "job-stream", "--out", str(run), "--config", str(file)]
    assert main([*words, "--workers", "1", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["policy"] == f"{run}/policy"
    assert set(made["gains"]) == {"C"}
    words = ["evaluate", "job-stream", "--weights", made["policy"], "--laws", "C"]
    assert main([*words, "--seeds", "600:1", "--horizon-s", "2e4"]) == 0
    capsys.readouterr()
    settings["seed"] = 9
    file.write_text(json.dumps(settings))
    again = ["train", "job-stream", "--out", str(run), "--config", str(file)]
    assert main(again) == 1
    assert "other settings (seed differ)" in capsys.readouterr().err


@pytest.mark.further
def test_a_policy_for_any_cluster_is_trained_and_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"futures": 2, "arrivals": 4, "labelled": 0.5}
    models = ["bert-large", "vit-h"]
    settings = {
        "worlds": [{"cluster": "dgx-a100:2", "models": models}],
        "intervals": 10,
        "validation_loads": [1.5],
        "validation_count": 1,
        "improvement": {
            "first_rounds": 1,
            "rounds": 2,
            "episodes": 8,
            "first": few,
            "later": few,
            "fit": {"hidden": 8, "steps": 20},
        },
        "network": {"hidden": 8, "width": 8},
    }
    file, run = tmp_path / "settings.json", tmp_path / "run"
    file.write_text(json.dumps(settings))
    words = ["train", "job-stream-world", "--out", str(run), "--config", str(file)]
    assert main([*words, "--workers", "1", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert set(made["gains"]) == {"dgx-a100:2, 2 jobs, load 1.5"}
    words = ["evaluate", "job-stream-world", "--weights", made["policy"]]
    words += ["--cluster", "dgx-a100:3", "--models", *models, "--loads", "2"]
    words += ["--seeds", "600:1", "--intervals", "40", "--waiting", "2"]
    for policy in ("min_feasible", "rollout", "learned+lookahead", "learned"):
        assert main([*words, "--policy", policy, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["2"]
        assert 0 < found["blocking_rate"] < 1
        assert found["blocked"] == found["refused"] + found["no_room"] + found["late"]
    assert main(words) == 0
    assert f"{found['blocking_rate']:.4f}" in capsys.readouterr().out
    file.write_text('{"worlds": [{"cluster": "dgx-a100:2", "models": ["gpt5"]}]}')
    again = ["train", "job-stream-world", "--out", str(tmp_path / "other")]
    assert main([*again, "--config", str(file)]) == 1
    assert "unknown job of a world 'gpt5'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "7"], "write FIRST:COUNT"),
        (["--policy", "best", "--seeds", "1:1"], "unknown policy 'best'"),
        (["--laws", "Q"], "unknown law 'Q'"),
        (["--weights", "nowhere"], "nowhere/config.json cannot be read"),
    ],
)
@PROFILES
def test_what_is_wrong_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "job-stream", "--horizon-s", "2e3", *words]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_settings_are_checked_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"ppo": {"stepz": 3}}')
    words = ["train", "job-stream", "--out", str(tmp_path / "run")]
    assert main([*words, "--config", str(file)]) == 1
    assert "did you mean" in capsys.readouterr().err
    assert main([*words, "--workers", "-1"]) == 1
    assert "workers=-1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
