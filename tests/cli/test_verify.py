"""``meshwright verify``: ranks that are not there, and what it says of them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from planner.schema import Plan
from tests.cli.shell import ask, meshwright
from tests.plans import local_plan

LAUNCHER = importlib.import_module("executors.launching.launcher")


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    local_plan(2, pp=2).save(path)
    return path


def _answers(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> list[dict[str, Any]]:
    """Let every rank answer so; what each was asked."""
    asked: list[dict[str, Any]] = []

    def launch(entry: str, arguments: dict[str, Any], **_: Any) -> list[Any]:
        assert entry == "planner.cli.rank:verify_ranks"
        asked.append(arguments)
        return [[{"rank": r, "pp_rank": r, **fields} for r in arguments["ranks"]]]

    monkeypatch.setattr(LAUNCHER, "launch", launch)
    return asked


def test_every_stage_is_verified_and_compared(plan_file: Path) -> None:
    answer = meshwright("verify", plan_file, "--json", "--tolerance", "0.25")
    assert answer.code == 0, answer.err
    assert answer.err.splitlines()[0].startswith("verifying ranks 0, 1 of 2 (pp2 ")
    result = answer.json
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert all(rank["failure"] is None for rank in result["ranks"])
    assert all(rank["flops"] > 0 for rank in result["ranks"])
    named = {each["name"]: each for each in result["deviations"]}
    assert {"peak memory, pp rank 0", "peak memory, pp rank 1"} <= set(named)
    assert named["send, busiest rank"]["ratio"] == pytest.approx(1.0)


def test_the_table_has_every_category_and_kind(
    plan_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = {"kind": "send", "group_size": 2, "count": 4, "bytes": 5000}
    asked = _answers(
        monkeypatch,
        memory_bytes={"parameters": 10, "activations": 30},
        collectives=[sent],
        flops=2_000_000,
        microbatches=512,
        microbatches_run=4,
    )
    answer = ask(capsys, "verify", plan_file, "--rank", "1")
    assert [entry["ranks"] for entry in asked] == [[1]]
    rows = [line.split() for line in answer.out.splitlines()]
    assert ["send", "2", "4", "5", "kB"] in rows
    assert ["activations", "30", "B"] in rows
    assert ["microbatches", "run", "4", "of", "512"] in rows
    # A tiny peak is far from what was predicted, and that is said.
    assert "peak memory, pp rank 1: predicted" in answer.err
    assert answer.code == 1
    assert "1 of 1 predictions are more than 10% off, first peak memory" in answer.err


@pytest.mark.parametrize(
    ("share", "reduced", "tolerance", "code"),
    [
        (1.08, 4, (), 0),
        (0.85, 0, (), 1),
        (0.85, 0, ("--tolerance", "0.2"), 0),
        (1.02, 4, ("--tolerance", "0.01"), 1),
        # Four bytes of a loss are none; a megabyte that nobody predicted is.
        (1.0, 1_000_000, ("--tolerance", "0.2"), 1),
    ],
)
def test_exit_code_says_whether_predictions_agree(
    plan_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    reduced: int,
    tolerance: tuple[str, ...],
    code: int,
) -> None:
    predicted = Plan.load(plan_file).prediction
    ranks = [
        {
            "rank": rank,
            "pp_rank": rank,
            "memory_bytes": {
                "parameters": round(share * (memory.total_bytes - memory.reserve_bytes))
            },
            "collectives": [
                {"kind": kind, "group_size": 2, "count": 1, "bytes": size}
                for kind, size in (
                    *predicted.collective_bytes.items(),
                    ("reduce", reduced),
                )
            ],
        }
        for rank, memory in enumerate(predicted.memory)
    ]
    monkeypatch.setattr(LAUNCHER, "launch", lambda *_, **__: [ranks])
    answer = ask(capsys, "verify", plan_file, *tolerance)
    assert answer.code == code, answer.err


def test_a_tolerance_is_a_share(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = ask(capsys, "verify", plan_file, "--tolerance", "-1").error
    assert (
        refused
        == "--tolerance -1.0; use a share of what is found, such as 0.1 for 10 %"
    )


def test_a_rank_that_would_fail_is_an_error(
    plan_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _answers(monkeypatch, failure="LookupError: no table (in model.layers.1)")
    answer = ask(capsys, "verify", plan_file)
    assert answer.code == 1
    last = answer.err.splitlines()[-1]
    assert last.startswith(
        "meshwright: rank 0 of 2 would fail: LookupError: no table (in model.layers.1)"
    )


def test_ranks_that_are_not_there_and_code_are_refused(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = ask(capsys, "verify", plan_file, "--rank", "2").error
    assert refused == "--rank 2; the plan has ranks 0 to 1"
    data = json.loads(plan_file.read_text())
    data["model"]["ref"] = "tests.cli.models:failing"
    coded = tmp_path / "coded.json"
    Plan.from_data(data).save(coded)
    assert "would import code" in ask(capsys, "verify", coded).error
    data["model"]["ref"] = None
    Plan.from_data(data).save(coded)
    assert "has no reference to the model" in ask(capsys, "verify", coded).error
