"""``meshwright run`` as a rank that torchrun has started."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.errors import ExecutionError
from tests.cli.runs import FAILS, changed
from tests.cli.shell import ask
from tests.plans import TINY


def test_torchrun_on_one_host_checks_the_machine(failing_file: Path) -> None:
    changed(failing_file, cluster={"fingerprint": "another", "name": "there"})
    starter = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = ("-m", "planner.cli.main", "run", str(failing_file), *FAILS)
    ran = subprocess.run(
        [sys.executable, *starter, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode != 0
    assert "meshwright: the plan is for there, not for this machine: " in ran.stderr
    assert "no table" not in ran.stderr


@pytest.mark.usefixtures("as_rank")
def test_the_root_cause_is_told_under_torchrun(
    failing_file: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        try:
            raise cause
        except Exception as error:
            raise RuntimeError("[Stage 0] failed to run forward:") from error

    monkeypatch.setattr("planner.cli.rank.train_rank", fail)
    cause: Exception = LookupError("no table")
    with caplog.at_level(logging.INFO, logger="planner.cli.run"):
        told = ask(capsys, "run", failing_file, *FAILS).err.splitlines()
    # The first line is a note on the loss.
    assert told[1:] == [
        "meshwright: rank 0 of 1 raised RuntimeError: [Stage 0] failed to run forward: "
        "LookupError: no table; MESHWRIGHT_LOG=INFO shows the traceback"
    ]
    assert "LookupError: no table\n" in caplog.text
    cause = ExecutionError("data gives 3 samples")
    told = ask(capsys, "run", failing_file, *FAILS).err.splitlines()
    assert told[1:] == [f"meshwright: {cause}"]


@pytest.mark.usefixtures("as_rank", "no_processes")
def test_one_rank_under_torchrun(
    lone_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = ask(capsys, "run", lone_file, "--steps", "2", "--json").json
    assert len(result["losses"]) == 2
    assert result["measurement"] is None
    assert result["comparison"] == []


@pytest.mark.usefixtures("as_rank")
class TestTheMachineUnderTorchrun:
    """Checked where torchrun says that all ranks are here; else nobody can know."""

    @pytest.fixture
    def foreign(self, lone_file: Path) -> Path:
        return changed(lone_file, cluster={"fingerprint": "another", "name": "there"})

    def test_another_machine_is_refused(
        self,
        foreign: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        trained: list[object] = []
        result = {"losses": [2.0], "step_times_s": [1.0], "measurement": None}
        monkeypatch.setattr(
            "planner.cli.rank.train_rank", lambda *a: trained.append(a) or result
        )
        error = ask(capsys, "run", foreign).error
        assert error.startswith("the plan is for there, not for this machine: ")
        assert "--force" in error
        assert not trained
        assert ask(capsys, "run", foreign, "--force").code == 0
        assert len(trained) == 1

    @pytest.mark.parametrize("local", ["1", None])
    def test_on_several_hosts_there_is_no_check_and_no_warning(
        self,
        local: str | None,
        foreign: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if local is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        result = {"losses": [2.0], "step_times_s": [1.0], "measurement": None}
        monkeypatch.setattr("planner.cli.rank.train_rank", lambda *_: result)
        answer = ask(capsys, "run", foreign)
        assert answer.code == 0
        assert answer.err == ""


@pytest.mark.usefixtures("as_rank")
def test_too_few_processes(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = ask(capsys, "run", plan_file, "--steps", "1").error
    assert error.startswith("1 processes were started, the plan's mesh (dp_shard2")
    assert "needs 2; start it with torchrun --nproc-per-node 2" in error


@pytest.mark.usefixtures("as_rank")
def test_a_plan_for_another_model_is_refused_with_the_difference(
    lone_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((TINY / "config.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("run", lone_file, "--steps", "1", "--model", f"hf:{tmp_path}")
    error = ask(capsys, *words).error
    assert error.startswith("the plan is for tiny-llama (1,640,576 parameters in ")


def test_under_torchrun_only_rank_0_speaks(
    lone_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {"losses": [2.0, 1.0], "step_times_s": [1.0], "measurement": None}
    monkeypatch.setattr("planner.cli.rank.train_rank", lambda *_: result)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert ask(capsys, "run", lone_file).out == ""
    monkeypatch.setenv("RANK", "0")
    assert ask(capsys, "run", lone_file).out.startswith("loss 2.0000 -> 1.0000")
