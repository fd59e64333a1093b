"""``meshwright run`` and ``probe``: real processes, and none left behind."""

from __future__ import annotations

import importlib
import json
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from planner import plan
from planner.cluster import Cluster
from planner.errors import ExecutionError
from planner.schema import Plan, Precision
from planner.schema.measurement import Measurement
from tests.cli import models
from tests.cli.shell import ask, meshwright, start
from tests.plans import TINY, gpt2_plan, local_plan

TOKENS = TINY / "genesis.npy"
LAUNCHER = importlib.import_module("executors.launching.launcher")


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    local_plan(2, dp_shard=2).save(path)
    return path


@pytest.fixture
def lone_file(tmp_path: Path) -> Path:
    path = tmp_path / "lone.json"
    local_plan(1, pp=1).save(path)
    return path


def _changed(path: Path, **parts: dict[str, object]) -> Path:
    data = json.loads(path.read_text())
    for name, update in parts.items():
        data[name] |= update
    path.write_text(json.dumps(data))
    return path


# -- Runs ------------------------------------------------------------------------


def test_a_run_measures_and_reports(
    plan_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "measured.json"
    words = ("run", plan_file, "--steps", "3", "--data", TOKENS, "-o", out)
    answer = meshwright(*words, "--json")
    assert answer.code == 0, answer.err
    notes = answer.err.splitlines()
    assert notes[0].startswith("starting 2 processes: ")
    assert [note.split(":")[0] for note in notes[1:4]] == [
        f"step {n} of 3" for n in (1, 2, 3)
    ]
    assert notes[4:] == [f"wrote {out}"]
    result = answer.json
    measured = Measurement.load(out)
    assert measured == Measurement.from_data(result["measurement"])
    assert measured.losses == tuple(result["losses"])
    assert len(measured.losses) == len(result["step_times_s"]) == 3
    assert measured.losses[-1] < measured.losses[0]
    assert measured.model_fingerprint == local_plan(2, dp_shard=2).model.fingerprint
    step = result["comparison"][0]
    assert step["name"] == "step time"
    assert step["unit"] == "s"
    assert step["predicted"] == local_plan(2, dp_shard=2).prediction.step_time_s
    assert step["measured"] == measured.median_step_time_s
    assert step["ratio"] == pytest.approx(step["predicted"] / step["measured"])

    # The same result as a table, without running a second time.
    monkeypatch.setattr(LAUNCHER, "launch", lambda *_, **__: [result])
    first, header, *rows = ask(capsys, *words).out.splitlines()
    label = local_plan(2, dp_shard=2).strategy.label()
    assert first == (
        f"loss {measured.losses[0]:.4f} -> {measured.losses[-1]:.4f} in 3 steps on "
        f"2 processes ({label})"
    )
    assert header.split() == ["predicted", "measured", "ratio"]
    assert [row.split("  ")[0] for row in rows] == [
        line["name"] for line in result["comparison"]
    ]
    named = {line["name"] for line in result["comparison"]}
    assert {"peak memory, rank 0", "peak memory, rank 1"} <= named


def test_a_probe_is_a_cluster(tmp_path: Path) -> None:
    out = tmp_path / "probe.json"
    words = ("--processes", "2", "--seconds", "1", "-o", out, "--json")
    answer = meshwright("probe", *words)
    assert answer.code == 0, answer.err
    assert answer.err.splitlines() == [
        "probing with 2 processes for about 1 s",
        f"wrote {out}",
    ]
    assert json.loads(out.read_text()) == answer.json
    cluster = Cluster.parse(str(out))
    assert cluster.num_devices == 2
    assert cluster.document.calibration == "probe"
    assert cluster.fingerprint == Cluster.detect(processes=2).fingerprint


def _two_stages(of: tuple[torch.nn.Module, dict[str, torch.Tensor]]) -> Plan:
    model, inputs = of
    return plan(
        model,
        Cluster.detect(processes=2),
        example_inputs=inputs,
        global_batch=8,
        pin={"pp": 2},
        precision=Precision(compute="float32"),
    )


def test_a_sequential_is_cut_and_trained(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    _two_stages(models.stacked()).save(path)
    words = ("--model", "tests.cli.models:stacked", "--steps", "3", "--json")
    losses = meshwright("run", path, *words).json["losses"]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 3


# -- Ends ------------------------------------------------------------------------


@pytest.fixture
def running(plan_file: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that is far from its end when it first speaks."""
    # Programs that a shell puts in the background inherit a SIGINT that is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with start("run", plan_file, "--steps", "200") as process:
        signal.signal(signal.SIGINT, before)
        yield process
        process.kill()


def _none_left(ranks: list[psutil.Process]) -> None:
    """None of them runs any more.

    One whose launcher was killed is a zombie until the first process of the system,
    which in a container may take its time, has asked after it.
    """
    deadline = time.monotonic() + 10
    while alive := [rank for rank in ranks if _runs(rank)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _leaves(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Processes below the launcher that have started none themselves: the ranks."""
    try:
        below = psutil.Process(process.pid).children(recursive=True)
        return [one for one in below if not one.children()]
    except psutil.NoSuchProcess:
        return []


def _started(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Everything below the launcher, as soon as both ranks are there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if len(_leaves(process)) == 2:
            return psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    pytest.fail("two ranks were not started within a minute")


def _wait_for_step(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            return
    pytest.fail("the run ended before it trained")


def test_a_killed_rank_ends_the_run(running: subprocess.Popen[str]) -> None:
    _wait_for_step(running)
    ranks = _leaves(running)
    assert len(ranks) == 2
    ranks[1].kill()
    out, err = running.communicate(timeout=30)
    assert running.returncode == 1
    assert out == ""
    last = err.splitlines()[-1]
    assert re.match(r"meshwright: rank [01] of 2 was killed by SIGKILL; ", last)
    assert "Traceback" not in err
    _none_left(ranks)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_leaves_nothing(
    number: signal.Signals, code: int, running: subprocess.Popen[str]
) -> None:
    ranks = _started(running)
    running.send_signal(number)
    _, err = running.communicate(timeout=30)
    assert running.returncode == code
    assert "Traceback" not in err
    _none_left(ranks)


def test_a_killed_launcher_takes_its_ranks_along(
    running: subprocess.Popen[str],
) -> None:
    ranks = _started(running)
    running.kill()
    running.communicate(timeout=30)
    _none_left(ranks)


# -- A model that fails -----------------------------------------------------------

FAILS = ("--model", "tests.cli.models:failing", "--steps", "1")


@pytest.fixture
def failing_file(tmp_path: Path) -> Path:
    """A plan of two stages for a model whose third layer fails when it is run."""
    path = tmp_path / "fails.json"
    _two_stages(models.failing()).save(path)
    return path


def test_the_root_cause_and_its_module_are_told(
    failing_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_LOG", "INFO")
    answer = meshwright("run", failing_file, *FAILS)
    assert answer.code == 1
    assert answer.out == ""
    said = answer.err.splitlines()
    assert said[-1] == (
        "meshwright: rank 1 of 2 raised RuntimeError: [Stage 1] failed to run forward: "
        "LookupError: no table for 3 (in layers.2.inner); the other ranks were "
        "stopped; MESHWRIGHT_LOG=INFO shows the traceback"
    )
    assert "INFO:executors.attend:rank 1 of 2:" in said
    assert "Traceback (most recent call last):" in said
    assert "LookupError: no table for 3" in said


def test_torchrun_on_one_host_checks_the_machine(failing_file: Path) -> None:
    _changed(failing_file, cluster={"fingerprint": "another", "name": "there"})
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
        refusal = ask(capsys, "run", failing_file, *FAILS).refusal
    assert refusal == (
        "rank 0 of 1 raised RuntimeError: [Stage 0] failed to run forward: "
        "LookupError: no table; MESHWRIGHT_LOG=INFO shows the traceback"
    )
    assert "LookupError: no table\n" in caplog.text
    cause = ExecutionError("data gives 3 samples")
    assert ask(capsys, "run", failing_file, *FAILS).refusal == str(cause)


# -- Refusals --------------------------------------------------------------------


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be known before must not start a process."""

    def launched(*_: object, **__: object) -> None:
        pytest.fail("processes were started")

    monkeypatch.setattr(LAUNCHER, "launch", launched)


@pytest.mark.usefixtures("no_processes")
class TestRefusedBeforeTheStart:
    def test_a_plan_for_other_devices(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        path = tmp_path / "p.json"
        gpt2_plan().save(path)
        answer = ask(capsys, "run", path)
        assert answer.code == 1
        assert answer.refusal.startswith(
            "the plan is for dgx-a100, not for this machine: devices 8 x a100-80 in "
            "the plan, 8 x cpu here; plan for local"
        )

    def test_a_plan_that_wants_to_import_code(
        self, capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path
    ) -> None:
        _changed(plan_file, model={"ref": "os:getcwd"})
        refusal = ask(capsys, "run", plan_file).refusal
        assert "wants to import code (os:getcwd)" in refusal
        assert "--model os:getcwd" in refusal

    def test_a_plan_that_does_not_know_its_model(
        self, capsys: pytest.CaptureFixture[str], plan_file: Path
    ) -> None:
        _changed(plan_file, model={"ref": None})
        assert "name it with --model" in ask(capsys, "run", plan_file).refusal

    def test_a_plan_of_a_profile(
        self, capsys: pytest.CaptureFixture[str], plan_file: Path
    ) -> None:
        _changed(plan_file, model={"ref": "vgg/graph.txt"})
        refusal = ask(capsys, "run", plan_file).refusal
        assert "made from the profile vgg/graph.txt" in refusal

    def test_remote_code_of_no_named_model(
        self, capsys: pytest.CaptureFixture[str], plan_file: Path
    ) -> None:
        refusal = ask(capsys, "run", plan_file, "--allow-remote-code").refusal
        assert "--allow-remote-code without --model" in refusal

    def test_no_steps(
        self, capsys: pytest.CaptureFixture[str], plan_file: Path
    ) -> None:
        refusal = ask(capsys, "run", plan_file, "--steps", "0").refusal
        assert refusal == "--steps 0; a run has at least 1 step"

    def test_a_plan_that_cannot_be_run(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        plan = local_plan(2, dp_shard=2)
        path = tmp_path / "p.json"
        plan.model_copy(update={"not_runnable": ("cp=2 is not run yet",)}).save(path)
        refusal = ask(capsys, "run", path).refusal
        assert refusal == "this plan cannot be run: cp=2 is not run yet"

    def test_a_measurement_that_cannot_be_written(
        self, capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path
    ) -> None:
        answer = ask(capsys, "run", plan_file, "-o", tmp_path / "no" / "m.json")
        assert "create it first" in answer.refusal

    @pytest.mark.parametrize(
        ("tokens", "said"),
        [
            (
                np.zeros(100, np.float32),
                "dtype float32; it must be one row of at least 32",
            ),
            (np.zeros((10, 10), np.int64), "has shape (10, 10)"),
            (np.zeros(31, np.int64), "has shape (31,)"),
            (np.zeros(0, np.int64), "has shape (0,)"),
            (np.full(100, 256), "has token 256, the vocabulary is 0 to 255"),
            (np.full(100, -1), "has token -1, the vocabulary is 0 to 255"),
            (np.array([{}] * 100), "not a whole .npy file of numbers"),
        ],
    )
    def test_tokens_of_the_wrong_kind(
        self,
        tokens: np.ndarray,
        said: str,
        capsys: pytest.CaptureFixture[str],
        plan_file: Path,
        tmp_path: Path,
    ) -> None:
        path = tmp_path / "tokens.npy"
        np.save(path, tokens)
        assert said in ask(capsys, "run", plan_file, "--data", path).refusal

    def test_files_that_are_not_tokens(
        self, capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "tokens"

        def refusal() -> str:
            return ask(capsys, "run", plan_file, "--data", path).refusal

        assert "No such file" in refusal()
        path.write_bytes(b"")
        assert "cannot read tokens" in refusal()
        path.write_bytes(TOKENS.read_bytes()[:200])
        assert "cannot read tokens" in refusal()
        path.write_bytes(pickle.dumps(list(range(100))))
        assert "not a whole .npy file of numbers" in refusal()
        np.savez(tmp_path / "both.npz", a=np.zeros(100, int))
        (tmp_path / "both.npz").rename(path)
        assert "it is a .npz of several arrays" in refusal()
        path.unlink()
        path.mkdir()
        assert "Is a directory" in refusal()

    def test_tokens_for_a_model_that_reads_none(
        self, capsys: pytest.CaptureFixture[str], plan_file: Path
    ) -> None:
        images = {"name": "pixel_values", "shape": [3, 8, 8], "dtype": "float32"}
        _changed(plan_file, workload={"inputs": [images]})
        refusal = ask(capsys, "run", plan_file, "--data", TOKENS).refusal
        assert "the model reads pixel_values; leave --data out" in refusal

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--processes", "0"), "--processes 0; probe at least 1"),
            (("--seconds", "0"), "--seconds 0 is not above 0"),
            (("--seconds", "nan"), "--seconds nan is not above 0"),
            (("-o", "no/probe.json"), "no is not a folder"),
        ],
    )
    def test_probes(
        self, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert said in ask(capsys, "probe", *words).refusal


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is all of a torchrun of one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", str(port)),
        ("GLOO_SOCKET_IFNAME", "lo"),
    ):
        monkeypatch.setenv(name, value)


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
        return _changed(lone_file, cluster={"fingerprint": "another", "name": "there"})

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
        refusal = ask(capsys, "run", foreign).refusal
        assert refusal.startswith("the plan is for there, not for this machine: ")
        assert "--force" in refusal
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
    refusal = ask(capsys, "run", plan_file, "--steps", "1").refusal
    assert refusal.startswith("1 processes were started, the plan's mesh (dp_shard2")
    assert "needs 2; start it with torchrun --nproc-per-node 2" in refusal


@pytest.mark.usefixtures("as_rank")
def test_a_plan_for_another_model_is_refused_with_the_difference(
    lone_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((TINY / "config.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("run", lone_file, "--steps", "1", "--model", f"hf:{tmp_path}")
    refusal = ask(capsys, *words).refusal
    assert refusal.startswith("the plan is for tiny-llama (1,640,576 parameters in ")


def test_another_cluster_can_be_forced(
    lone_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _changed(lone_file, cluster={"fingerprint": "another", "name": "there"})
    assert "the plan is for there" in ask(capsys, "run", lone_file).refusal
    asked: list[int] = []

    def launched(*_: object, processes: int, **__: object) -> list[object]:
        asked.append(processes)
        return [{"losses": [2.0, 1.0], "step_times_s": [1.0], "measurement": None}]

    monkeypatch.setattr(LAUNCHER, "launch", launched)
    answer = ask(capsys, "run", lone_file, "--force")
    assert asked == [1]
    assert answer.code == 0
    assert answer.out.startswith("loss 2.0000 -> 1.0000 in 2 steps on 1 processes (")


def test_a_loss_that_diverged_is_still_json(
    lone_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {"losses": [1.0, float("nan")], "step_times_s": [1.0], "measurement": None}
    monkeypatch.setattr(LAUNCHER, "launch", lambda *_, **__: [result])
    assert ask(capsys, "run", lone_file, "--json").json["losses"] == [1.0, "NaN"]


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
