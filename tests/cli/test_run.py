"""``meshwright run`` and ``probe``: real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cluster import Cluster
from planner.schema.measurement import Measurement
from tests.cli import models
from tests.cli.runs import FAILS, LAUNCHER, TOKENS, changed, two_stages
from tests.cli.shell import ask, meshwright
from tests.plans import local_plan


def test_a_run_measures_and_reports(
    plan_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "measured.json"
    words = ("run", plan_file, "--steps", "3", "--data", TOKENS, "-o", out)
    words = (*words, "--check-first-step")
    answer = meshwright(*words, "--json")
    assert answer.code == 0, answer.err
    notes = answer.err.splitlines()
    assert notes[0].startswith("starting 2 processes: ")
    assert [note.split(":")[0] for note in notes[1:4]] == [
        f"step {n} of 3" for n in (1, 2, 3)
    ]
    assert notes[4:] == [f"wrote {out}"]
    result = answer.json
    checked = result["first_step_check"]
    assert checked["loss"] == pytest.approx(checked["whole_loss"], rel=1e-6)
    assert checked["loss"] == pytest.approx(result["losses"][0], rel=1e-6)
    assert checked["grad_norm"] == pytest.approx(checked["whole_grad_norm"], rel=1e-5)
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
    again = ask(capsys, *words)
    assert again.err.splitlines()[-1] == (
        f"first step as in one process: loss {checked['loss']:.6g} "
        f"({checked['whole_loss']:.6g}), gradient norm {checked['grad_norm']:.6g} "
        f"({checked['whole_grad_norm']:.6g})"
    )
    first, header, *rows = again.out.splitlines()
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


@pytest.mark.further
def test_a_plan_that_trains_on_wrong_numbers_ends_before_it_trains(
    tmp_path: Path,
) -> None:
    path = tmp_path / "plan.json"
    local_plan(2, cp=2).save(path)
    words = ("run", path, "--model", "tests.cli.models:mixing", "--steps", "2")
    assert meshwright(*words).code == 0
    answer = meshwright(*words, "--check-first-step")
    assert answer.code == 1
    assert answer.out == ""
    assert answer.err.splitlines()[-1].startswith("meshwright: the first step has loss")
    assert not any(line.startswith("step 1") for line in answer.err.splitlines())


@pytest.mark.further
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


@pytest.mark.further
def test_a_sequential_is_cut_and_trained(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    two_stages(models.stacked()).save(path)
    words = ("--model", "tests.cli.models:stacked", "--steps", "3", "--json")
    losses = meshwright("run", path, *words).json["losses"]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 3


@pytest.mark.further
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
    assert "INFO:executors.monitor:rank 1 of 2:" in said
    assert "Traceback (most recent call last):" in said
    assert "LookupError: no table for 3" in said


def test_another_cluster_can_be_forced(
    lone_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(lone_file, cluster={"fingerprint": "another", "name": "there"})
    assert "the plan is for there" in ask(capsys, "run", lone_file).error
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
