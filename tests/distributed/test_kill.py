"""Ranks killed outright: the run ends, the checkpoints are whole, and it goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from executors import launch, run
from executors.checkpoints.folder import CheckpointFolder, damage
from executors.data import synthetic_batch
from planner.errors import RankFailedError
from planner.schema import Optimizer, Plan
from tests.distributed.cases import build, make_plan
from tests.distributed.pool import Pool, PoolError

ROOT = Path(__file__).parents[2]
STEPS, LONG = 8, 100


def _plan() -> Plan:
    momentum = Optimizer(name="SGD", learning_rate=0.1, momentum=0.9)
    return make_plan("llama", dp_shard=2, zero_stage=3, optimizer=momentum)


def train(plan_json: str, options: dict[str, Any]) -> tuple[list[float], int]:
    """Losses and first step; ``doom`` is (rank, seconds after its second step)."""
    plan = Plan.from_json(plan_json)
    victim, delay = options.pop("doom", (None, 0.0))

    def data(step: int) -> dict[str, Any]:
        if step == 1 and dist.get_rank() == victim:
            kill = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
            kill.daemon = True
            kill.start()
        return synthetic_batch(plan.workload, step)

    result = run(plan, lambda: build(plan.model.name), data, **options)
    return list(result.losses), result.first_step


@pytest.fixture(scope="module")
def straight(pool: Pool) -> list[float]:
    """Losses of the run that nobody kills."""
    return pool.run(train, 2, _plan().to_json(), {"steps": LONG})[0][0]


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.further),
        *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)),
    ],
)
def test_killed_at_any_moment_the_latest_is_whole(
    pool: Pool, tmp_path: Path, straight: list[float], seed: int
) -> None:
    chance = random.Random(seed)
    kept = {
        "checkpoint_dir": str(tmp_path / "kept"),
        "checkpoint_every": 1,
        "background_checkpoints": seed % 2 == 1,
    }
    doom = (chance.randrange(2), chance.uniform(0.0, 0.6))
    endless = kept | {"steps": 100_000, "doom": doom}
    with pytest.raises(PoolError, match=r"died|closed|reset"):
        pool.run(train, 2, _plan().to_json(), endless)
    folder = CheckpointFolder(tmp_path / "kept")
    done = folder.steps()
    for step in done:
        for name, written in folder.read_record(folder.of(step).name).files.items():
            assert damage(folder.of(step) / name, written) is None
    until = max([0, *done]) + 3
    resumed = kept | {"steps": until, "resume": True}
    losses, first = pool.run(train, 2, _plan().to_json(), resumed)[0]
    # Killed between the renaming and the pointer, it goes on from the one before.
    assert first in (done[-2:] or [0])
    assert losses == pytest.approx(straight[first:until], rel=1e-5)
    assert not list((tmp_path / "kept").glob("*.tmp"))


def keep_training(args: dict[str, Any], emit: Callable[[Any], None]) -> None:
    """Train until something ends it; tell who and how far."""
    torch.set_num_threads(1)
    plan = Plan.from_json(args["plan"])
    emit({"pid": os.getpid()})
    run(
        plan,
        lambda: build(plan.model.name),
        steps=10_000,
        on_step=lambda report: emit({"step": report.step}),
        checkpoint_dir=args["folder"],
        checkpoint_every=2,
    )


@pytest.mark.further
def test_a_killed_rank_ends_the_run_and_its_checkpoints_stay(
    pool: Pool, tmp_path: Path, straight: list[float]
) -> None:
    pids: dict[int, int] = {}
    folder = CheckpointFolder(tmp_path / "kept")

    def heard(rank: int, message: dict[str, int]) -> None:
        pids.setdefault(rank, message.get("pid", 0))
        if message.get("step") == 4:
            os.kill(pids[1], signal.SIGKILL)

    arguments = {"plan": _plan().to_json(), "folder": str(folder.path)}
    with pytest.raises(RankFailedError, match="rank 1 of 2 was killed by SIGKILL"):
        launch(f"{__name__}:keep_training", arguments, processes=2, on_message=heard)
    assert sorted(pids) == [0, 1]
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids.values()):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)
    # Told of step 4, which begins after the checkpoint of 4 steps was written.
    until = folder.steps()[-1] + 2
    assert until >= 6
    resumed = {"steps": until, "checkpoint_dir": str(folder.path), "resume": True}
    losses, first = pool.run(train, 2, _plan().to_json(), resumed)[0]
    assert first >= 4
    assert losses == pytest.approx(straight[first:until], rel=1e-5)


@pytest.mark.further
def test_torchrun_restarts_from_the_last_checkpoint(
    tmp_path: Path, straight: list[float]
) -> None:
    _plan().save(tmp_path / "plan.json")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"),
        str(ROOT / "tests" / "distributed" / "restarts.py"),
        *(str(tmp_path / "plan.json"), str(tmp_path / "kept"), str(STEPS), "1", "5"),
    ]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["first"] == 4
    assert answer["losses"] == pytest.approx(straight[4:STEPS], rel=1e-5)
