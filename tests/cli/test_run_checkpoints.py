"""``meshwright run`` with checkpoints: what it asks for, refuses and reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import ask

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of the ranks; they do two steps more than were done before."""
    given: dict[str, Any] = {"done": 0}

    def launch(entry: str, arguments: dict[str, Any], **_: Any) -> list[Any]:
        given.update(arguments)
        first = given["done"]
        losses = [2.0, 1.0][: arguments["steps"] - first]
        result = {"first_step": first, "losses": losses, "measurement": None}
        return [result] * 2

    monkeypatch.setattr("executors.launching.launcher.launch", launch)
    return given


@pytest.mark.parametrize(
    ("words", "resume"),
    [((), False), (("--resume",), True), (("--resume", "step-000002"), "step-000002")],
)
def test_options_reach_the_ranks(
    plan_file: Path,
    tmp_path: Path,
    asked: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    resume: bool | str,
) -> None:
    monkeypatch.chdir(tmp_path)
    more = ("--checkpoint-every", "5", "--keep-checkpoints", "3")
    answer = ask(capsys, "run", plan_file, "--checkpoint-dir", "kept", *more, *words)
    assert answer.code == 0, answer.err
    assert asked["checkpoint_dir"] == str(tmp_path / "kept")
    assert (asked["checkpoint_every"], asked["keep_checkpoints"]) == (5, 3)
    assert asked["resume"] == resume


def test_without_a_folder_nothing_is_kept(
    plan_file: Path, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(capsys, "run", plan_file).code == 0
    assert asked["checkpoint_dir"] is None


def test_it_says_where_it_went_on_and_when_nothing_is_left(
    plan_file: Path, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asked["done"] = 4
    words = ("run", plan_file, "--checkpoint-dir", "kept", "--resume", "--steps")
    answer = ask(capsys, *words, "6")
    assert "resumed after step 4\n" in answer.err
    assert answer.out.startswith("loss 2.0000 -> 1.0000 in 2 steps on 2 processes")
    answer = ask(capsys, *words, "4")
    assert answer.code == 0
    assert answer.out == "nothing to do: 4 of 4 steps were done before\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--resume",), "--resume needs a folder; add --checkpoint-dir"),
        (("--checkpoint-every", "5"), "--checkpoint-every needs a folder"),
        (("--checkpoint-dir", "d", "--checkpoint-every", "0"), "at least 1"),
        (("--checkpoint-dir", "d", "--keep-checkpoints", "0"), "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_process_starts(
    plan_file: Path,
    asked: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    assert said in ask(capsys, "run", plan_file, *words).error
    assert set(asked) == {"done"}


def test_a_name_that_is_none_is_refused(
    plan_file: Path, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ask(capsys, "run", plan_file, "--checkpoint-dir", "d", "--resume", "best")
    assert answer.code == 1
    assert "step-000100" in answer.err
    assert set(asked) == {"done"}
