"""``meshwright run`` by a plan of local steps, a copy of which is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from planner.schema import Plan
from tests.cli.shell import Answer, ask, start
from tests.executors.launching.test_launcher import _gone
from tests.plans import local_plan

_STEPS = 40
_CONTINUE = "local_steps:period=4,on_failure=continue"


def _save(path: Path, pin: str) -> Path:
    made: Plan = local_plan(2, dp_replicate=2, synchronisation=pin)
    made.save(path)
    return path


def _run_and_kill(plan: Path, *options: str) -> tuple[Answer, list[int]]:
    """Kill rank 1 in its fifth step or later; the answer, and all processes."""
    said, pids = "", []
    with start("run", plan, "--steps", f"{_STEPS}", *options) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stderr:
            said += line
            if line.startswith("step 4 of") and not pids:
                # The spawner; the ranks are its children, in their order.
                (spawner,) = psutil.Process(process.pid).children()
                ranks = sorted(spawner.children(), key=lambda one: one.pid)
                pids = [spawner.pid, *(rank.pid for rank in ranks)]
                os.kill(pids[2], signal.SIGKILL)
        out = process.stdout.read()
    return Answer(code=process.returncode, out=out, err=said), pids


def test_a_plan_that_stops_ends_with_the_name_of_the_rank(tmp_path: Path) -> None:
    plan = _save(tmp_path / "plan.json", "local_steps:period=4")
    answer, pids = _run_and_kill(plan)
    assert answer.code == 1
    assert answer.out == ""
    said = "meshwright: rank 1 of 2 was killed by SIGKILL; the other ranks were stopped"
    assert said in answer.err
    assert _gone(pids)


def test_a_plan_that_continues_ends_well(tmp_path: Path) -> None:
    answer, pids = _run_and_kill(_save(tmp_path / "plan.json", _CONTINUE))
    assert answer.code == 0, answer.err
    assert "rank 1 of 2 was killed by SIGKILL; the others continue" in answer.err
    assert f"in {_STEPS} steps on 2 processes" in answer.out
    assert _gone(pids)


def test_a_copy_is_started_again(tmp_path: Path) -> None:
    plan = _save(tmp_path / "plan.json", f"{_CONTINUE},min_replicas=2")
    answer, _ = _run_and_kill(plan, "--max-restarts", "1")
    assert answer.code == 0, answer.err
    assert "rank 1 of 2 was killed by SIGKILL; it is started again" in answer.err
    assert f"in {_STEPS} steps on 2 processes" in answer.out


@pytest.mark.parametrize(
    ("pin", "options", "said"),
    [
        ("local_steps:period=4", ("--max-restarts", "1"), "but the plan stops when"),
        (_CONTINUE, ("--max-restarts", "-1"), "give a number of at least 0"),
        (_CONTINUE, ("--on", "slurm"), "use --on local, or on_failure=stop"),
    ],
)
def test_options_that_do_not_go_with_the_plan_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    pin: str,
    options: tuple[str, ...],
    said: str,
) -> None:
    plan = _save(tmp_path / "plan.json", pin)
    assert said in ask(capsys, "run", plan, *options).error


def test_torchrun_is_no_launcher_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = _save(tmp_path / "plan.json", _CONTINUE)
    said = ask(capsys, "export", plan, "--to", "torchrun", "-o", tmp_path / "out").error
    assert "on_failure=continue: the launcher ends all ranks when one fails" in said
