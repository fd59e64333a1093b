"""Help, versions, wrong words, and what goes to which stream."""

from __future__ import annotations

import json
import re
import typing

import pytest

import planner
from planner.cli.main import main
from planner.cli.plan import PlanCommand
from planner.errors import MeshwrightError
from planner.schema import (
    PINNABLE,
    Optimizer,
    Overlap,
    Precision,
    Stage,
    Strategy,
)
from planner.schema.base import leaf_defaults
from planner.schema.strategy_parts import Collective, Offload, ShardTraffic
from planner.search import OBJECTIVES
from tests.cli.shell import ask, meshwright

COMMANDS = (
    "plan",
    "predict",
    "run",
    "verify",
    "probe",
    "explain",
    "export",
    "methods",
    "models",
    "clusters",
)


def test_without_a_command_the_help_is_shown_as_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = ask(capsys)
    assert answer.code == 1
    assert answer.out == ""
    assert answer.err.startswith("usage: meshwright ")
    assert all(command in answer.err for command in COMMANDS)


def test_help_is_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, "--help")
    assert answer.code == 0
    assert answer.err == ""
    assert "0 done, 1 error, 2 no feasible plan" in " ".join(answer.out.split())


#: Fields of a strategy that other flags set, or no flag.
_NOT_PINNED = {
    *("stages", "rank", "modules", "device_ranges", "patterns", "loss_parallel"),
    *(*Precision.model_fields, *Optimizer.model_fields, *Overlap.model_fields),
    *("context_algorithm", "spatial", "grad_clip_norm"),
    *(*Collective.model_fields, *ShardTraffic.model_fields, *Offload.model_fields),
}


def test_the_help_of_plan_names_every_field_of_a_strategy_that_can_be_pinned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = {*leaf_defaults(Strategy), *Stage.model_fields}
    knobs = {field.rpartition(".")[2] for field in fields} - _NOT_PINNED
    # Documents that are pinned as one.
    knobs |= {"replicas", "offload"}
    text = ask(capsys, "plan", "--help").out
    said = text.partition("--pin KNOB=VALUE")[2].partition("May be given")[0]
    assert knobs == {*re.findall(r"[a-z_]+", said)} & {*PINNABLE}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_every_command_is_explained(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ask(capsys, command, "--help")
    assert answer.code == 0
    assert answer.out.startswith(f"usage: meshwright {command} ")
    assert "--json" in answer.out
    assert "--no-" not in answer.out
    assert "--training." not in answer.out
    assert "None" not in answer.out
    # An option whose text is missing has only its default on its lines.
    body = answer.out.split("options ")[-1]
    options = ("\n" + body.replace("│", " ")).split("\n --")[1:]
    for option in options:
        words = [w for w in " ".join(option.split()).split() if w.isalpha()]
        assert len(words) >= 3, option


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, "--version")
    assert answer.code == 0
    assert answer.out == f"meshwright {planner.__version__}\n"


def test_a_wrong_command_suggests_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = ask(capsys, "plna", "--model", "x").error
    assert error == "unknown command 'plna'; did you mean 'plan'?"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("plan", "--model", "gpt2"), "--cluster"),
        (("plan", "--modle", "gpt2"), "--modle"),
        (("models", "--json", "now"), "now"),
        (("run",), "PLAN"),
        (("run", "p.json", "--steps", "many"), "--steps"),
        (("probe", "--device", "tpu"), "tpu"),
    ],
)
def test_wrong_options_are_errors_and_not_infeasible(
    words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ask(capsys, *words)
    assert answer.code == 1
    assert answer.out == ""
    assert part in answer.err
    assert "Traceback" not in answer.err


def test_a_message_is_one_line_whatever_it_holds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise MeshwrightError("first\n  second [bold]:smile:")

    monkeypatch.setattr("planner.cli.machines.ModelsCommand.run", fail)
    assert ask(capsys, "models").error == "first second [bold]:smile:"


def test_ctrl_c_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.cli.machines.ModelsCommand.run", stop)
    assert main(["models"]) == 130
    assert capsys.readouterr().err == "meshwright: interrupted\n"


def test_a_wrong_log_level_does_not_stop_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_LOG", "loud")
    answer = ask(capsys, "models", "--json")
    assert answer.code == 0
    assert "MESHWRIGHT_LOG=LOUD is no level; use " in answer.err


def test_the_command_line_offers_all_objectives() -> None:
    offered = typing.get_type_hints(PlanCommand)["objective"]
    assert typing.get_args(offered) == OBJECTIVES


def test_as_a_process() -> None:
    answer = meshwright("models", "--json")
    assert answer.code == 0
    assert answer.err == ""
    assert "llama3-405b" in answer.json
    answer = meshwright("clusters", "dgx-h10")
    assert answer.error == "unknown cluster preset 'dgx-h10'; did you mean 'dgx-h100'?"


def test_a_reader_that_leaves_early_is_no_crash() -> None:
    import subprocess
    import sys

    with subprocess.Popen(
        [sys.executable, "-m", "planner.cli.main", "clusters", "dgx-a100", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1


def test_a_full_disk_and_a_closed_stdout_are_no_crash() -> None:
    import subprocess
    import sys

    for target, code, said in (
        (">/dev/full", 1, "meshwright: no space is left"),
        (">&-", 0, ""),
    ):
        done = subprocess.run(
            f"{sys.executable} -m planner.cli.main clusters {target}",
            check=False,
            shell=True,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert done.returncode == code, done.stderr
        assert done.stderr.startswith(said)
        assert "Traceback" not in done.stderr


def test_json_of_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert "dgx-h100" in json.loads(ask(capsys, "clusters", "--json").out)
