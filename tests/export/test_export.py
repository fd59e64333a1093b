"""Targets: what is written where, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.errors import ExportError, PlanFileError, UnknownNameError
from planner.export import export
from planner.schema import Plan
from tests.plans import TINY, gpt2_plan, local_plan


def _script(plan: Plan, folder: Path) -> str:
    assert plan.export("torchrun", folder) == (
        str(folder / "plan.json"),
        str(folder / "run.sh"),
    )
    path = folder / "run.sh"
    subprocess.run(["sh", "-n", str(path)], check=True)
    assert os.access(path, os.X_OK)
    return path.read_text()


def _with(plan: Plan, **parts: dict[str, object]) -> Plan:
    changes = {
        name: getattr(plan, name).model_copy(update=update)
        for name, update in parts.items()
    }
    return plan.model_copy(update=changes)


def test_json_is_what_save_writes(tmp_path: Path) -> None:
    plan = gpt2_plan()
    plan.save(tmp_path / "saved.json")
    assert plan.export("json", tmp_path / "out") == (str(tmp_path / "out/plan.json"),)
    exported = tmp_path / "out" / "plan.json"
    assert exported.read_bytes() == (tmp_path / "saved.json").read_bytes()
    assert Plan.load(exported) == plan


@pytest.mark.parametrize("target", ["json", "torchrun"])
def test_every_target_holds_the_plan(target: str, tmp_path: Path) -> None:
    export(gpt2_plan(), target, tmp_path)
    assert Plan.load(tmp_path / "plan.json") == gpt2_plan()


def test_one_host_needs_no_address(tmp_path: Path) -> None:
    script = _script(gpt2_plan(), tmp_path)
    assert "torchrun --standalone --nproc-per-node=8 --no-python meshwright" in script
    assert "NODE_RANK" not in script
    assert "CUDA_VISIBLE_DEVICES" not in script


def test_many_hosts_ask_for_rank_and_address(tmp_path: Path) -> None:
    script = _script(gpt2_plan("dgx-a100:2"), tmp_path)
    assert "--nnodes=2 " in script
    assert "--nproc-per-node=8 " in script
    bare = {k: v for k, v in os.environ.items() if k not in {"NODE_RANK"}}
    ran = subprocess.run(
        ["sh", str(tmp_path / "run.sh")],
        env=bare,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    assert "set NODE_RANK, 0 to 1" in ran.stderr


def test_devices_that_are_left_out_are_hidden(tmp_path: Path) -> None:
    plan = _with(
        gpt2_plan("dgx-a100:2"),
        strategy={
            "device_ranges": ((4, 8), (12, 16)),
            "mesh": _mesh(8),
            "virtual_stages": 1,
            "stages": (),
        },
    )
    script = _script(plan, tmp_path)
    assert "--nproc-per-node=4 " in script
    assert "export CUDA_VISIBLE_DEVICES=4,5,6,7\n" in script


def test_a_plan_on_later_hosts_names_them(tmp_path: Path) -> None:
    plan = _with(
        gpt2_plan("dgx-a100:4"),
        strategy={
            "device_ranges": ((16, 32),),
            "mesh": _mesh(16),
            "virtual_stages": 1,
            "stages": (),
        },
    )
    assert "hosts 2 to 3 of the\n# cluster" in _script(plan, tmp_path)


def _mesh(degree: int) -> object:
    return gpt2_plan().strategy.mesh.model_copy(update={"dp_shard": degree})


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (((0, 8), (8, 12)), r"hosts hold 4 to 8 of the 12 ranks"),
        (((0, 4), (12, 16)), r"use different devices \(some are occupied\)"),
    ],
)
def test_what_torchrun_cannot_say_is_refused(
    ranges: tuple[tuple[int, int], ...], message: str, tmp_path: Path
) -> None:
    count = sum(stop - start for start, stop in ranges)
    plan = _with(
        gpt2_plan("dgx-a100:2"),
        strategy={"device_ranges": ranges, "mesh": _mesh(count)},
    )
    with pytest.raises(ExportError, match=message):
        plan.export("torchrun", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_hosts_of_different_sizes_are_refused(tmp_path: Path) -> None:
    plan = _with(gpt2_plan("dgx-a100:2"), cluster={"hosts": ((1, 4), (1, 12))})
    with pytest.raises(ExportError, match="wants the same number on each"):
        plan.export("torchrun", tmp_path)


def test_a_plan_that_does_not_know_its_hosts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"cluster\.hosts=\(\)"):
        _with(gpt2_plan(), cluster={"hosts": ()}).export("torchrun", tmp_path)


def test_a_plan_that_cannot_be_run_is_refused_for_torchrun(tmp_path: Path) -> None:
    plan = gpt2_plan().model_copy(update={"not_runnable": ("cp=2 is not run yet",)})
    with pytest.raises(ExportError, match="do not run it: cp=2"):
        plan.export("torchrun", tmp_path)
    assert plan.export("json", tmp_path)


def test_an_unknown_target_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'torchrun'"):
        gpt2_plan().export("torch-run", tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanFileError, match="cannot write into the folder"):
        gpt2_plan().export("json", tmp_path / "file" / "out")


def test_the_script_trains(tmp_path: Path) -> None:
    """From another folder, with what the plan names relative to where it is run."""
    plan = _with(local_plan(2, dp_shard=2), model={"ref": f"hf:{TINY.name}"})
    _script(plan, tmp_path)
    here = str(Path(sys.executable).parent)
    ran = subprocess.run(
        [str(tmp_path / "run.sh"), "--steps", "2"],
        cwd=TINY.parent,
        env={
            **os.environ,
            "PATH": here + os.pathsep + os.environ["PATH"],
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line for line in ran.stdout.splitlines() if line.startswith("loss ")]
    assert len(lines) == 1
    assert "in 2 steps on 2 processes" in lines[0]
