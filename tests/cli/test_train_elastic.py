"""meshwright train elastic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli.main import main
from policies.elastic.learned import load_network
from tests.envs.elastic.small import write_traces


def test_train_elastic_writes_weights_and_says_what_they_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_traces(tmp_path / "traces" / "elasticflow")
    monkeypatch.setenv("MESHWRIGHT_DATA", str(tmp_path))
    settings = {
        "traces": ["one"],
        "validation": "two",
        "jobs": 30,
        "hidden": 2,
        "generations": 2,
        "pairs": 1,
        "windows": 1,
        "validate_every": 1,
        "validation_windows": 1,
    }
    file, run = tmp_path / "settings.json", tmp_path / "run"
    file.write_text(json.dumps(settings))
    words = ["train", "elastic", "--out", str(run), "--config", str(file)]
    assert main([*words, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    found = made["validated_on"]
    assert (found["trace"], found["windows"]) == ("two", 3)
    assert found["blocked"] <= found["rule_blocked"] < 1
    assert load_network(made["policy"]).hidden == 2
    # A run that has ended is only read.
    assert main(words) == 0
    assert f"{100 * found['blocked']:.1f} %" in capsys.readouterr().out
    file.write_text('{"sigmma": 1}')
    assert main(words) == 1
    assert "did you mean 'sigma'" in capsys.readouterr().err
