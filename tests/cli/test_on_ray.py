"""``meshwright run --on ray`` and the exported script: a real Ray, two workers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from planner import plan
from planner.cli import on_ray
from planner.cluster import Cluster
from planner.errors import ExecutionError, RankFailedError
from planner.schema import Precision
from tests.cli import models
from tests.cli.shell import ask, meshwright
from tests.plans import TINY, local_plan

ray = pytest.importorskip("ray", reason="ray is not installed")

#: Ray's own: of its defaults, and of sockets that it leaves to the collector.
pytestmark = [
    # Half a minute on two idle cores; Ray's processes wait long for busy ones, which is
    # why what trains under Ray is left to make test-all.
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\."),
    pytest.mark.filterwarnings(r"ignore::FutureWarning:ray\."),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _train() -> None:
    """Imported where a test of this file runs: it takes seconds."""
    pytest.importorskip("ray.train", reason="ray[train] is not installed")


TOKENS = TINY / "genesis.npy"
#: As printed, with all digits.
LOSSES = re.compile(r"loss (\S+) -> (\S+) in 2 steps")


@pytest.fixture(scope="module")
def two_cpus() -> Iterator[str]:
    """A Ray of this machine with two CPUs; its address."""
    context = ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False
    )
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    local_plan(2, dp_shard=2).save(path)
    return path


@pytest.fixture(scope="module")
def losses(plan_file: Path) -> tuple[float, ...]:
    """Losses of ``meshwright run``, without Ray."""
    done = meshwright("run", plan_file, "--steps", "2", "--data", TOKENS, "--json")
    assert done.code == 0, done.err
    return tuple(done.json["losses"])


@pytest.mark.slow
def test_the_loss_is_that_of_run(
    two_cpus: str,
    plan_file: Path,
    losses: tuple[float, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("run", plan_file, "--steps", "2", "--data", TOKENS, "--on", "ray")
    answer = ask(capsys, *words, "--json")
    assert answer.code == 0, answer.err
    assert tuple(answer.json["losses"]) == pytest.approx(losses, rel=1e-6)
    assert "starting 2 Ray workers: dp_shard2" in answer.err
    # Whose Ray was there before is not stopped.
    assert ray.is_initialized()


@pytest.mark.slow
def test_the_exported_script_trains_to_the_same_loss(
    two_cpus: str, plan_file: Path, losses: tuple[float, ...], tmp_path: Path
) -> None:
    local_plan(2, dp_shard=2).export("ray", tmp_path)
    ran = subprocess.run(
        [
            *(sys.executable, str(tmp_path / "train.py"), "--steps", "2"),
            *("--data", str(TOKENS), "--storage", str(tmp_path / "results")),
        ],
        env={**os.environ, "RAY_ADDRESS": two_cpus},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = LOSSES.search(ran.stdout)
    assert found, ran.stdout
    assert found.groups() == tuple(f"{loss:.4f}" for loss in losses)


def test_more_ranks_than_cpus_are_refused(
    two_cpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "four.json"
    local_plan(4, dp_shard=4).save(path)
    error = ask(capsys, "run", path, "--on", "ray").error
    assert "the Ray cluster has 2 CPUs, the plan has 4 ranks with one each" in error
    assert "ray start" in error


@pytest.mark.slow
def test_the_script_does_not_wait_for_cpus_either(
    two_cpus: str, tmp_path: Path
) -> None:
    local_plan(4, dp_shard=4).export("ray", tmp_path)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")],
        env={**os.environ, "RAY_ADDRESS": two_cpus},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 1
    assert "the Ray cluster has 2 CPU, the plan's 4 ranks need 4" in ran.stderr


def test_gpus_that_ray_does_not_have(
    two_cpus: str, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(plan_file.read_text())
    data["cluster"]["device_types"] = {"h100-80": 2}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    error = ask(capsys, "run", path, "--on", "ray").error
    assert "the Ray cluster has 0 GPUs, the plan has 2 ranks" in error


def test_without_ray_it_says_what_to_install(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray.train.torch", None)
    error = ask(capsys, "run", plan_file, "--on", "ray").error
    assert "pip install 'meshwright[ray]'" in error


@pytest.mark.slow
def test_what_a_rank_raised_is_said(
    two_cpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan(
        models.failing()[0],
        Cluster.detect(processes=2),
        global_batch=4,
        example_inputs=models.failing()[1],
        pin={"dp_replicate": 2},
        precision=Precision(compute="float32"),
    )
    path = tmp_path / "plan.json"
    made.save(path)
    answer = ask(
        capsys, *("run", path, "--on", "ray", "--model", "tests.cli.models:failing")
    )
    assert answer.code == 1
    told = answer.err.splitlines()[-1]
    assert re.search(r"rank \d of 2 raised LookupError: no table for 3", told), told
    # The workers are gone, and with them what they held.
    assert ray.is_initialized()


@pytest.mark.slow
def test_nobody_is_left_of_a_ray_that_was_started(
    plan_file: Path, losses: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _rays()
    done = meshwright(
        *("run", plan_file, "--steps", "2", "--data", TOKENS, "--on", "ray"),
        *("--ray-address", "local", "--measure"),
    )
    assert done.code == 0, done.err
    assert done.out.startswith(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in 2 steps")
    assert "predicted" in done.out
    assert _rays() <= before


def _rays() -> set[int]:
    names = ("raylet", "gcs_server", "ray::")
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        if any(name in words for name in names):
            found.add(process.pid)
    return found


def test_no_cluster_at_an_address(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nobody:
        @staticmethod
        def init(**_: Any) -> None:
            raise ConnectionError("nobody\nthere")

    with pytest.raises(ExecutionError, match="no Ray cluster at far:1: nobody there"):
        on_ray._connect(Nobody, "far:1", 2, {})
    monkeypatch.setenv("RAY_ADDRESS", "far:2")
    with pytest.raises(ExecutionError, match="no Ray cluster at far:2"):
        on_ray._connect(Nobody, None, 2, {})


def test_causes_are_told_in_order() -> None:
    own = ExecutionError("the loss is nan")
    told = [
        (1, {"own": None, "said": "RuntimeError: closed", "traceback": "T"}),
        (0, {"own": own, "said": "", "traceback": ""}),
    ]
    assert on_ray._cause(RuntimeError("x"), told, 2) is own
    failed = on_ray._cause(RuntimeError("x"), told[:1], 2)
    assert isinstance(failed, RankFailedError)
    assert "rank 1 of 2 raised RuntimeError: closed" in str(failed)
    assert failed.__notes__ == ["T"]
    lost = RuntimeError("workers")
    lost.worker_failures = {1: RuntimeError("out of\nmemory")}  # type: ignore[attr-defined]
    assert "rank 1 of 2 died: out of memory" in str(on_ray._cause(lost, [], 2))
    late = RuntimeError("controller")
    late.controller_failure = TimeoutError("no room")  # type: ignore[attr-defined]
    assert "did not start the 2 ranks: no room" in str(on_ray._cause(late, [], 2))
