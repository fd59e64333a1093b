"""Help, versions, wrong words, and what goes to which stream."""

from __future__ import annotations

import json
import os
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


_MOST = ("plan", "--model", "gpt2", "--cluster", "local:2", "--global-batch", "8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("plan", "--model", "gpt2"),
            "required options: missing from meshwright plan: --cluster CLUSTER, "
            "--global-batch INT; for full helptext, run meshwright plan --help",
        ),
        (
            ("plan", "--modle", "gpt2", *_MOST[3:]),
            "required options: missing from meshwright plan: --model MODEL; "
            "unrecognized options: --modle, gpt2; for full helptext, run meshwright "
            "plan --help",
        ),
        (
            (*_MOST, "--evaluation-budgt", "3"),
            "unrecognized options: --evaluation-budgt, 3; perhaps you meant: "
            "--evaluation-budget INT; for full helptext, run meshwright plan --help",
        ),
        (
            ("models", "--json", f"{'a-long-word/' * 20}now"),
            f"unrecognized options: {'a-long-word/' * 20}now; for full helptext, run "
            f"meshwright models --help",
        ),
        (
            ("run",),
            "required options: missing from meshwright run: PLAN; for full helptext, "
            "run meshwright run --help",
        ),
        (
            ("run", "p.json", "--steps", "many"),
            "error parsing --steps: invalid literal for int() with base 10: 'many'; "
            "give --steps INT; for full helptext, run meshwright run --help",
        ),
        (
            ("run", "p.json", "--steps"),
            "missing value for argument '--steps'. Expected 1 values; for full "
            "helptext, run meshwright run --help",
        ),
        (
            (*_MOST, "--betas", "1"),
            "error parsing --betas: no type matching {FLOAT FLOAT} could be "
            "instantiated from ['1']; give --betas FLOAT FLOAT; for full helptext, run "
            "meshwright plan --help",
        ),
        (
            ("train",),
            "missing subcommand: expected one of {partition, job-stream, "
            "job-stream-world, elastic}; for full helptext, run meshwright train "
            "--help",
        ),
        (
            (*_MOST, "--objective", "speed"),
            "invalid choice 'speed' for argument '--objective'. Expected one of "
            "('throughput', 'throughput_per_device', 'memory'); for full helptext, run "
            "meshwright plan --help",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_wrong_options_are_one_line_and_not_infeasible(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ask(capsys, *words)
    assert answer.code == 1
    assert answer.error == said


@pytest.mark.parametrize("words", [("--foo",), ("run", "p.json", "--steps", "x")])
def test_an_error_of_options_does_not_depend_on_the_terminal(
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = ask(capsys, *words).error
    monkeypatch.setenv("COLUMNS", "41")
    assert ask(capsys, *words).error == wide
    assert os.environ["COLUMNS"] == "41"


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
