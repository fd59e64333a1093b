"""``meshwright train partition`` and ``evaluate partition``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from planner.cli.train import _rows
from tests.cli.shell import ask
from tests.plans import TINY

SMALL: dict[str, Any] = {
    "steps": 40,
    "start": "new",
    "first_examples": 2,
    "examples": 2,
    "evaluate_every": 2,
    "validation_count": 1,
    "network": {"width": 8, "layers": 1, "hidden": 8},
    "learning": {"draws": 4, "meshes": 1, "rounds": 1},
}
OWN = ("--clusters", "dgx-a100:1", "--models", f"hf:{TINY}", "--seq-len", "32")


def test_a_network_is_trained_and_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run = tmp_path / "settings.json", tmp_path / "run"
    file.write_text(json.dumps(SMALL))
    words = ("train", "partition", "--out", run, "--config", file, *OWN)
    made = ask(capsys, *words, "--steps", "2", "--workers", "1", "--json").json
    assert made["policy"] == f"{run}/policy"
    # The command line goes before the file.
    assert made["trained_on"]["steps"] == 2
    assert made["trained_on"]["clusters"] == ["dgx-a100:1"]
    printed = ask(capsys, *words, "--steps", "2", "--workers", "1")
    assert printed.code == 0
    assert "best of the first 12 meshes" in printed.out
    refused = ask(capsys, *words, "--steps", "3", "--workers", "1")
    assert "other settings (steps differ" in refused.error
    words = ("evaluate", "partition", "--weights", run / "policy", "--kinds", "uniform")
    words = (*words, "--seeds", "1:1", "--budget-s", "0", "--against", "expert")
    found = ask(capsys, *words, "--json").json
    (kind,), (world,) = found["kinds"], found["worlds"]
    assert kind["kind"] == world["kind"] == "uniform"
    assert kind["worlds"] == 1
    assert kind["ratio"] == pytest.approx(world["learned"] / world["expert"])
    assert kind["wins"] == (world["learned"] < world["expert"] * (1 - 1e-4))
    table = ask(capsys, *words).out.splitlines()
    assert table[0].split()[0] == "kind"
    assert table[1].split()[:3] == ["uniform", "1", f"{kind['ratio']:.4f}"]


def test_weights_are_compared_with_the_shipped_ones_on_own_worlds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("evaluate", "partition", *OWN, "--seeds", "7:2", "--budget-s", "0")
    found = ask(capsys, *words, "--against", "shipped", "--json").json
    (kind,) = found["kinds"]
    assert (kind["kind"], kind["worlds"]) == ("own", 2)
    assert [one["world"] for one in found["worlds"]] == [
        "own-validation-0-7",
        "own-validation-0-8",
    ]
    # Both are the shipped weights here, which give the same plans.
    assert kind["ratio"] == 1.0
    for one in found["worlds"]:
        assert one["learned"] == one["shipped"]


def test_logarithms_of_a_validation_are_told_in_per_cent() -> None:
    found = {"regret_at_1": math.log(1.5), "orders_mean": -math.log(2)}
    rows = _rows({**found, "orders_best": math.log(2)})
    assert [row[1] for row in rows] == ["50.0 %", "+100.0 %", "-50.0 %"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "partitoin", "--out", "run"), "did you mean 'partition'?"),
        (("train", "partition", "--out", "run", "--workers", "-1"), "workers=-1"),
        (("train", "partition", "--out", "run", "--steps", "0"), "steps=0 is below 1"),
        (("train", "partition", "--out", "run", "--seq-len", "0"), "seq_len=0"),
        (
            ("train", "partition", "--out", "run", "--clusters", "dgx-a10:2"),
            "did you mean 'dgx-a100'?",
        ),
        (
            ("train", "partition", "--out", "run", "--config", "nowhere.json"),
            "nowhere.json cannot be read",
        ),
        (("evaluate", "partition", "--kinds", "mixt"), "did you mean 'mixed'?"),
        (("evaluate", "partition", "--split", "train"), "never trained on"),
        (("evaluate", "partition", "--seeds", "1"), "write FIRST:COUNT"),
        (("evaluate", "partition", "--budget-s", "-1"), "--budget-s -1.0"),
        (("evaluate", "partition", "--against", "expart"), "did you mean 'expert'?"),
        (("evaluate", "partition", "--weights", "nowhere"), "cannot be read"),
    ],
)
def test_what_is_wrong_is_one_line(
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in ask(capsys, *words).error
    assert not (tmp_path / "run").exists()
