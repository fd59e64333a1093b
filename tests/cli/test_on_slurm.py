"""``meshwright run --on slurm``, with a stand-in for sbatch that records its call."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.shell import ask
from tests.export.plans import HOSTILE, MIXED, PLANS, named
from tests.plans import TINY

_SBATCH = """#!/bin/sh
printf '%s\\0' "$@" > "$RECORD"
echo '4711;cluster'
"""
_REFUSES = """#!/bin/sh
echo 'sbatch: error: Batch job submission failed: No partition specified' >&2
exit 1
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    folder = tmp_path / "it's $(touch pwned) here"
    folder.mkdir()
    path = folder / "plan.json"
    named(PLANS["pipeline"], HOSTILE).save(path)
    return path


def _stand_in(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "bin" / "sbatch"
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o755)
    found = os.pathsep.join((str(path.parent), os.environ["PATH"]))
    monkeypatch.setenv("PATH", found)
    record = tmp_path / "record"
    monkeypatch.setenv("RECORD", str(record))
    return record


def test_a_script_is_written_and_submitted(
    plan_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = _stand_in(_SBATCH, tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    answer = ask(
        capsys,
        *("run", plan_file, "--on", "slurm", "--steps", "20", "--seed", "3"),
        *("--model", f"hf:{TINY}", "--checkpoint-dir", "states", "--resume"),
        *("--sbatch", "partition=gpu b", "--sbatch", "exclusive", "--measure"),
        *("--check-first-step", "--check-replicas-every", "5", "--last-weights"),
    )
    assert answer.code == 0, answer.err
    script = plan_file.with_suffix(".sbatch")
    assert answer.out == f"submitted job 4711: {script}\n"
    called = record.read_text().split("\0")[:-1]
    assert called == [
        *("--parsable", "--partition=gpu b", "--exclusive", str(script)),
        *("--steps", "20", "--seed", "3", "--model", f"hf:{TINY}"),
        *("--rank-timeout-s", "60.0"),
        *("--checkpoint-dir", str(tmp_path / "states")),
        *("--check-replicas-every", "5", "--keep-last", "2"),
        *("--measure", "--check-first-step", "--last-weights", "--resume"),
    ]
    text = script.read_text()
    assert "#SBATCH --nodes=4\n" in text
    subprocess.run(["bash", "-n", str(script)], check=True)
    # Far enough to find the plan, by a path with quotes in it.
    ran = subprocess.run(
        ["bash", str(script)],
        env={"PATH": str(tmp_path)},
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no plan at" not in ran.stderr
    assert "SLURM_JOB_NODELIST" in ran.stderr
    assert not list(tmp_path.rglob("pwned"))


def test_what_is_submitted_is_what_run_understands(
    plan_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = _stand_in(_SBATCH, tmp_path, monkeypatch)
    flags = (
        *("--steps", "7", "--measurement", "found.json", "--json", "--force"),
        *(
            "--checkpoint-dir",
            "c",
            "--checkpoint-every",
            "3",
            "--resume",
            "step-000003",
        ),
        *("--keep-last", "5", "--background-checkpoints", "--last-weights"),
    )
    answer = ask(capsys, "run", plan_file, "--on", "slurm", *flags)
    told = answer.json
    assert (told["job"], told["script"]) == (
        "4711",
        str(plan_file.with_suffix(".sbatch")),
    )
    first = record.read_text().split("\0")[:-1]
    again = ask(capsys, "run", plan_file, "--on", "slurm", *first[2:])
    assert again.code == 0, again.err
    assert record.read_text().split("\0")[:-1] == first


def test_without_sbatch_nothing_is_written(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(plan_file.parent))
    answer = ask(capsys, "run", plan_file, "--on", "slurm")
    assert answer.error.startswith("sbatch is not on PATH; run this where jobs are")
    assert "meshwright export --to slurm" in answer.error
    assert not plan_file.with_suffix(".sbatch").exists()


def test_what_sbatch_says_is_passed_on(
    plan_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _stand_in(_REFUSES, tmp_path, monkeypatch)
    error = ask(capsys, "run", plan_file, "--on", "slurm").error
    assert "(exit 1): sbatch: error: Batch job submission failed: No part" in error
    assert "--sbatch partition=gpu" in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--on", "slurm", "--sbatch", "P gpu"), "'P gpu' is not an option of sbatch"),
        (("--on", "slurm", "--ray-address", "a:1"), "--ray-address is for --on ray"),
        (("--sbatch", "partition=gpu"), "--sbatch is for --on slurm"),
        (("--on", "slurm", "--steps", "0"), "--steps 0; a run has at least 1 step"),
    ],
)
def test_wrong_flags(
    flags: tuple[str, ...],
    message: str,
    plan_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = _stand_in(_SBATCH, tmp_path, monkeypatch)
    assert message in ask(capsys, "run", plan_file, *flags).error
    assert not record.exists()


def test_a_plan_that_slurm_cannot_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = _stand_in(_SBATCH, tmp_path, monkeypatch)
    path = tmp_path / "plan.json"
    PLANS["zero3"].save(path)
    data = json.loads(path.read_text())
    data["cluster"]["device_types"] = {"h100-80": 8, "a100-80": 8}
    path.write_text(json.dumps(data))
    error = ask(capsys, "run", path, "--on", "slurm").error
    assert "cluster.device_types=h100-80, a100-80" in error
    assert not record.exists()


def test_options_for_the_first_component_alone_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = _stand_in(_SBATCH, tmp_path, monkeypatch)
    path = tmp_path / "plan.json"
    MIXED.save(path)
    command = ("run", path, "--on", "slurm", "--model", f"hf:{TINY}")
    error = ask(capsys, *command, "--sbatch", "partition=gpu").error
    assert "--sbatch partition=gpu with hosts of several types" in error
    assert "3 components" in error
    assert "SBATCH_PARTITION=gpu" in error
    assert not record.exists()
    assert ask(capsys, *command).code == 0
    script = path.with_suffix(".sbatch").read_text()
    assert script.count("#SBATCH hetjob\n") == 2
