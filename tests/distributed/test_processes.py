"""Real processes, from outside: a rank killed in a step, and torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from executors import launch
from planner.errors import RankFailedError
from planner.schema import Plan
from tests.distributed.cases import build, make_plan

ROOT = Path(__file__).parents[2]


def train_and_die(args: dict[str, Any], emit: Callable[[Any], None]) -> list[float]:
    """Rank 1 kills itself between two steps, while rank 0 is in a collective."""
    import torch

    from executors import run
    from executors.data import synthetic_batch

    torch.set_num_threads(1)
    plan = Plan.from_json(args["plan"])
    emit(os.getpid())

    def data(step: int) -> dict[str, Any]:
        if step == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return synthetic_batch(plan.workload, step)

    result = run(plan, lambda: build("gpt2"), data, steps=args["steps"])
    return list(result.losses)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(2, marks=pytest.mark.further),
        pytest.param(5, marks=pytest.mark.slow),
    ],
)
def test_a_rank_killed_in_training_is_named_and_nobody_stays(steps: int) -> None:
    plan = make_plan("gpt2", dp_shard=2, zero_stage=3)
    pids: list[int] = []
    arguments = {"plan": plan.to_json(), "steps": steps}
    entry = f"{__name__}:train_and_die"

    def start() -> list[Any]:
        return launch(
            entry,
            arguments,
            processes=2,
            on_message=lambda _, pid: pids.append(pid),
        )

    if steps == 2:
        first, second = start()
        assert first == second
        assert len(first) == 2
    else:
        with pytest.raises(RankFailedError, match="rank 1 of 2 was killed by SIGKILL"):
            start()
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)
    assert len(pids) == 2


@pytest.mark.further
def test_the_example_trains_under_torchrun(tmp_path: Path) -> None:
    plan = make_plan("llama", dp_shard=2, zero_stage=2)
    plan.save(tmp_path / "plan.json")
    build("llama").config.save_pretrained(tmp_path)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "2", str(ROOT / "examples" / "train.py")),
        *(str(tmp_path / "plan.json"), str(tmp_path), "--steps", "3"),
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
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in steps] == ["step 1", "step 2", "step 3"]
