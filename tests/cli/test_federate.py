"""The command ``meshwright federate``."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.schema import Federation
from tests.cli.shell import ask
from tests.plans import TINY

WORDS = (
    *("--model", f"hf:{TINY}", "--cluster", "local:3", "--global-batch", "6"),
    *("--seq-len", "16", "--partitioner", "expert", "--dtype", "float32"),
)


def test_members_are_told_and_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "federation.json"
    answer = ask(
        capsys, "federate", *WORDS, "--member", "0-1", "--member", "2", "-o", out
    )
    assert answer.code == 0, answer.err
    made = Federation.load(out)
    assert [member.devices for member in made.members] == [(0, 1), (2,)]
    assert "3 of 3 devices of local, 2 members" in answer.out
    assert "member0 2 x cpu (devices 0-1)" in answer.out


def test_json_is_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, "federate", *WORDS, "--json")
    made = Federation.from_data(answer.json)
    # One host is not divided, and holds the model.
    assert len(made.members) == 1


def test_other_divisions_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, "federate", *WORDS, "--member", "0,2", "--explain")
    assert "member0: " in answer.out
    assert "left out: device 1" in answer.out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--member", "0-x"), 1, "--member '0-x' is no list of devices"),
        (("--member", "7"), 1, "device 7 does not exist; local has devices 0 to 2"),
        (("--exchange", "all_reduce"), 1, "is no exchange every few steps"),
        (
            ("--memory-fraction", "0.000001"),
            2,
            "no feasible plan: not even all devices of local as one member",
        ),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, said: str
) -> None:
    answer = ask(capsys, "federate", *WORDS, *words)
    assert answer.code == code
    assert said in answer.error
