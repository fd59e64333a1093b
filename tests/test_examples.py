"""Each program of examples/ does in its short form what it says."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from planner import plan
from planner.schema import Optimizer, Precision

EXAMPLES = Path(__file__).parents[1] / "examples"


def _run(name: str, *words: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """In this process, which has imported what they need; as ``python NAME`` would."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_a_module_of_ones_own_is_planned(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _run("plan_your_own_module.py", "--quick", monkeypatch=monkeypatch, folder=tmp_path)
    said = capsys.readouterr().out
    assert "8 units that a pipeline could be cut between" in said
    assert "text.*.qkv: read their features in fixed numbers" in said
    assert "model      PictureAndText, 10.2M parameters" in said
    assert "runners-up" in said


def test_mixed_gpus_share_a_pipeline(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _run("mixed_gpus.py", "--quick", monkeypatch=monkeypatch, folder=tmp_path)
    said = capsys.readouterr().out
    units = re.findall(r"^pp rank \d: GPUs .* \((.*?)\), (\d+) units", said, re.M)
    assert {kind for kind, _ in units} == {"h100-80", "a100-40", "v100-16"}
    held = {kind: int(count) for kind, count in units}
    assert held["v100-16"] < held["h100-80"]
    gained = re.search(r"takes ([\d.]+) times", said)
    assert gained is not None
    assert 0.5 < float(gained[1]) < 3.0


def test_no_strategy_by_hand_beats_the_plan(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _run("compare_strategies.py", "--quick", monkeypatch=monkeypatch, folder=tmp_path)
    said = capsys.readouterr().out
    assert len(re.findall(r" ms +[\d.]+ GB  compute", said)) == 6
    times = re.search(r"the best by hand takes ([\d.]+) times as long", said)
    assert times is not None
    assert float(times[1]) >= 1.0


@pytest.mark.further
def test_processes_train_to_the_losses_of_one(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _run("train_by_plan.py", "--quick", monkeypatch=monkeypatch, folder=tmp_path)
    said = capsys.readouterr().out
    assert "2 processes: pp2" in said
    assert len(re.findall(r"^  step \d: ", said, re.M)) == 6
    fell = re.search(r"fell from ([\d.]+) to ([\d.]+)", said)
    assert fell is not None
    assert float(fell[2]) < float(fell[1])


def test_jobs_are_placed_by_a_rule_and_by_what_was_learned(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _run("job_stream.py", "--quick", monkeypatch=monkeypatch, folder=tmp_path)
    said = capsys.readouterr().out
    counts = [
        sum(map(int, re.findall(r"^ +(\d+) x ", part, re.M)))
        for part in said.split("learned:")
    ]
    # Both saw the same jobs.
    assert counts[0] == counts[1] > 20
    rates = re.findall(r"([\d.]+)% of the jobs|rule ([\d.]+)%", said.splitlines()[-1])
    assert all(0.0 < float(a or b) < 100.0 for a, b in rates)


@pytest.mark.further
def test_ppo_trains_on_elastic_jobs_beside_rules(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MESHWRIGHT_DATA", raising=False)
    _run("elastic_ppo.py", "2000", monkeypatch=monkeypatch, folder=tmp_path)
    found = re.findall(r"^  (\S+) +([\d.]+)%$", capsys.readouterr().out, re.M)
    blocked = {name: float(share) for name, share in found}
    # Without training it is about 57.
    assert 0.0 < blocked["cheapest-first"] < blocked["elasticflow"]
    assert blocked["elasticflow"] < blocked["PPO"] < 60.0


def test_the_program_for_torchrun_trains(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiny = EXAMPLES / "tiny-llama"
    found = plan(
        f"hf:{tiny}",
        "local:1",
        global_batch=4,
        seq_len=16,
        precision=Precision(compute="float32"),
        partitioner="expert",
    )
    found.save(tmp_path / "plan.json")
    with caplog.at_level("INFO"):
        _run(
            *("train.py", "plan.json", str(tiny), "--steps", "2"),
            monkeypatch=monkeypatch,
            folder=tmp_path,
        )
    assert [record.message[:7] for record in caplog.records][-2:] == [
        "step 1:",
        "step 2:",
    ]


@pytest.mark.further
def test_saved_weights_are_tuned_stopped_and_gone_on_with(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")
    words = ("--processes", "2", "--steps", "6", "--folder", str(tmp_path / "tuning"))
    _run("finetune.py", *words, monkeypatch=monkeypatch, folder=tmp_path)
    said = capsys.readouterr().out
    losses = [
        float(x) for x in re.findall(r"(?:after step \d+|transformers): (.*)", said)
    ]
    assert len(losses) == 5
    begun, stopped, went_on, ended, loaded = losses
    assert stopped == went_on < begun
    assert ended == loaded < stopped


def _finetune(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Begin examples/finetune.py in a process of its own."""
    paths = os.pathsep.join((str(EXAMPLES), os.environ.get("PYTHONPATH", "")))
    size = ("--processes", "2", "--steps", "8", "--every", "1", "--folder", str(folder))
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / "finetune.py"), *size, *words],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tuning_that_is_killed_goes_on_to_the_same_loss(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    said, _ = _finetune(whole).communicate(timeout=600)
    ended = re.findall(r"after step 8: (.*)", said)[-1]

    process = _finetune(killed)
    while not (killed / "kept" / "step-000003").exists():
        assert process.poll() is None
        time.sleep(0.01)
    # Its workers are in process groups of their own.
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for one in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(below, timeout=10)
    before, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert "after step 8" not in before

    again = _finetune(killed, "--resume")
    after, _ = again.communicate(timeout=600)
    assert again.returncode == 0
    (begun,) = re.findall(r"after step (\d+): ", after.splitlines()[0])
    assert 2 <= int(begun) < 8
    assert re.findall(r"after step 8: (.*)", after) == [ended]
    # Not only to the digits that are printed.
    weights = [
        load_file(folder / "tuned" / "model.safetensors") for folder in (whole, killed)
    ]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


@pytest.mark.further
def test_home_pcs_send_what_is_predicted(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")
    words = ("--quick", "--steps", "10")
    _run("home_pcs.py", *words, monkeypatch=monkeypatch, folder=tmp_path)
    said = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"^step \d+: loss (.*)", said, re.M)]
    assert losses[-1] < losses[0]
    counted = re.findall(r"member \d+: ([\d,]+), predicted ([\d,]+)", said)
    assert len(counted) > 1
    for sent, predicted in counted:
        # Parts of rings are whole values.
        assert abs(int(sent.replace(",", "")) - int(predicted.replace(",", ""))) < 64


def _changed_lines(plain: str, own: str) -> list[str]:
    """Lines of code that are in the second file alone."""
    codes = [(EXAMPLES / name).read_text().split('"""', 2)[2] for name in (plain, own)]
    found = difflib.ndiff(*(code.splitlines() for code in codes))
    return [line for line in found if line.startswith("+ ") and line.strip("+ ")]


@pytest.mark.further
def test_a_loop_of_plain_torch_runs_by_a_plan_with_few_changes(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(_changed_lines("plain_loop.py", "own_loop.py")) <= 6
    plain = runpy.run_path(str(EXAMPLES / "plain_loop.py"))
    torch.manual_seed(0)
    plain["build"]().save_pretrained(tmp_path / "weights")
    made = plan(
        plain["build"](),
        "local:2",
        example_inputs={"input_ids": ((1, plain["LENGTH"]), "int64")},
        global_batch=plain["SAMPLES"],
        precision=Precision(compute="float32"),
        optimizer=Optimizer(learning_rate=1e-3, weight_decay=0.01),
        grad_clip_norm=1.0,
        pin={"pp": 2},
    )
    made.save(tmp_path / "plan.json")
    _run("plain_loop.py", "weights", monkeypatch=monkeypatch, folder=tmp_path)
    alone = re.findall(r"^step \d+: loss (.*)", capsys.readouterr().out, re.M)
    (tmp_path / "weights-tuned").rename(tmp_path / "plain-tuned")
    said = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", EXAMPLES / "own_loop.py"),
            *("weights", "plan.json"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # Lines of two processes may stand on one.
    several = sorted(re.findall(r"step (\d): loss (\d\.\d{5})", said))
    assert len(several) == 2 * len(alone) == 2 * plain["STEPS"]
    losses = [float(x) for x in alone for _ in range(2)]
    found = [float(loss) for _, loss in several]
    assert found == pytest.approx(losses, abs=2e-5)
    assert losses[-1] < losses[0]
    tuned = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name)
        for name in ("plain-tuned", "weights-tuned")
    ]
    for ours, theirs in zip(*(one.parameters() for one in tuned), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
